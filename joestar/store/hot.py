"""Which nodes are worth a place on the device: by how often they are needed, measured, or expected beforehand.

The analytic prior is the probability that a batch needs a node, hop by hop from fanouts and degrees (SALIENT++'s
vertex inclusion probabilities, arXiv 2305.03152), for a sampler that at each hop draws anew for all nodes so far.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from joestar.errors import ConfigError, DataError, GraphError
from joestar.graph_api.arrays import to_ids
from joestar.kernels import has_native

_UNIT = 2.0**32
"""Costs (minus the logarithm of the probability not to be drawn) are integers, so that sums do not depend on order."""
_SURE = 16.0
"""The largest cost of one edge: a probability within 1e-7 of 1. 2**27 such edges still fit into 64 bits."""
_ROWS = 2**22
_EDGES = 2**24
_LEVEL_BITS = 11
_LEVELS = 2 ** (31 - _LEVEL_BITS)


def count_needed(batches: Iterable[Tensor], num_nodes: int, counts: Tensor | None = None) -> Tensor:
    """How many batches need each node.

    Args:
        batches: for each batch the ids that it needs, integers ``[n]``; duplicates count once. An iterable: batches
            are sampled as they are counted, and one is in memory at a time.
        counts: of earlier batches, int32 ``[num_nodes]``, added to in place.

    Returns:
        int32 ``[num_nodes]``.

    Raises:
        ConfigError: counts of another kind. GraphError: a batch that is no ids.
    """
    counts = torch.zeros(num_nodes, dtype=torch.int32, device="cpu") if counts is None else counts
    if counts.shape != (num_nodes,) or counts.dtype != torch.int32:
        raise ConfigError(f"counts: expected int32 [{num_nodes}], got {counts.dtype} {list(counts.shape)}")
    for ids in batches:
        ids = to_ids(ids, "a batch").to(counts.device, torch.int64)
        counts[ids] = counts[ids] + 1  # read before any is written: a duplicate writes the same number
    return counts


def sampled_needs(sample: Callable[[int], Tensor], first: int, last: int) -> Iterable[Tensor]:
    """``sample(i)`` for the batches ``i`` in ``[first, last)``, one at a time: what ``count_needed`` takes."""
    return (sample(i) for i in range(first, last))


def inclusion_probabilities(
    indptr: Tensor,
    indices: Tensor,
    fanouts: Sequence[int],
    seeds: Tensor,
    batch: int,
    replace: bool = False,
    every: int = 1,
) -> Tensor:
    """Probability that a batch needs a node: one pass over the edges per hop.

    Args:
        indptr: int64 ``[N + 1]``; indices: sources ``[E]``: the whole graph (CSC), on the CPU also mapped from files.
        fanouts: from the seeds outwards; -1 takes all neighbours. replace: whether neighbours are drawn with
            replacement.
        seeds: ids of the nodes that epochs go over. batch: seeds of a batch (of a macro-batch, where the first stage
            is meant).
        every: looks at the in-edges of one node in ``every``, each hop at others, and counts them ``every`` times: a
            rough order of the nodes in a fraction of the time.

    Returns:
        float32 ``[N]``. Needs 16 bytes per node beside it, and none per edge.

    Raises:
        ConfigError: no seeds, or a batch of none. GraphError: seeds that are no ids.
    """
    num_nodes, seeds = indptr.numel() - 1, to_ids(seeds, "seeds")
    if seeds.numel() == 0 or batch <= 0:
        raise ConfigError(f"expected seeds and a positive batch, got {seeds.numel()} seeds and a batch of {batch}")
    cost = torch.zeros(num_nodes, dtype=torch.int64, device=indptr.device)
    share = min(1.0, batch / seeds.numel())
    cost[seeds.to(cost.device, torch.int64)] = round(
        _cost(torch.tensor(share, dtype=torch.float64, device="cpu")).item() * _UNIT
    )
    value = torch.zeros_like(cost)
    for hop, fanout in enumerate(fanouts):
        if every > 1:
            value.zero_()
        for first in range(hop % every, num_nodes, _ROWS * every):
            rows = slice(first, min(first + _ROWS * every, num_nodes), every)
            degree = indptr[1:][rows] - indptr[:-1][rows]
            drawn = _probability(cost[rows]) * _edge_share(degree, fanout, replace)
            value[rows] = (_cost(drawn) * (_UNIT * every)).round().to(torch.int64)
        _add_row_values(indptr, indices, value, cost)
    return _in_parts(cost, _probability)


def _cost(probability: Tensor) -> Tensor:
    return torch.clamp(-torch.log1p(-probability), max=_SURE)


def _probability(cost: Tensor) -> Tensor:
    return -torch.expm1(-(cost.to(torch.float64) / _UNIT))


def _edge_share(degree: Tensor, fanout: int, replace: bool) -> Tensor:
    """Probability that a given in-edge is among those drawn, float64."""
    degree = degree.to(torch.float64)
    if fanout < 0:
        return torch.ones_like(degree)
    if replace:
        return -torch.expm1(fanout * torch.log1p(-1 / degree.clamp(min=1)))
    return torch.clamp(fanout / degree.clamp(min=1), max=1.0)


def _in_parts(cost: Tensor, function) -> Tensor:
    out = torch.empty(cost.numel(), dtype=torch.float32, device=cost.device)
    for first in range(0, cost.numel(), _ROWS):
        out[first : first + _ROWS] = function(cost[first : first + _ROWS])
    return out


def _add_row_values(indptr: Tensor, indices: Tensor, value: Tensor, out: Tensor) -> None:
    if out.is_cpu and has_native():
        from joestar.kernels import cpu_store

        return cpu_store.add_row_values(indptr, indices, value, out)
    for first in range(0, indices.numel(), _EDGES):
        part = indices[first : first + _EDGES].to(torch.int64)
        edge = torch.arange(first, first + part.numel(), device=indptr.device)
        row = torch.searchsorted(indptr, edge, right=True) - 1
        out.index_add_(0, part, value[row])
    return None


def choose_hot(score: Tensor, count: int) -> Tensor:
    """The ``count`` nodes of the highest score, in ascending order; among equals those of the lower id.

    Args:
        score: numbers ``[N]``, for example of ``count_needed``, without NaN. count: at most ``N`` are returned.

    Returns:
        int64 ids, ascending.
    """
    if score.dim() != 1 or count < 0:
        raise ConfigError(f"expected scores [N] and a count of at least 0, got {list(score.shape)} and {count}")
    if score.is_floating_point() and bool(torch.isnan(score).any()):
        raise GraphError("scores of nodes contain NaN: where do they come from? Give those nodes 0.")
    count = min(count, score.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    last = torch.kthvalue(score, score.numel() - count + 1).values
    chosen = score > last
    equal = torch.nonzero(score == last).flatten()[: count - int(chosen.sum())]
    chosen[equal] = True
    return torch.nonzero(chosen).flatten()


class HitShares:
    """Share of the rows needed that are hot, for any number of hot nodes: ``shares(200_000)``.

    Scores are sorted into a million levels, a part in 4,096 of their value wide; within one, nodes are taken to be
    needed alike. That takes one pass over the nodes, where sorting 100 million would take half a minute.

    Args:
        score: ``[N]``, what hot nodes are chosen by (``choose_hot``), at least 0.
        needs: how often each node is needed, ``[N]``; or for some batches the ids that each needs. Batches other than
            those that made the score give an honest share: nodes that a few batches happened to need look hotter than
            they are.
    """

    def __init__(self, score: Tensor, needs: Tensor | Sequence[Tensor]):
        if score.dim() != 1 or (isinstance(needs, Tensor) and needs.shape != score.shape):
            came = list(needs.shape) if isinstance(needs, Tensor) else "ids"
            raise ConfigError(f"expected scores and needs [N], got {list(score.shape)} and {came}")
        nodes, needed = (torch.zeros(_LEVELS, dtype=torch.float64, device=score.device) for _ in range(2))
        for first in range(0, score.numel(), _ROWS):
            level = _level(score[first : first + _ROWS])
            nodes += torch.bincount(level, minlength=_LEVELS)
            if isinstance(needs, Tensor):
                needed += torch.bincount(level, needs[first : first + _ROWS].to(torch.float64), _LEVELS)
        for ids in () if isinstance(needs, Tensor) else needs:
            for part in to_ids(ids, "needs").split(_ROWS):
                level = _level(score[part.to(score.device, torch.int64)])
                needed += torch.bincount(level, minlength=_LEVELS)
        held = torch.nonzero(nodes.flip(0)).flatten()
        start = nodes.new_zeros(1)
        self._nodes = torch.cat([start, nodes.flip(0)[held].cumsum(0)])
        self._needed = torch.cat([start, needed.flip(0)[held].cumsum(0)])

    def __call__(self, hot: int) -> float:
        """The share if the ``hot`` nodes of the highest score are hot."""
        total = self._needed[-1].item()
        if total == 0 or hot <= 0:
            return 0.0
        end = min(int(torch.searchsorted(self._nodes, float(hot))), self._nodes.numel() - 1)
        (low, high), (before, after) = self._nodes[end - 1 : end + 1].tolist(), self._needed[end - 1 : end + 1].tolist()
        return (before + (after - before) * min(1.0, (hot - low) / (high - low))) / total


def _level(score: Tensor) -> Tensor:
    """The level of a score: the bits of a float that is not negative are in the order of its value."""
    return (score.to(torch.float32).clamp(min=0).view(torch.int32) >> _LEVEL_BITS).to(torch.int64)


def hit_shares(score: Tensor, sizes: Sequence[int], needs: Tensor | Sequence[Tensor] | None = None) -> list[float]:
    """``HitShares`` for several numbers of hot nodes; ``needs`` is by default the score itself."""
    shares = HitShares(score, score if needs is None else needs)
    return [shares(size) for size in sizes]


def blend(counts: Tensor, prior: Tensor) -> Tensor:
    """A score by measured counts, where those are equal by the prior, float32 ``[N]``: few batches leave many ties."""
    largest = max(prior.max().item(), math.ulp(1.0)) if prior.numel() else 1.0
    return counts.to(torch.float32) + prior.to(torch.float32) * (0.999 / largest)


def checked_hot(hot, rows: int) -> Tensor:
    """Ids of hot rows, a tensor, array or list, as int64 ``[H]``.

    Raises:
        DataError: unless they are integers, no mask, and different ones of ``rows`` rows.
    """
    hot = to_ids(hot, "hot", DataError).to(torch.int64)
    inside = hot.dim() == 1 and (hot.numel() == 0 or 0 <= hot.min() <= hot.max() < rows)
    if not inside or hot.unique().numel() != hot.numel():
        raise DataError(f"hot: expected different ids in [0, {rows}), got {list(hot.shape)}; choose_hot gives them")
    return hot
