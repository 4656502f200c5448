"""Seeds: checks, keyed shuffles, and padded batches."""

import weakref

import numpy as np
import torch
from torch import Tensor

from joestar.errors import ConfigError, SeedError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import to_ids, version
from joestar.graph_api.validate import ID_DTYPES, check_ids
from joestar.ops.hashing import host_key_state, row_state
from joestar.ops.step import launches
from joestar.whole_numbers import plain

SHUFFLE_SITE = 0xFFFFFFFF


def check_seeds(seeds, graph: Graph, name: str = "seeds") -> Tensor:
    """The seeds in the graph's id dtype; arrays and lists become tensors on the graph's device.

    Raises:
        SeedError: unless ``seeds`` are node ids, one-dimensional, at least one, and, if a tensor, on the graph's
            device. Duplicates are allowed: a row of the result each.
    """
    if seeds is None:
        raise SeedError(f"{name} is None, expected node ids: does the graph have this split (graph.train_idx, ...)?")
    if not isinstance(seeds, Tensor):
        seeds = to_ids(seeds, name, SeedError).to(graph.device)
    if seeds.dtype == torch.bool:
        raise SeedError(f"{name} is a mask; give node ids: mask.nonzero().flatten().")
    if seeds.layout != torch.strided:
        kind = f"a sparse tensor ({seeds.layout})"
        raise SeedError(f"{name} is {kind}; give node ids, its positions or {name}.to_dense().")
    if seeds.dtype not in ID_DTYPES:
        more = "" if seeds.dtype.is_floating_point or seeds.dtype.is_complex else " Convert them with .long()."
        raise SeedError(f"{name} must be int64 or int32 node ids; got {seeds.dtype}.{more}")
    if seeds.dim() != 1:
        raise SeedError(f"{name} must be one-dimensional; got shape {list(seeds.shape)}.")
    if not seeds.numel():
        raise SeedError(f"{name} is empty: a batch needs at least one node.")
    if seeds.device != graph.device:
        raise SeedError(f"{name} is on {seeds.device} and the graph on {graph.device}; move it with .to(graph.device).")
    check_ids(seeds, graph.num_nodes, name, SeedError)
    return seeds.to(graph.indices.dtype)


class CheckedSeeds:
    """``check_seeds`` that remembers the last tensors: looking at every id in every epoch makes the host wait."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._known: list[tuple] = []

    def __call__(self, idx) -> Tensor:
        """The seeds ``[n]`` in the graph's id dtype; the same tensor for the same unchanged ``idx``.

        Raises:
            SeedError: as ``check_seeds``.
        """
        if not isinstance(idx, Tensor):
            with torch.inference_mode(False):
                return check_seeds(idx, self.graph, "idx").clone()
        self._known = [known for known in self._known if known[0]() is not None]
        for reference, written, address, seeds in self._known:
            if reference() is idx and written == version(idx) and address == idx.data_ptr() and _as_it_was(idx, seeds):
                return seeds
        with torch.inference_mode(False):  # it is kept, and used outside
            seeds = check_seeds(idx, self.graph, "idx")
            if seeds is idx:
                seeds = idx.clone()  # what happens to the user's tensor does not reach an epoch under way
        if version(idx) is not None:
            self._known = [*self._known[-3:], (weakref.ref(idx), version(idx), idx.data_ptr(), seeds)]
        return seeds


def _as_it_was(idx: Tensor, seeds: Tensor) -> bool:
    """Whether ids on a CPU, which NumPy may have written to, are still those that were taken over."""
    return idx.device.type != "cpu" or torch.equal(idx.to(seeds.dtype), seeds)


def check_batch_size(batch_size) -> int:
    """``batch_size`` if it is a positive integer."""
    batch_size = plain(batch_size)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a positive integer; got {batch_size!r}.")
    return batch_size


def check_flag(name: str, value) -> None:
    """Raises ``ConfigError`` unless an option of an epoch is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        more = ": the order is keyed by the sampler's seed and the epoch" if name == "shuffle" else ""
        raise ConfigError(f"{name} must be True or False; got {value!r}{more}.")


def shuffled(seeds: Tensor, seed: int, epoch: int) -> Tensor:
    """A permutation of the seeds that depends on (seed, epoch) only: positions sorted by their 62-bit hash."""
    return seeds[torch.argsort(_hashes(seeds.numel(), seed, epoch, seeds.device), stable=True)]


def spread_nodes(number: int, graph: Graph, seed: int, epoch: int) -> Tensor:
    """So many nodes (slots) from all over the graph, in its id dtype: distinct ones where the graph is small."""
    nodes = graph.num_slots
    if nodes <= 4 * number:
        every = torch.arange(nodes, dtype=graph.indices.dtype, device=graph.device)
        return shuffled(every, seed, epoch)[:number]
    return (_hashes(number, seed, epoch, graph.device) % nodes).to(graph.indices.dtype)


def _hashes(n: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    """62-bit hashes of the positions below ``n``: int64 ``[n]``."""
    a, b = host_key_state(seed, epoch, 0, SHUFFLE_SITE)
    if device.type == "cuda" and launches.has_kernels():
        return launches.shuffle_keys(n, a, b, device)
    position = torch.arange(n, dtype=torch.int64, device=device)
    a, b = row_state((a, b), position)
    return ((a >> 1) << 31) | (b >> 1)


def filled(seeds: Tensor, size: int) -> Tensor:
    """Seeds padded to ``size`` with their first entry."""
    if seeds.numel() == size:
        return seeds
    return torch.cat([seeds, seeds[:1].expand(size - seeds.numel())])
