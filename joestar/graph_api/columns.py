"""Slices of a graph, from which samples are drawn: ``graph[:, dsts]``, ``graph[srcs, dsts]`` (thesis table 5.3)."""

import numpy as np
import torch
from torch import Tensor

from joestar.errors import GraphError, SamplerError
from joestar.graph_api.block import Block
from joestar.graph_api.computation import Computation
from joestar.graph_api.context import FIRST_STAGE_SITE
from joestar.graph_api.gathered import Gathered, Move, OfAllNodes, carry, rows_of, same_rows
from joestar.graph_api.probs import edge_weight, node_weight
from joestar.graph_api.reversed import Reversed
from joestar.graph_api.validate import check_nodes
from joestar.ops.padding.rows_at import rows_at
from joestar.torch_private import statically_known_true
from joestar.whole_numbers import plain


class Columns(Computation):
    """In-edges of the destinations, all of them or those from some sources; sources keep their global ids.

    A slice is itself a structure to compute on, for instance a bias of the picks: sources are all nodes of the graph
    (``num_src == graph.num_nodes``), destinations the ``dsts``. It is made when it is first read: a uniform sample
    straight from a graph never makes it.

    Attributes:
        graph: the whole graph; dsts: ids ``[num_dst]``, duplicates allowed: a row each.
    """

    def __init__(self, graph, dsts: Tensor, structure: tuple | None = None, whole: bool = True):
        self.graph = graph
        self.dsts = dsts if dsts.dtype == graph.indices.dtype else dsts.to(graph.indices.dtype)
        self.dst_count = torch.full((), dsts.shape[0], dtype=torch.int64, device=dsts.device)
        self.whole = whole  # every in-edge of the destinations
        self._structure = structure  # (indptr, indices, function that gives the edges' positions in the graph)
        self._frames: dict[str, Gathered] = {}

    @classmethod
    def everything(cls, graph) -> "Columns":
        """``graph[:, :]``: every edge; nothing is copied."""
        graph._check_whole("graph[srcs, :]")
        nodes = torch.arange(graph.num_nodes, dtype=graph.indices.dtype, device=graph.device)
        everything = graph.indptr, graph.indices, lambda: torch.arange(graph.num_edges, device=graph.device)
        return cls(graph, nodes, everything)

    # --- structure ---

    def _slice(self) -> tuple:
        if self._structure is None:
            graph, context = self.graph, self.graph.context
            size = context.next_size("slice")
            indptr, indices, _ = torch.ops.joestar.slice_cols(
                graph.indptr, graph.indices, self.dsts, self.dst_count, size
            )
            context.record(indices.shape[0])
            size = indices.shape[0] if context.sizes is None else size
            self._structure = indptr, indices, self._sampled_eids(-1, False, context.key, 0, size)
        return self._structure

    @property
    def indptr(self) -> Tensor:
        """int64 ``[num_dst + 1]``: edges of each destination."""
        return self._slice()[0]

    @property
    def indices(self) -> Tensor:
        """Source of each edge, a node of the graph, ``[num_edges]``."""
        return self._slice()[1]

    @property
    def eids(self) -> Tensor:
        """Position of each edge in the graph, int64 ``[num_edges]``."""
        return self._slice()[2]()

    @property
    def num_src(self) -> int:
        """Every node of the graph may be a source."""
        return self.graph.num_slots

    @property
    def num_dst(self) -> int:
        """Number of destinations (a symbolic integer while traced)."""
        return self.dsts.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges (a symbolic integer while traced)."""
        return self.indices.shape[0]

    @property
    def srcdata(self) -> OfAllNodes:
        """Tensors of the sources: the graph's ``ndata``, to read."""
        return OfAllNodes(self.graph.ndata)

    @property
    def dstdata(self) -> Gathered:
        """Node tensors of the destinations, gathered on first read."""
        if "dstdata" not in self._frames:
            self._frames["dstdata"] = Gathered("dstdata", self.graph.ndata, lambda: self.dsts, self.num_dst)
        return self._frames["dstdata"]

    @property
    def edata(self) -> Gathered:
        """Edge tensors of the slice, gathered on first read; what is set goes along with the picks."""
        if "edata" not in self._frames:
            self._frames["edata"] = Gathered("edata", self.graph.edata, lambda: self.eids, self.num_edges)
        return self._frames["edata"]

    def __getitem__(self, key) -> "Columns":
        """``columns[srcs, :]``: the edges from ``srcs``, ids ``[n]`` in any order, to the same destinations."""
        if not isinstance(key, tuple) or len(key) != 2 or not _is_all(key[1]):
            raise GraphError("a slice is restricted by sources: columns[srcs, :], with srcs a tensor of node ids.")
        srcs = check_nodes(key[0], self.graph, "srcs")
        count = torch.full((), srcs.shape[0], dtype=torch.int64, device=srcs.device)
        return self._from_sources(srcs, count)

    def _from_sources(self, srcs: Tensor, count: Tensor) -> "Columns":
        context = self.graph.context
        indptr, indices, size = self.indptr, self.indices, context.next_size("slice")
        new_indptr, kept, _ = torch.ops.joestar.slice_rows(indptr, indices, self.dsts, srcs, count, size)
        context.record(kept.shape[0])
        structure = new_indptr, rows_at(indices, kept), lambda: rows_at(self.eids, kept)
        return carry(self, Columns(self.graph, self.dsts, structure, whole=False), rows_of(kept))

    def reverse(self) -> Reversed:
        """The structure with its edges turned around, to compute on: ``reverse().pull`` aggregates at the sources."""
        return Reversed(self)

    # --- sampling ---

    def individual_sample(
        self, k: int, probs: Tensor | str | None = None, replace: bool = False, *,
        edge_probs: Tensor | str | None = None, slice_probs: Tensor | None = None,
    ) -> Block:  # fmt: skip
        """Samples up to ``k`` in-edges of every destination independently, then compacts (thesis table 5.3).

        Args:
            k: picks per destination; all its edges where there are fewer, or if ``k`` is -1.
            probs: relative weight of every edge, ``None`` for uniform picks; edges of weight 0 are never picked. A name
                in ``graph.edata``, or a tensor as for one of the next two, told apart by its number of entries (an
                error where both fit).
            replace: with replacement: exactly ``k`` picks wherever there is an edge (of positive weight).
            edge_probs: in place of ``probs``: a name (of the slice's own values, if ``edata`` was set under it),
                or weights of the graph's edges, float32 ``[graph.num_edges]``.
            slice_probs: in place of ``probs``: values ``[num_edges]`` computed on this slice's own edges (from
                ``columns.edata``, ``columns.apply_edges`` ...).

        Returns:
            A ``Block`` whose sources are the destinations followed by the new nodes in order of first appearance.

        Raises:
            SamplerError: for an impossible ``k``, or weights of the wrong shape or dtype, negative or NaN (those of a
                whole graph are looked at once, computed ones never: there, negative and NaN count as 0), or given
                more than once.
        """
        k = _number(k, "individual_sample")
        if isinstance(k, bool) or not isinstance(k, int) or k == 0 or k < -1:
            raise SamplerError(f"individual_sample: k must be a positive integer, or -1 for every edge; got {k!r}.")
        weight, context = edge_weight(self, probs, edge_probs, slice_probs), self.graph.context
        if k == -1 and weight is None:
            return self.compact()
        context.note_draw("some edges" if k == -1 else "edges" if weight is None else "edges by weight", self)
        if context.takes_parts and not self.whole and k != -1:
            context.next_site()
            return self._every_edge()
        if weight is None and (context.races or self.graph.first_key is not None):
            weight = torch.ones_like(self.indices, dtype=torch.float32), False
        if weight is not None:
            return self._weighted(k, *weight, replace)
        direct = self.whole and not self._has_values
        return self._uniform(k, replace) if direct else self._uniform_of_part(k, replace)

    @property
    def _has_values(self) -> bool:
        """Whether edges have values of the slice's own: picks are then found again by their places in it."""
        return "edata" in self._frames and len(self._frames["edata"].own) > 0

    def _uniform(self, k: int, replace: bool) -> Block:
        graph, context, ops = self.graph, self.graph.context, torch.ops.joestar
        made = self._structure is not None
        slice_size = None if made else context.next_size("slice")
        size, site = context.next_size("sample"), context.next_site()
        if context.sizes is None and not made:  # eager: the fused op at once, without the slice in between
            indptr, indices, _ = ops.sample_cols(
                graph.indptr, graph.indices, self.dsts, self.dst_count, k, replace, context.key, site, size,
                **self._hashed(),
            )  # fmt: skip
            context.record(int(graph.edges_of(self.dsts).sum()))
        else:
            if made:
                sliced, sources = self.indptr, self.indices
            else:
                sliced, sources, _ = ops.slice_cols(graph.indptr, graph.indices, self.dsts, self.dst_count, slice_size)
            indptr, indices, _ = ops.rowwise_sample(
                sliced, sources, self.dsts, k, replace, context.key, site, size, **self._hashed()
            )
        context.record(indices.shape[0])
        size = indices.shape[0] if context.sizes is None else size
        return self._compacted(indptr, indices, self._sampled_eids(k, replace, context.key, site, size))

    def _sampled_eids(self, k: int, replace: bool, key: Tensor, site: int, size):
        """A function that draws a sample of the graph's columns again, as positions in the graph."""
        indptr, dsts, count = self.graph.indptr, self.dsts, self.dst_count
        hashed = {} if k < 0 else self._hashed()
        return lambda: torch.ops.joestar.sample_eids(indptr, dsts, count, k, replace, key, site, size, **hashed)

    def _hashed(self) -> dict[str, Tensor]:
        """What draws are told of a graph whose nodes go by other ids than their positions."""
        return {} if self.graph.ids is None else {"node_ids": self.graph.ids}

    def _uniform_of_part(self, k: int, replace: bool) -> Block:
        """Picks positions within the slice: ``sample_eids`` could not find them again, or values go along with them."""
        context = self.graph.context
        size, site = context.next_size("sample"), context.next_site()
        positions = torch.arange(self.num_edges, device=self.indptr.device)
        indptr, picked, count = torch.ops.joestar.rowwise_sample(
            self.indptr, positions, self.dsts.to(torch.int64), k, replace, context.key, site, size, **self._hashed()
        )
        context.record(picked.shape[0])
        picked = torch.ops.joestar.mask_rows(picked, count, 0, 0)  # padding holds a node's id, not a position
        move = rows_of(picked)
        return self._compacted(indptr, rows_at(self.indices, picked), lambda: rows_at(self.eids, picked), move)

    def _weighted(self, k: int, weight: Tensor, of_graph: bool, replace: bool) -> Block:
        graph = self.graph
        direct = of_graph and self.whole and not self._has_values  # without the slice in between
        if direct:
            indptr, indices = graph.indptr, graph.indices
        else:
            indptr, indices = self.indptr, self.indices
            weight = rows_at(weight, self.eids) if of_graph else weight
        context = graph.context
        size = context.next_size("sample")
        key, site, drawn = (context.key, context.next_site(), {}) if k == -1 else self._drawn_by(direct)
        sub, picked, _ = torch.ops.joestar.weighted_sample(
            indptr, weight, self.dsts, self.dst_count, not direct, k, replace, key, site, size,
            **self._hashed(), **drawn,
        )  # fmt: skip
        context.record(picked.shape[0])
        return self._compacted(
            sub, rows_at(indices, picked), lambda: picked if direct else rows_at(self.eids, picked), rows_of(picked)
        )

    def _drawn_by(self, direct: bool) -> tuple[Tensor, int, dict[str, Tensor]]:
        """(key, call site, ranks of the edges if they are not their positions) of a draw by weight.

        In a part that a first stage drew by weight, they are the first stage's: who wins a race among all edges of a
        row wins it among some of them, too. Drawn anew, heavy edges would count twice.

        Args:
            direct: whether edges are those of the graph, not of the slice.
        """
        graph, context = self.graph, self.graph.context
        site = context.next_site()
        if graph.first_key is not None:
            ranks = graph.ranks if direct else rows_at(graph.ranks, self.eids)
            return graph.first_key, FIRST_STAGE_SITE + site, {"ranks": ranks}
        if context.by_rank and not self.whole:
            first = graph.indptr[self.dsts.to(torch.int64)].repeat_interleave(self.indptr.diff())
            return context.key, site, {"ranks": (self.eids - first).to(torch.int32)}
        return context.key, site, {}

    def collective_sample(self, k: int, node_probs: Tensor | str | None = None) -> Block:
        """Samples up to ``k`` of the sources of this slice together and keeps the edges from them (layer-wise).

        Args:
            k: distinct sources; all of them where there are fewer.
            node_probs: relative weight of every node, ``None`` for equal ones: a name in ``graph.ndata``, or a float32
                tensor ``[graph.num_nodes]``. Nodes of weight 0 are never picked.

        Returns:
            A ``Block`` of the same destinations; its sources are those and the picked nodes (thesis table 5.3).

        Raises:
            SamplerError: as ``individual_sample``.
        """
        k = _number(k, "collective_sample")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise SamplerError(f"collective_sample: k must be a positive integer; got {k!r}.")
        graph, context = self.graph, self.graph.context
        weight = None if node_probs is None else node_weight(graph, node_probs)
        context.note_draw("nodes", self)
        indptr, indices, site = self.indptr, self.indices, context.next_site()
        nodes, count = torch.ops.joestar.collective_sample(
            indptr, indices, weight, graph.num_slots, min(k, graph.num_slots), context.key, site, **self._hashed()
        )
        part = self._from_sources(nodes, count)
        return part._compacted(*part._slice())

    def compact(self) -> Block:
        """Gives the sources local ids: a block with every edge of the slice."""
        if not self.whole:
            self.graph.context.note_draw("some edges", self)
        return self._every_edge()

    def _every_edge(self) -> Block:
        indptr, indices, eids = self._slice()
        return self._compacted(indptr, indices, eids, drawn=False)

    def _compacted(self, indptr: Tensor, indices: Tensor, eids, move: Move = same_rows, drawn: bool = True) -> Block:
        """``move``: from values of the slice's edges to those of the block's; ``drawn``: whether it has picks."""
        context = self.graph.context
        size = context.next_size("compact")
        srcs, local, _ = torch.ops.joestar.compact(
            self.dsts, self.dst_count, indptr, indices, self.graph.num_slots, size
        )
        context.record(srcs.shape[0])
        block = Block(indptr, local, srcs, self.dsts, self.graph, eids)
        context.note(block, drawn)
        return carry(self, block, move)

    def __repr__(self) -> str:
        return f"Columns(num_dst={self.num_dst} of {self.graph!r})"


def _number(k, call: str):
    """``k`` as Python's number, if it is a whole one.

    Raises:
        SamplerError: while traced, for NumPy's and PyTorch's, which are data there, of any value.
    """
    k = plain(k)
    data = isinstance(k, (Tensor, np.ndarray, np.generic))
    if torch.compiler.is_compiling() and (data or (isinstance(k, int) and not _is_known(k))):
        raise SamplerError(
            f"{call}: k is a number of NumPy's or PyTorch's, or computed from one, which nobody knows while the "
            "sampler is traced. Make it one of Python's in the sampler's __init__: self.k = int(k), self.fanouts = "
            "fanouts.tolist()."
        )
    return k


def _is_known(k: int) -> bool:
    return statically_known_true(k > 0) or statically_known_true(k <= 0)


def _is_all(key) -> bool:
    return isinstance(key, slice) and key == slice(None)
