"""Sampled structure: columns of a graph before compaction, and bipartite blocks after it."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.errors import CaptureError, GraphError, SamplerError
from joestar.graph_api.computation import Computation, check_side
from joestar.graph_api.gathered import Gathered, carry, rows_of
from joestar.graph_api.reversed import Reversed
from joestar.ops.padding.rows_at import rows_at
from joestar.torch_private import statically_known_true


class Block(Computation):
    """A bipartite graph from ``srcs`` to ``dsts``; the destinations are the first rows of the sources.

    Attributes:
        indptr: int64 ``[num_dst + 1]``, in-edges of each destination (CSC).
        indices: local source of each edge, ``[num_edges]``.
        srcs, dsts: nodes of the graph, ``[num_src]`` and ``[num_dst]``.
        graph: the graph that was sampled.
        edata, srcdata, dstdata: the graph's tensors for the block's edges, sources and destinations, gathered when
            first read; tensors of one's own can be added, and go along with what is made of the block.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, srcs: Tensor, dsts: Tensor, graph, eids=None):
        """``eids``: positions of the edges in the graph, int64 ``[num_edges]``, or a function giving them."""
        self.indptr = indptr
        self.indices = indices
        self.srcs = srcs
        self.dsts = dsts
        self.graph = graph
        self._eids = eids
        self._frames: dict[str, Gathered] = {}
        self._looped = False
        self._kept_of: Block | None = None

    @property
    def eids(self) -> Tensor:
        """Position of every edge in the graph (CSC), int64 ``[num_edges]``; found, or sampled again, on first read."""
        if self._eids is None:
            raise GraphError(
                "the edges of this block are not known in the graph: it has added self-loops, or was put together "
                "without eids. Read edata before add_self_loops, or give Block(..., eids=...)."
            )
        if not isinstance(self._eids, Tensor):
            self._eids = self._eids()
        return self._eids

    @property
    def src_ids(self) -> Tensor:
        """What random draws know the sources by, ``[num_src]``: ``graph.ids`` of ``srcs``, or ``srcs``.

        On a part of a larger graph these are ids of the larger one; look up in them what is kept per node of that.
        """
        return self.graph.ids_of(self.srcs)

    @property
    def dst_ids(self) -> Tensor:
        """``src_ids`` of the destinations, ``[num_dst]``."""
        return self.graph.ids_of(self.dsts)

    @property
    def edata(self) -> Gathered:
        """Edge tensors ``[num_edges, ...]``: ``block.edata["w"]`` is ``graph.edata["w"]`` of the block's edges."""
        if "edata" not in self._frames:
            self._frames["edata"] = Gathered("edata", self.graph.edata, lambda: self.eids, self.indices.shape[0])
        return self._frames["edata"]

    @property
    def srcdata(self) -> Gathered:
        """Node tensors of the sources, ``[num_src, ...]``."""
        if "srcdata" not in self._frames:
            self._frames["srcdata"] = Gathered("srcdata", self.graph.ndata, lambda: self.srcs, self.num_src)
        return self._frames["srcdata"]

    @property
    def dstdata(self) -> Gathered:
        """Node tensors of the destinations, ``[num_dst, ...]``."""
        if "dstdata" not in self._frames:
            self._frames["dstdata"] = Gathered("dstdata", self.graph.ndata, lambda: self.dsts, self.num_dst)
        return self._frames["dstdata"]

    @property
    def num_src(self) -> int:
        """Number of sources (a symbolic integer while traced)."""
        return self.srcs.shape[0]

    @property
    def num_dst(self) -> int:
        """Number of destinations (a symbolic integer while traced)."""
        return self.dsts.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges (a symbolic integer while traced).

        Raises:
            CaptureError: while traced, with self-loops that were added: loops that were there before are dropped.
        """
        if self._looped and torch.compiler.is_compiling():
            raise CaptureError(
                "block.num_edges of a block with self-loops that were added varies, and is not known to a program. "
                "Write instead: looped.in_degrees().sum(), or num_edges of the block without loops."
            )
        return self.indices.shape[0]

    def add_self_loops(self) -> "Block":
        """The block with exactly one self-loop per destination, at the end of its row.

        A loop is an edge between equal nodes: where the same seed stands twice, the second row's loop points to the
        first one's source, and is found as well. Loops have no edge data, so the new block has none but what is set in
        its own ``edata``: to read others is an error, also those that were set in this block's. Node data are kept.
        """
        row = torch.ops.joestar.edge_dst(self.indptr, self.indices.shape[0], self.indices)
        same = torch.index_select(self.srcs, 0, self.indices) == torch.index_select(self.dsts, 0, row)
        indices = torch.where(same, row, self.indices)
        count = torch.full((), self.num_dst, dtype=torch.int64, device=self.indptr.device)
        indptr, indices = torch.ops.joestar.add_self_loops(self.indptr, indices, count)
        if not torch.compiler.is_compiling():
            indices = indices[: int(indptr[-1])]
        looped = Block(indptr, indices, self.srcs, self.dsts, self.graph)
        looped._looped = True
        return carry(self, looped, _no_value_of_loops)

    def keep_edges(self, kept: Tensor) -> "Block":
        """The block with those edges for which ``kept``, bool ``[num_edges]``, is true; nodes stay what they are.

        Makes a set of its own, like a sample: call it in a sampler, not in a model. Data are carried over, those of
        one's own, too.

        Raises:
            GraphError: ``kept`` is no bool tensor, or not certainly of this block's edges.
        """
        self._check_mask(kept)
        indptr, rest = self._positions(kept)
        eids = None if self._eids is None else lambda: rows_at(self.eids, rest)
        made = Block(indptr, rows_at(self.indices, rest), self.srcs, self.dsts, self.graph, eids)
        made._kept_of = self
        return carry(self, made, rows_of(rest))

    def _check_mask(self, kept) -> None:
        wanted = "keep_edges needs a bool tensor with one value per edge of the block"
        how = "Compute it on the block: block.edata[...], block.apply_edges(...)."
        if not isinstance(kept, Tensor):
            raise GraphError(f"{wanted}; got {type(kept).__name__}. {how}")
        if kept.dtype is not torch.bool:
            raise GraphError(f"{wanted}; got {kept.dtype}. {how}")
        if kept.dim() == 1 and statically_known_true(kept.shape[0] == self.indices.shape[0]):
            return
        if torch.compiler.is_compiling():  # sizes are stand-ins
            raise GraphError(f"{wanted}; got one of another set, which may have as many in one batch only. {how}")
        raise GraphError(f"{wanted}, [{self.indices.shape[0]}]; got {list(kept.shape)}. {how}")

    def _positions(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """(offsets, positions among the block's edges) of the edges that are kept."""
        context = self.graph.context
        size = context.next_size("sample")
        count = torch.full((), self.num_dst, dtype=torch.int64, device=self.indptr.device)
        indptr, rest, _ = torch.ops.joestar.weighted_sample(
            self.indptr, kept.to(torch.float32), self.dsts, count, True, -1, False, context.key, 0, size
        )
        context.record(rest.shape[0])
        return indptr, rest

    def remove_self_loops(self) -> "Block":
        """The block without edges between equal nodes; see ``keep_edges``."""
        row = torch.ops.joestar.edge_dst(self.indptr, self.indices.shape[0], self.indices)
        ends = torch.index_select(self.srcs, 0, self.indices), torch.index_select(self.dsts, 0, row)
        return self.keep_edges(ends[0] != ends[1])

    def reverse(self) -> Reversed:
        """The structure with its edges turned around, to compute on: ``reverse().pull`` aggregates at the sources."""
        return Reversed(self)

    def graph_degrees(self, side: str) -> Tensor:
        """In-degrees in the whole graph of the ``"src"`` or ``"dst"`` nodes, int64; ``GraphError`` for other sides."""
        check_side(side, "graph_degrees")
        ids = self.srcs if side == "src" else self.dsts
        return self.graph.whole_degrees_of(ids)

    def __repr__(self) -> str:
        return f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"


def _no_value_of_loops(key: str, value: Callable[[], Tensor]) -> Tensor:
    raise GraphError(
        f"edata[{key!r}] was set before add_self_loops, and the loops that were added have no value. Compute with it "
        f"without them, block.pull(fn.u_mul_e(x, block.edata[{key!r}]), 'sum'), and add x[: block.num_dst] for the "
        "loops; or set one value per edge in the new block."
    )


def check_blocks(blocks, name: str, seeds: Tensor | None = None) -> None:
    """Raises unless ``blocks`` is a non-empty list of blocks, each feeding the next, for these ``seeds`` ``[B]``.

    Args:
        name: of the sampler; seeds: whose rows the blocks must be for; ``None`` while they are traced.
    """
    if not isinstance(blocks, (list, tuple)) or not blocks or not all(isinstance(b, Block) for b in blocks):
        raise SamplerError(f"{name}.sample must return a non-empty list of joestar Blocks, input side first.")
    for position, (block, after) in enumerate(itertools.pairwise(blocks)):
        if block.num_dst != after.num_src:
            raise GraphError(
                f"{name}.sample: block {position} has {block.num_dst} destinations but block {position + 1} has "
                f"{after.num_src} sources. Blocks go from the input side to the seeds; sample block {position} "
                f"for `block.srcs` of block {position + 1}."
            )
    if seeds is not None and not torch.equal(blocks[-1].dsts[: seeds.shape[0]].to(seeds.dtype), seeds):
        raise SamplerError(
            f"{name}.sample: the destinations of the last block must begin with the seeds, in their order: its rows "
            "are trained towards the labels of the seeds. Sample it for `seeds` as they come, duplicates included."
        )
    for position, (block, after) in enumerate(itertools.pairwise(blocks)):
        if seeds is not None and not torch.equal(block.dsts, after.srcs.to(block.dsts.dtype)):
            raise SamplerError(
                f"{name}.sample: the destinations of block {position} are other nodes than the sources of block "
                f"{position + 1}, whose rows they are to be. Sample block {position} for `block.srcs` of block "
                f"{position + 1}, in their order."
            )
