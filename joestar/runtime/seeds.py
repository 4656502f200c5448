"""Seeds: checks, keyed shuffles, and padded batches."""

import torch
from torch import Tensor

from joestar.errors import ConfigError, SeedError
from joestar.graph_api import Graph
from joestar.graph_api.validate import ID_DTYPES, check_ids
from joestar.ops.hashing import key_state, row_state

SHUFFLE_SITE = 0xFFFFFFFF


def check_seeds(seeds, graph: Graph, name: str = "seeds") -> Tensor:
    """The seeds in the graph's id dtype.

    Raises:
        SeedError: unless ``seeds`` is a non-empty 1-d integer tensor of node ids on the graph's device. Duplicates are
            allowed: a row of the result each.
    """
    if not isinstance(seeds, Tensor):
        raise SeedError(f"{name} must be a tensor of node ids; got {type(seeds).__name__}.")
    if seeds.dtype == torch.bool:
        raise SeedError(f"{name} is a mask; give node ids: mask.nonzero().flatten().")
    if seeds.dtype not in ID_DTYPES:
        raise SeedError(f"{name} must be int64 or int32 node ids; got {seeds.dtype}.")
    if seeds.dim() != 1:
        raise SeedError(f"{name} must be one-dimensional; got shape {list(seeds.shape)}.")
    if not seeds.numel():
        raise SeedError(f"{name} is empty: a batch needs at least one node.")
    if seeds.device != graph.device:
        raise SeedError(f"{name} is on {seeds.device} and the graph on {graph.device}; move it with .to(graph.device).")
    check_ids(seeds, graph.num_nodes, name, SeedError)
    return seeds.to(graph.indices.dtype)


def check_batch_size(batch_size) -> int:
    """``batch_size`` if it is a positive integer."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a positive integer; got {batch_size!r}.")
    return batch_size


def shuffled(seeds: Tensor, key: Tensor) -> Tensor:
    """A permutation of the seeds that depends on (seed, epoch) only: positions sorted by their 62-bit hash."""
    position = torch.arange(seeds.numel(), device=seeds.device)
    epoch_key = torch.stack([key[0], key[1], torch.zeros_like(key[2])])
    a, b = row_state(key_state(epoch_key, SHUFFLE_SITE), position)
    return seeds[torch.argsort(((a >> 1) << 31) | (b >> 1), stable=True)]


def filled(seeds: Tensor, size: int) -> Tensor:
    """Seeds padded to ``size`` with their first entry."""
    if seeds.numel() == size:
        return seeds
    return torch.cat([seeds, seeds[:1].expand(size - seeds.numel())])
