"""The union of a sample's hops: one graph over all of its nodes, for models that take ``(x, edge_index)``."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from joestar.errors import SamplerError
from joestar.graph_api.block import Block


class Subgraph(Block):
    """A block whose sources and destinations are the same nodes: all of a sample, the seeds first.

    A node has the edges of the hop in which it was first expanded, those of the outermost hop have none: what PyG's
    ``NeighborLoader`` returns. Edges are ordered by destination.

    Attributes:
        num_seeds: number of seeds, the first rows (a symbolic integer while traced).
        arguments: what a model is called with (``joestar.pyg.call.arguments_of``).
        types: the type of every edge ``[num_edges]`` by which ``of_types`` tells them apart, or ``None``.
    """

    arguments: tuple = ()
    types: Tensor | None = None

    def __init__(self, indptr: Tensor, indices: Tensor, nodes: Tensor, graph, eids, num_seeds):
        super().__init__(indptr, indices, nodes, nodes, graph, eids)
        self.num_seeds = num_seeds
        self._loop_free: LocalEdges | None = None
        self._typed: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, blocks: list[Block]) -> "Subgraph":
        """The union of blocks, input side first: the nodes of ``blocks[0].srcs``.

        Makes two sets of its own, like samples: its edges, and those between two different nodes.
        """
        hops, graph = blocks[::-1], blocks[0].graph
        context, nodes = graph.context, blocks[0].srcs
        size = context.next_size("sample")
        indptrs = [hop.indptr for hop in hops]
        starts = [torch.zeros((), dtype=torch.int64, device=nodes.device)]
        starts += [torch.full((), hop.num_dst, dtype=torch.int64, device=nodes.device) for hop in hops[:-1]]
        merge = torch.ops.joestar.merge_hops
        indptr, indices, _ = merge(indptrs, [hop.indices for hop in hops], nodes, starts, size)
        context.record(indices.shape[0])
        size = indices.shape[0] if context.sizes is None else size
        known = all(hop._eids is not None for hop in hops)

        def merged(values: list[Tensor]) -> Tensor:
            return merge(indptrs, values, nodes, starts, size)[1]

        def eids() -> Tensor:
            return merged([hop.eids for hop in hops])

        made = cls(indptr, indices, nodes, graph, eids if known else None, hops[0].num_dst)
        made._take_edges(blocks, merged)
        made._take_nodes(blocks)
        made._loop_free = made._without_loops()
        return made

    def _take_edges(self, blocks: list[Block], merged: Callable[[list[Tensor]], Tensor]) -> None:
        """What hops have of their own per edge, for every edge from the hop it is of; an error where one has none."""
        hops = blocks[::-1]

        def value_of(key: str) -> Tensor:
            for position, block in enumerate(blocks):
                if key not in block.edata.own and (key not in block.edata or block._eids is None):
                    raise SamplerError(
                        f"the sampler sets edata[{key!r}] in some blocks, and block {position} of {len(blocks)} has no "
                        "such values: a model of (x, edge_index) is given one for every edge of the sample. Set them "
                        "in every block."
                    )
            values = [hop.edata[key] for hop in hops]
            like = values[0]
            if any(value.dtype != like.dtype or value.shape[1:] != like.shape[1:] for value in values):
                kinds = ", ".join(f"{value.dtype} {['num_edges', *value.shape[1:]]}" for value in values[::-1])
                raise SamplerError(f"edata[{key!r}] differs in dtype or width from block to block: {kinds}.")
            hop_of = merged([torch.full_like(hop.indices, number) for number, hop in enumerate(hops)])
            place = merged([torch.arange(hop.indices.shape[0], device=hop.indices.device) for hop in hops])
            return _by_hop(values, hop_of, place)

        for key in dict.fromkeys(key for block in blocks for key in block.edata.own):
            self.edata.own[key] = partial(value_of, key)

    def _take_nodes(self, blocks: list[Block]) -> None:
        """What the outermost hop has of its own per source, which are all nodes; what others have is an error."""
        frames = [(f"block {i}.{frame.name}", frame) for i, b in enumerate(blocks) for frame in (b.srcdata, b.dstdata)]
        (_, outermost), *others = frames
        for key in dict.fromkeys(key for _, frame in frames for key in frame.own):
            where = [name for name, frame in others if key in frame.own]
            given = partial(_only_outermost, key, where[0]) if where else outermost.own[key]
            self.srcdata.own[key] = self.dstdata.own[key] = given

    def _without_loops(self) -> "LocalEdges":
        indptr, rest = self._positions(self.indices != self._ends("v"))
        indices = torch.ops.joestar.rows_at(self.indices, rest)
        return LocalEdges(indptr, indices, self.dsts, origin=rest)

    def edges(self) -> "LocalEdges":
        """Its edges, as a model gets them."""
        return LocalEdges(self.indptr, self.indices, self.dsts)

    def loop_free(self) -> "LocalEdges":
        """Those of its edges that run between two different nodes (of one batch: by position)."""
        return self._loop_free

    def tell_apart(self, name: str, number: int, known: int | None = None) -> None:
        """Makes a set of its edges for each of the types 0 to ``number - 1``, by ``edata[name]``, one per edge.

        Args:
            known: an edge of another type than 0 to ``known - 1`` is an error (``joestar::expect``).
        """
        types = self.edata[name]
        if known is not None:
            what = f"an edge of the batch is of type {{}} in edata[{name!r}], and an RGCNConv knows 0 to {known - 1}"
            types = torch.ops.joestar.expect(types, (types < 0) | (types >= known), what)
            self.edata.values[name] = types
        self.types = types
        self._typed = [self._positions(types == kind) for kind in range(number)]

    def of_types(self) -> "list[LocalEdges]":
        """Those of its edges that are of each type, by number: sets that ``tell_apart`` has made."""
        rows_at = torch.ops.joestar.rows_at
        return [LocalEdges(indptr, rows_at(self.indices, rest), self.dsts, origin=rest) for indptr, rest in self._typed]

    def __repr__(self) -> str:
        return f"Subgraph(num_nodes={self.num_src}, num_edges={self.num_edges}, num_seeds={self.num_seeds})"


def _by_hop(values: list[Tensor], hop_of: Tensor, place: Tensor) -> Tensor:
    """``values[hop_of[e]][place[e]]`` for every edge ``e``, ``[num_edges, ...]``."""
    result = None
    for number, value in enumerate(values):
        here = hop_of == number
        rows = torch.ops.joestar.rows_at(value, torch.where(here, place, 0))
        here = here.reshape(-1, *[1] * (value.dim() - 1))
        result = rows if result is None else torch.where(here, rows, result)
    return result


def _only_outermost(key: str, where: str) -> Tensor:
    raise SamplerError(
        f"the sampler sets {where}[{key!r}], and a model of (x, edge_index) is given rows of all nodes of the sample "
        f"at once: set srcdata[{key!r}] of block 0, whose sources they are, and of no other block."
    )


class LocalEdges:
    """Edges among the nodes of a subgraph, ordered by destination, as an ``edge_index`` of PyG's.

    Attributes:
        edge_index: int64 ``[2, E]``: row 0 sources, row 1 destinations.
        indptr: int64 ``[num_nodes + 1]``; indices: sources ``[E]``; nodes: what the nodes are in the graph.
        origin: of every edge its position among the edges that these were made of, int64 ``[E]``, or ``None``.
        loop: whether an edge was appended, bool ``[E]``, or ``None``; ``origin`` is 0 there.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, nodes: Tensor, origin: Tensor | None = None, loop: Tensor | None = None
    ):
        self.indptr, self.indices, self.nodes = indptr, indices, nodes
        self.origin, self.loop = origin, loop
        self.dst = torch.ops.joestar.edge_dst(indptr, indices.shape[0], indices)
        self.edge_index = torch.stack([indices.to(torch.int64), self.dst.to(torch.int64)])

    @property
    def num_nodes(self) -> int:
        """Number of nodes (a symbolic integer while traced)."""
        return self.nodes.shape[0]

    def with_loops(self) -> "LocalEdges":
        """One more edge per node, from itself, behind the others of its row."""
        count = torch.full((), self.num_nodes, dtype=torch.int64, device=self.indptr.device)
        indptr, indices, origin, loop = torch.ops.joestar.append_loops(self.indptr, self.indices, count)
        return LocalEdges(indptr, indices, self.nodes, origin, loop)
