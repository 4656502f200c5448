"""Small CSC structures: every odd shape that a sampled set can take."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

HUB = 301
"""Edges of the longest row."""


@dataclass(frozen=True)
class Structure:
    """A bipartite CSC: ``rows`` true rows of ``num_dst``, ``edges`` true edges of ``len(indices)``."""

    name: str
    indptr: Tensor
    indices: Tensor
    num_src: int
    rows: int

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    @property
    def edges(self) -> int:
        return int(self.indptr[-1])

    def to(self, ids: torch.dtype) -> "Structure":
        """The same with ids of another dtype."""
        return Structure(self.name, self.indptr, self.indices.to(ids), self.num_src, self.rows)


def from_rows(name: str, rows: list, num_src: int, pad_rows: int = 0, pad_edges: int = 0) -> Structure:
    """``rows[i]`` are the sources of destination i; padding rows have degree 0, padding edges source 0."""
    degrees = torch.tensor([0] + [len(row) for row in rows] + [0] * pad_rows)
    sources = [source for row in rows for source in row] + [0] * pad_edges
    return Structure(name, torch.cumsum(degrees, 0), torch.tensor(sources, dtype=torch.int64), num_src, len(rows))


def random_rows(seed: int, num_dst: int, num_src: int, max_degree: int) -> list:
    """Rows of random degree (0 included) with random sources (duplicates included)."""
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, max_degree + 1, (num_dst,), generator=generator).tolist()
    return [torch.randint(0, num_src, (degree,), generator=generator).tolist() for degree in degrees]


def structures() -> list[Structure]:
    """Bipartite structures whose destinations are the first sources, as in a block; nobody may write to them."""
    return list(_structures(HUB))


@functools.cache
def _structures(longest: int) -> list[Structure]:
    ragged = random_rows(0, 9, 13, 5)
    hub = [[i % 37 for i in range(longest)], [], [5], *random_rows(1, 8, 37, 3)]
    return [
        from_rows("no rows", [], 1),
        from_rows("no rows, no sources", [], 0),
        from_rows("no sources", [[], []], 0, pad_rows=1),
        from_rows("no rows, padded", [], 3, pad_rows=2, pad_edges=3),
        from_rows("no edges", [[], [], []], 5),
        from_rows("one loop", [[0]], 1),
        from_rows("isolated", [[], [4, 2], [], [], [6, 0, 4], []], 7),
        from_rows("duplicates and loops", [[0, 0, 3], [1, 1, 1, 1], [4, 2], [3]], 5),
        from_rows("hub", hub, 37),
        from_rows("bipartite", ragged, 13),
        from_rows("padded", ragged, 13, pad_rows=4, pad_edges=6),
        from_rows("padded rows", ragged, 16, pad_rows=3),
        from_rows("padded edges", ragged, 13, pad_edges=1),
    ]


def wide(num_dst: int = 1500, num_src: int = 5000, edges: int = 70_000) -> Structure:
    """Large enough for every kernel to split its work: a hub with a third of the edges, the rest spread unevenly."""
    generator = torch.Generator().manual_seed(3)
    rows = (torch.rand(edges, generator=generator).square() * num_dst).long()
    rows[torch.rand(edges, generator=generator) < 1 / 3] = num_dst // 2
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(rows, minlength=num_dst), 0, out=indptr[1:])
    return Structure("wide", indptr, torch.randint(0, num_src, (edges,), generator=generator), num_src, num_dst)


@dataclass(frozen=True)
class Query:
    """Destinations to sample from a graph: ``count`` true ones, then padding with the first."""

    name: str
    graph: Structure
    dsts: Tensor
    count: Tensor

    def to(self, ids: torch.dtype) -> "Query":
        """The same with ids of another dtype."""
        return Query(self.name, self.graph.to(ids), self.dsts.to(ids), self.count)


def query(name: str, graph: Structure, dsts: list, pad: int = 0) -> Query:
    """Destinations followed by ``pad`` padding slots."""
    padded = dsts + (dsts[:1] or [0]) * pad
    return Query(name, graph, torch.tensor(padded, dtype=torch.int64), torch.tensor(len(dsts)))


@functools.cache
def sampling_graph() -> Structure:
    """Degrees 0 to 12 around every small fanout, then 63 to 67, 130 and 300; 40 nodes."""
    degrees = [*range(13), 63, 64, 65, 66, 67, 130, 300, *([2, 0, 5] * 7)][:40]
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, len(degrees), (degree,), generator=generator).tolist() for degree in degrees]
    return from_rows("degrees", rows, len(degrees))


@functools.cache
def queries() -> tuple[Query, ...]:
    """Sets of destinations: none, one, all, repeated, in odd order, padded."""
    graph = sampling_graph()
    no_edges = from_rows("no edges", [[], [], []], 3)
    everyone = list(range(graph.num_dst))
    return (
        query("nothing", graph, []),
        query("nothing, padded", graph, [], pad=3),
        query("one", graph, [19]),
        query("isolated", graph, [0, 0]),
        query("everyone", graph, everyone),
        query("repeated", graph, [7, 3, 7, 7, 0, 19, 3]),
        query("padded", graph, [*everyone[::-3], 19], pad=35),
        query("no edges", no_edges, [2, 1], pad=1),
    )
