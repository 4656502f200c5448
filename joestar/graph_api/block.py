"""Sampled structure: columns of a graph before compaction, and bipartite blocks after it."""

import itertools

import torch
from torch import Tensor

from joestar.errors import GraphError, SamplerError
from joestar.graph_api.computation import Computation


class Block(Computation):
    """A bipartite graph from ``srcs`` to ``dsts``; the destinations are the first rows of the sources.

    Attributes:
        indptr: int64 ``[num_dst + 1]``, in-edges of each destination (CSC).
        indices: local source of each edge, ``[num_edges]``.
        srcs, dsts: global node ids, ``[num_src]`` and ``[num_dst]``.
        graph: the graph that was sampled.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, srcs: Tensor, dsts: Tensor, graph):
        self.indptr = indptr
        self.indices = indices
        self.srcs = srcs
        self.dsts = dsts
        self.graph = graph

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
        """Number of edges (a symbolic integer while traced)."""
        return self.indices.shape[0]

    def add_self_loops(self) -> "Block":
        """The block with exactly one self-loop per destination, at the end of its row.

        A loop is an edge between equal nodes: where the same seed stands twice, the second row's loop points to the
        first one's source, and is found as well.
        """
        row = torch.ops.joestar.edge_dst(self.indptr, self.num_edges, self.indices)
        same = torch.index_select(self.srcs, 0, self.indices) == torch.index_select(self.dsts, 0, row)
        indices = torch.where(same, row, self.indices)
        count = torch.full((), self.num_dst, dtype=torch.int64, device=self.indptr.device)
        indptr, indices = torch.ops.joestar.add_self_loops(self.indptr, indices, count)
        return Block(indptr, indices, self.srcs, self.dsts, self.graph)

    def graph_degrees(self, side: str) -> Tensor:
        """In-degrees in the whole graph of the ``"src"`` or ``"dst"`` nodes, int64."""
        ids = self.srcs if side == "src" else self.dsts
        return self.graph.in_degrees_of(ids)

    def __repr__(self) -> str:
        return f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"


class Columns:
    """``graph[:, dsts]``: every in-edge of the destinations, sources still under their global ids."""

    def __init__(self, graph, dsts: Tensor):
        self.graph = graph
        self.dsts = dsts if dsts.dtype == graph.indices.dtype else dsts.to(graph.indices.dtype)
        self.dst_count = torch.full((), dsts.shape[0], dtype=torch.int64, device=dsts.device)

    def individual_sample(self, k: int, replace: bool = False) -> Block:
        """Samples up to ``k`` in-edges of every destination independently, then compacts (thesis table 5.3).

        Args:
            k: picks per destination; all its edges where there are fewer, or if ``k`` is -1.
            replace: with replacement: exactly ``k`` picks wherever there is at least one edge.

        Returns:
            A ``Block`` whose sources are the destinations followed by the new nodes in order of first appearance.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k == 0 or k < -1:
            raise SamplerError(f"individual_sample: k must be a positive integer, or -1 for every edge; got {k!r}.")
        if k == -1:
            return self.compact()
        graph, context = self.graph, self.graph.context
        slice_size, size, site = context.next_size("slice"), context.next_size("sample"), context.next_site()
        ops = torch.ops.joestar
        if context.sizes is None:  # eager: the fused op at once, without the slice in between
            indptr, indices, _ = ops.sample_cols(
                graph.indptr, graph.indices, self.dsts, self.dst_count, k, replace, context.key, site, size
            )
            context.record(int(graph.in_degrees_of(self.dsts).sum()))
            context.record(indices.shape[0])
        else:
            sliced, sources, _ = ops.slice_cols(graph.indptr, graph.indices, self.dsts, self.dst_count, slice_size)
            indptr, indices, _ = ops.rowwise_sample(sliced, sources, self.dsts, k, replace, context.key, site, size)
        return self._compacted(indptr, indices)

    def compact(self) -> Block:
        """Gives the sources local ids: a block with every in-edge of the destinations."""
        graph, context = self.graph, self.graph.context
        size = context.next_size("slice")
        indptr, indices, _ = torch.ops.joestar.slice_cols(graph.indptr, graph.indices, self.dsts, self.dst_count, size)
        context.record(indices.shape[0])
        return self._compacted(indptr, indices)

    def _compacted(self, indptr: Tensor, indices: Tensor) -> Block:
        context = self.graph.context
        size = context.next_size("compact")
        srcs, local, _ = torch.ops.joestar.compact(
            self.dsts, self.dst_count, indptr, indices, self.graph.num_nodes, size
        )
        context.record(srcs.shape[0])
        return Block(indptr, local, srcs, self.dsts, self.graph)


def check_blocks(blocks, name: str) -> None:
    """Raises unless ``blocks`` is a non-empty list of blocks, each feeding the next."""
    if not isinstance(blocks, (list, tuple)) or not blocks or not all(isinstance(b, Block) for b in blocks):
        raise SamplerError(f"{name}.sample must return a non-empty list of joestar Blocks, input side first.")
    for position, (block, after) in enumerate(itertools.pairwise(blocks)):
        if block.num_dst != after.num_src:
            raise GraphError(
                f"{name}.sample: block {position} has {block.num_dst} destinations but block {position + 1} has "
                f"{after.num_src} sources. Blocks go from the input side to the seeds; sample block {position} "
                f"for `block.srcs` of block {position + 1}."
            )
