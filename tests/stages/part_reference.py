"""The partition-based first stage in torch: what the C++ kernel must give, bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.stages.partitions import AHEAD_SITE, HALO_SITE


@dataclass(frozen=True)
class Rows:
    """In-edges of local nodes.

    Attributes:
        nodes: ``[n]``, global ids: those with rows ascending, then the others ascending.
        halo: bool ``[n]``.
        indptr: int64 ``[r + 1]``.
        indices: int64 ``[e]``: local sources, in the order of the graph.
    """

    nodes: Tensor
    halo: Tensor
    indptr: Tensor
    indices: Tensor

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1


def chosen_rows(
    graph: Graph, members: Tensor, hubs: Tensor, halo_fanout: int | None, key: tuple[int, int, int], local: Tensor
) -> Rows:
    """All in-edges of ``members``, and of other ``hubs`` those from members and hubs.

    Args:
        members, hubs: ids, ascending.
        halo_fanout: most edges of a row of ``members`` from outside of both; ``None``: all.
        local: int32 ``[num_nodes]`` of -1: scratch, given back as it was.
    """
    rows = torch.unique(torch.cat([members, hubs]))
    number(local, rows, 0)
    indptr, sources = _edges_of(graph, rows)
    of_row = torch.arange(rows.shape[0]).repeat_interleave(indptr.diff())
    outside = local[sources] < 0
    own = torch.isin(rows, members)
    keep = ~outside | own[of_row]
    if halo_fanout is not None:
        keep = ~outside | _some(keep & outside, of_row, rows, halo_fanout, key)
    halo = torch.unique(sources[keep & outside])
    number(local, halo, rows.shape[0])
    sub = _offsets(of_row[keep], rows.shape[0])
    indices = local[sources[keep]].to(torch.int64)
    nodes = torch.cat([rows, halo.to(rows.dtype)])
    local[nodes.to(torch.int64)] = -1
    return Rows(nodes, torch.arange(nodes.shape[0]) >= rows.shape[0], sub, indices)


def ahead_of_time(rows: Rows, seeds: Tensor, fanouts: list[int], key: tuple[int, int, int]) -> tuple[Rows, Tensor]:
    """What a neighbour sampler with these fanouts picks for all seeds together, and the seeds' new local ids."""
    n, r = rows.nodes.shape[0], rows.num_rows
    reached, expanded = (torch.zeros(n, dtype=torch.bool) for _ in range(2))
    kept = torch.zeros(rows.indices.shape[0], dtype=torch.bool)
    reached[seeds] = True
    for hop, fanout in enumerate(fanouts):
        frontier = torch.nonzero(reached[:r]).flatten()
        if fanout < 0:
            frontier = frontier[~expanded[frontier]] if all(f < 0 for f in fanouts[:hop]) else frontier
        expanded[frontier] = True
        picks = _picks(rows, frontier, fanout, key, AHEAD_SITE + hop)
        kept[picks] = True
        reached[rows.indices[picks]] = True
    return _subset(rows, seeds, reached, expanded, kept)


def local_batch(rows: Rows, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(seeds, ids, indptr, indices) of a ``MacroBatch``."""
    return seeds.to(torch.int32), rows.nodes, rows.indptr, rows.indices.to(torch.int32)


def number(local: Tensor, nodes: Tensor, first: int) -> None:
    """Gives ``nodes`` the local ids from ``first`` on."""
    local[nodes.to(torch.int64)] = torch.arange(first, first + nodes.shape[0], dtype=torch.int32)


def _subset(rows: Rows, seeds: Tensor, reached: Tensor, expanded: Tensor, kept: Tensor) -> tuple[Rows, Tensor]:
    """The reached nodes; those that were expanded keep the picked edges, the others have none."""
    of_row = torch.arange(rows.num_rows).repeat_interleave(rows.indptr.diff())
    with_rows = torch.nonzero(expanded).flatten()
    leaves = torch.nonzero(reached & ~expanded).flatten()
    leaves = leaves[torch.argsort(rows.nodes[leaves])]
    old = torch.cat([with_rows, leaves])
    new = torch.full((rows.nodes.shape[0],), -1, dtype=torch.int64)
    new[old] = torch.arange(old.shape[0])
    indptr = _offsets(new[of_row[kept]], with_rows.shape[0])
    return Rows(rows.nodes[old], rows.halo[old], indptr, new[rows.indices[kept]]), new[seeds]


def _picks(rows: Rows, frontier: Tensor, fanout: int, key: tuple[int, int, int], site: int) -> Tensor:
    """Positions of at most ``fanout`` edges of every row of ``frontier``, hashed by global id."""
    degrees = rows.indptr.diff()[frontier]
    offsets = torch.zeros(frontier.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=offsets[1:])
    shift = rows.indptr[frontier] - offsets[:-1]
    positions = torch.arange(int(offsets[-1])) + shift.repeat_interleave(degrees)
    if fanout < 0:
        return positions
    return _sampled(offsets, positions, rows.nodes[frontier], fanout, key, site)


def _some(candidates: Tensor, of_row: Tensor, rows: Tensor, most: int, key: tuple[int, int, int]) -> Tensor:
    """At most ``most`` of the candidate edges of every row, at random: bool ``[edges]``."""
    positions = torch.nonzero(candidates).flatten()
    chosen = torch.zeros_like(candidates)
    if most:
        offsets = _offsets(of_row[positions], rows.shape[0])
        chosen[_sampled(offsets, positions, rows, most, key, HALO_SITE)] = True
    return chosen


def _sampled(offsets: Tensor, values: Tensor, ids: Tensor, k: int, key: tuple[int, int, int], site: int) -> Tensor:
    """Up to ``k`` of the values of every row, hashed as node ``ids[row]``."""
    words = torch.tensor(key, dtype=torch.int64)
    return torch.ops.joestar.rowwise_sample(offsets, values, ids.to(torch.int64), k, False, words, site, -1)[1]


def _edges_of(graph: Graph, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(offsets, sources int64) of all in-edges of ``rows``."""
    count = torch.tensor(rows.shape[0])
    offsets, sources, _ = torch.ops.joestar.slice_cols(graph.indptr, graph.indices, rows, count, -1)
    return offsets, sources.to(torch.int64)


def _offsets(row: Tensor, rows: int) -> Tensor:
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(row, minlength=rows), 0, out=offsets[1:])
    return offsets
