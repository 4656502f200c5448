"""Samplers with a state of their own: the first stage and the steps call them apart, and would draw apart."""

import io
import pickle
import random
import zlib

import numpy as np
import torch
from torch import Tensor, nn

from joestar.errors import SamplerError
from joestar.graph_api import Block, Graph
from joestar.locks import TRACING
from joestar.runtime.seeds import spread_nodes, version
from joestar.sampling import LayerDependentSampler, NeighborSampler
from joestar.stages.union import FirstStageContext

SEEDS = 32
_SMALL = 2**16
"""Bytes of tensors whose contents are looked at."""
_INSTEAD = (
    "With memory= and first_stage= the first stage and the steps both sample, at times of their own, and macro-batches "
    "are made again: sample() has to be a function of graph and seeds. Write instead: picks by individual_sample and "
    "collective_sample (keyed by seed, epoch, step and node), weights in graph.edata or graph.ndata."
)


def check_pure(sampler) -> None:
    """Samples a few seeds twice.

    Raises:
        SamplerError: the blocks differ, something that the sampler holds is another, or a global generator of random
            numbers was used.
    """
    if is_ours(sampler):
        return
    graph, name = sampler.graph, type(sampler).__name__
    seeds = _some_seeds(graph)
    held, drawn = _held(sampler), _generators()
    try:
        first, second = (sampled(sampler, graph, seeds) for _ in range(2))
    except Exception:  # its own error: it comes again where the sampler is used
        return
    for attribute, state in _held(sampler).items():
        if held.get(attribute) != state:
            raise SamplerError(f"{name}.sample changes {name}.{attribute}. {_INSTEAD}")
    for what, state in _generators().items():
        if drawn[what] != state:
            raise SamplerError(f"{name}.sample draws from {what}. {_INSTEAD}")
    if len(first) != len(second) or not all(map(_same, first, second)):
        raise SamplerError(f"{name}.sample gives other blocks when it is called again for the same seeds. {_INSTEAD}")


def is_ours(sampler) -> bool:
    """Whether it is one of Joestar's own, as it is."""
    return type(sampler) in (NeighborSampler, LayerDependentSampler) and "sample" not in vars(sampler)


def _some_seeds(graph: Graph) -> Tensor:
    given = spread_nodes(graph.num_nodes, graph, 0, 0) if graph.train_idx is None else graph.train_idx
    return given[:SEEDS].to(graph.indices.dtype)


@torch.no_grad()
def sampled(sampler, graph: Graph, seeds: Tensor, context: FirstStageContext | None = None) -> list[Block]:
    """The blocks of some seeds, drawn as in a first stage."""
    context = FirstStageContext((0, 0, 0)) if context is None else context
    with TRACING:  # as ``profile.sizes.measure``
        return list(sampler.sample(graph.with_context(context), seeds))


def _same(one: Block, other: Block) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("indptr", "indices", "srcs", "dsts"))


def _generators() -> dict[str, object]:
    """State of the generators that are everybody's."""
    legacy = np.random.get_state(legacy=False)
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(), "Python's random module": random.getstate(),
        "NumPy's random module": pickle.dumps(legacy),
    }  # fmt: skip


def _held(sampler) -> dict[str, object]:
    """Attribute -> what can be told of its state; large tensors by PyTorch's count of writes."""
    return {name: _state(value) for name, value in vars(sampler).items() if name != "graph"}


def _state(value) -> object:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # a lock, a file: its identity has to do
        return id(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors, graphs and generators as what tells whether they changed."""

    def persistent_id(self, value):
        if isinstance(value, Tensor):
            return id(value), version(value), _checksum(value)
        if isinstance(value, torch.Generator):
            return zlib.crc32(value.get_state().numpy())
        if isinstance(value, (Graph, nn.Module, type)):
            return id(value)
        return None


def _checksum(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > _SMALL:
        return 0
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
