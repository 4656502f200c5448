"""``Graph``: a homogeneous graph in CSC with named node and edge tensors (thesis 5.3.1)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api import transform
from joestar.graph_api.arrays import SPLITS, Split, version
from joestar.graph_api.columns import Columns
from joestar.graph_api.computation import Computation, check_side
from joestar.graph_api.context import SamplingContext
from joestar.graph_api.frame import Frame
from joestar.graph_api.interchange import Interchange
from joestar.graph_api.row_source import source_of
from joestar.graph_api.validate import check_csc, check_edge_index, check_node_ids, check_nodes, check_seed


class Graph(Interchange, Computation):
    """A directed graph; edge ``u -> v`` means that ``v`` aggregates from ``u``.

    Attributes:
        indptr: int64 ``[num_nodes + 1]``: in-edges of node ``v`` are at ``indptr[v]:indptr[v + 1]``.
        indices: int32 or int64 ``[num_edges]``: the source of every edge.
        ndata: named node tensors ``[num_nodes, ...]``; ``"x"`` features and ``"y"`` labels by convention.
        edata: named edge tensors ``[num_edges, ...]`` in CSC order.
        ids: what random draws and dropout masks know every node by, ``[num_nodes]`` in the dtype of ``indices``, or
            ``None``: by its position. A part of a larger graph whose ``ids`` are the nodes' ids there draws what the
            larger graph draws. Positions (rows of ``ndata``, seeds, ``block.srcs``) are the part's own.
        train_idx, val_idx, test_idx: node ids of the splits, or ``None``; assigned arrays, lists and masks become ids.
        name, num_classes, multilabel: what a dataset knows of itself.
        class_names: text of every class id, or ``None``. feature_names: of every column of ``x``, of a table's.
        mapping: a ``NodeMapping`` to the ids that the nodes had in the user's files, or ``None``.
        whole_degrees: where this is a part of a larger graph, in-degrees there, int64 ``[num_nodes]``; else ``None``.
        first_key, ranks: where this is a part whose draws are those of a first stage, its key int64 ``[3]``, and every
            edge's position in its row in the whole graph, int32 ``[num_edges]``; else ``None``. The same draws
            here, which are races all of them, find the same edges.
        positions: where this is a part whose nodes have slots (``as_part_of``), the number of every slot's node in the
            whole graph, ``[num_slots]``; else ``None``. Programs then see the whole graph's numbers.

    NumPy arrays and lists are taken wherever tensors go. Build one with ``from_csc``, ``from_edge_index``,
    ``from_scipy``, ``from_networkx``, ``from_pyg`` or ``joestar.data.from_tables``, which validate; the constructor
    does not.
    """

    train_idx, val_idx, test_idx = Split(), Split(), Split()

    def __init__(self, indptr: Tensor, indices: Tensor, ndata=None, edata=None, context: SamplingContext | None = None):
        self.indptr = indptr
        self.indices = indices
        self.ndata = {} if ndata is None else ndata
        self.edata = {} if edata is None else edata
        self._train_idx = self._val_idx = self._test_idx = None
        self.name = ""
        self.num_classes = None
        self.multilabel = False
        self.class_names = self.feature_names = None
        self.mapping = None
        self.whole_degrees = None
        self._context = context
        self._formats = {}
        self._ids = None
        self.positions = None
        self._whole_sizes = None
        self.first_key = self.ranks = None

    # --- construction ---

    @classmethod
    def from_csc(cls, indptr: Tensor, indices: Tensor, ndata=None, edata=None, *, validate: bool = True) -> "Graph":
        """A graph from compressed in-neighbours, without a copy.

        Args:
            indptr: int64 ``[N + 1]``, starting at 0, non-decreasing, ending at ``len(indices)``.
            indices: int32 or int64 ``[E]`` in ``[0, N)``.
            ndata, edata: dicts of tensors with N, respectively E rows.
            validate: check the contents (a pass over both tensors); shapes and dtypes are always checked.

        Raises:
            GraphError: naming the first entry that is wrong.
        """
        indptr, indices = check_csc(indptr, indices, validate)
        graph = cls(indptr.contiguous(), indices.contiguous())
        graph.ndata = Frame("ndata", "nodes", graph.num_nodes, ndata)
        graph.edata = Frame("edata", "edges", graph.num_edges, edata)
        return graph

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int | None = None, ndata=None, edata=None) -> "Graph":
        """A graph from ``edge_index`` ``[2, E]`` (row 0 sources, row 1 destinations), as PyG holds it.

        ``edata`` rows follow the given edge order and are permuted to CSC order with the edges.

        Args:
            num_nodes: by default the largest id plus 1. Ids that are huge, or text, are relabelled by
                ``joestar.data.from_tables``.
        """
        edge_index, num_nodes = check_edge_index(edge_index, num_nodes)
        src, dst = edge_index[0], edge_index[1].to(torch.int64)
        order = torch.argsort(dst, stable=True)
        indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=dst.device)
        torch.cumsum(torch.bincount(dst, minlength=num_nodes), 0, out=indptr[1:])
        given = Frame("edata", "edges", src.shape[0], edata)
        small = num_nodes <= torch.iinfo(torch.int32).max
        indices = src[order].to(torch.int32 if small else torch.int64)
        sorted_edata = {name: value[order] for name, value in given.items()}
        return cls.from_csc(indptr, indices, ndata, sorted_edata, validate=False)

    # --- ids ---

    @property
    def ids(self) -> Tensor | None:
        """What random draws and dropout masks know every node by; ``None``: by its position."""
        return self._ids

    @ids.setter
    def ids(self, ids: Tensor | None) -> None:
        self._ids = None if ids is None else check_node_ids(ids, self)

    def ids_of(self, nodes: Tensor) -> Tensor:
        """``ids`` of the nodes ``[n]``; the nodes themselves where the graph has none."""
        return nodes if self._ids is None else torch.index_select(self._ids, 0, nodes)

    def as_part_of(self, whole: "Graph", positions: Tensor) -> None:
        """Makes this a part, in slots, of a larger graph.

        Slots are what ``ndata``, ``seeds`` and ``block.srcs`` go by; ``num_nodes``, ``num_edges`` and degrees are the
        whole graph's, and a compiled program that computes with nodes does so with their numbers there.

        Args:
            positions: of every slot's node in ``whole``, ``[num_slots]`` in the dtype of ``indices``; may change.
        """
        self.positions = check_node_ids(positions, self)
        self._whole_sizes = whole.num_nodes, whole.num_edges

    # --- property queries (thesis table 5.2) ---

    @property
    def num_nodes(self) -> int:
        """Number of nodes; of the whole graph, where this is a part in slots."""
        return self.num_slots if self._whole_sizes is None else self._whole_sizes[0]

    @property
    def num_edges(self) -> int:
        """Number of edges; of the whole graph, where this is a part in slots."""
        return self.indices.shape[0] if self._whole_sizes is None else self._whole_sizes[1]

    @property
    def num_slots(self) -> int:
        """Rows of node data: the number of nodes, but in a part in slots."""
        return self.indptr.shape[0] - 1

    @property
    def num_src(self) -> int:
        """Sources: every node (a graph can stand where a block is expected)."""
        return self.num_slots

    @property
    def num_dst(self) -> int:
        """Destinations: every node."""
        return self.num_slots

    @property
    def nodes(self) -> Tensor:
        """Every node id ``[num_nodes]``."""
        return torch.arange(self.num_nodes, dtype=self.indices.dtype, device=self.device)

    @property
    def srcs(self) -> Tensor:
        """Ids of the sources: every node."""
        return self.nodes

    @property
    def dsts(self) -> Tensor:
        """Ids of the destinations: every node."""
        return self.nodes

    @property
    def src_ids(self) -> Tensor:
        """What random draws know the sources by: ``ids``, or every node."""
        return self.nodes if self._ids is None else self._ids

    @property
    def eids(self) -> Tensor:
        """Positions of the edges: every one, int64 ``[num_edges]``."""
        return torch.arange(self.num_edges, device=self.device)

    @property
    def srcdata(self) -> dict[str, Tensor]:
        """Tensors of the sources: ``ndata``."""
        return self.ndata

    @property
    def dstdata(self) -> dict[str, Tensor]:
        """Tensors of the destinations: ``ndata``."""
        return self.ndata

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self.indptr.device

    def in_degrees(self) -> Tensor:
        """Edges entering every node, int64 ``[num_nodes]``: in the whole graph, where this is a part of one."""
        return super().in_degrees() if self.whole_degrees is None else self.whole_degrees

    def in_degrees_of(self, nodes: Tensor) -> Tensor:
        """In-degrees of the given nodes, int64 ``[len(nodes)]``; in the whole graph, where this is a part in slots."""
        return self.edges_of(nodes) if self.positions is None else self.whole_degrees_of(nodes)

    def edges_of(self, nodes: Tensor) -> Tensor:
        """How many in-edges of the given nodes are here, int64 ``[len(nodes)]``."""
        return torch.index_select(self.indptr, 0, nodes + 1) - torch.index_select(self.indptr, 0, nodes)

    def whole_degrees_of(self, nodes: Tensor) -> Tensor:
        """In-degrees of the given nodes in the whole graph, of which this may be a part, int64 ``[len(nodes)]``."""
        if self.whole_degrees is None:
            return self.edges_of(nodes)
        return torch.index_select(self.whole_degrees, 0, nodes)

    def graph_degrees(self, side: str) -> Tensor:
        """In-degrees of every node, int64 ``[num_nodes]``; ``GraphError`` unless ``side`` is ``"src"`` or ``"dst"``."""
        check_side(side, "graph_degrees")
        return self.in_degrees()

    def csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """Out-neighbours: (indptr over sources, destinations, CSC position of each edge); derived once, then cached
        until the edges change."""
        self._check_whole("graph.csr()")
        self._forget_formats()
        if "csr" not in self._formats:
            src, dst, _ = self.coo()
            order = torch.argsort(src, stable=True)
            indptr = torch.zeros_like(self.indptr)
            torch.cumsum(torch.bincount(src, minlength=self.num_nodes), 0, out=indptr[1:])
            self._formats["csr"] = indptr, dst[order], order
        return self._formats["csr"]

    def coo(self) -> tuple[Tensor, Tensor, Tensor]:
        """Edges sorted by destination: (sources, destinations, CSC positions); cached until they change."""
        self._check_whole("graph.coo()")
        self._forget_formats()
        if "coo" not in self._formats:
            dst = torch.ops.joestar.edge_dst(self.indptr, self.num_edges, self.indices)
            self._formats["coo"] = self.indices, dst, torch.arange(self.num_edges, device=self.device)
        return self._formats["coo"]

    def _forget_formats(self) -> None:
        """Drops what was derived of edges that have been replaced, or written in place, since."""
        if torch.compiler.is_compiling():
            return
        of = [(tensor, version(tensor)) for tensor in (self.indptr, self.indices)]
        known = self._formats.get("of", of)
        if any(a is not b or one != other for (a, one), (b, other) in zip(of, known, strict=True)):
            self._formats.clear()
        self._formats["of"] = of

    # --- structural transformations (thesis table 5.2) ---

    def __getitem__(self, key) -> Columns:
        """Subgraph extraction: ``graph[:, dsts]`` has the in-edges of ``dsts``, ``graph[srcs, :]`` the out-edges of
        ``srcs``, ``graph[srcs, dsts]`` the edges from the ones to the others.

        ``srcs`` and ``dsts`` are ids ``[n]``. Destinations keep their order, and a row for every time they stand there;
        of ``graph[srcs, :]`` they are all nodes. For sources neither order nor repetition matters.
        """
        if not isinstance(key, tuple) or len(key) != 2 or not all(map(_is_selection, key)):
            raise GraphError(
                "a graph is sliced by sources and destinations: graph[:, dsts], graph[srcs, :] or graph[srcs, dsts], "
                "with tensors of node ids."
            )
        srcs, dsts = key
        if isinstance(dsts, slice):
            columns = Columns.everything(self)
        else:
            columns = Columns(self, check_nodes(dsts, self, "dsts"))
        return columns if isinstance(srcs, slice) else columns[srcs, :]

    def __add__(self, other: "Graph") -> "Graph":
        """The union: every edge of both, copies counted (``A1 + A2`` of the adjacency matrices).

        In each row the edges of ``self`` come first. Edge data that both have, alike in dtype and shape, are carried
        over; the rest, and ``other``'s node data, are not.
        """
        return transform.union(self, other) if isinstance(other, Graph) else NotImplemented

    def __sub__(self, other: "Graph") -> "Graph":
        """The difference: the edges of ``self``, with their data, between ends that ``other`` has no edge between.

        One edge ``u -> v`` of ``other`` removes all copies of it.
        """
        return transform.difference(self, other) if isinstance(other, Graph) else NotImplemented

    def reverse(self) -> "Graph":
        """Every edge turned around (the transposed matrix); edge data go with their edges."""
        return transform.reverse(self)

    def keep_edges(self, kept: Tensor) -> "Graph":
        """The edges for which ``kept``, bool ``[num_edges]`` in CSC order, is true, with their data."""
        return transform.keep_edges(self, kept)

    def remove_self_loops(self) -> "Graph":
        """The graph without edges from a node to itself; the others keep their data."""
        return transform.remove_self_loops(self)

    def has_self_loops(self) -> bool:
        """Whether any edge joins a node to itself; reads the edges in parts until one does."""
        return transform.has_self_loops(self)

    def add_self_loops(self, fill: Mapping[str, float | Tensor] | None = None) -> "Graph":
        """The graph with exactly one self-loop per node, at the end of its row; loops that were there are dropped.

        Args:
            fill: edge data to carry over, with the value that the loops get, a number or a row: ``{"w": 1.0}``. Others
                are not carried.

        Raises:
            GraphError: for a name that ``edata`` has not, or a value that its dtype or its rows cannot hold.
        """
        if fill is not None and not (isinstance(fill, Mapping) and not fill):
            return transform.add_self_loops(self, fill)
        count = torch.full((), self.num_nodes, dtype=torch.int64, device=self.device)
        indptr, indices = torch.ops.joestar.add_self_loops(self.indptr, self.indices, count)
        ndata = self.ndata
        if not torch.compiler.is_compiling():
            indices, ndata = indices[: int(indptr[-1])], ndata.copy()
        return self._describe(Graph(indptr, indices, ndata, context=self._context))

    def to_bidirected(self) -> "Graph":
        """Every edge in both directions, each once: duplicates are removed; sources ascend in every row.

        Edge data are not carried over: ``u -> v`` and ``v -> u`` may disagree.
        """
        return transform.to_bidirected(self)

    # --- views ---

    @property
    def context(self) -> SamplingContext:
        """What sampling draws from; without one, the key (0, 0, 0) and call sites numbered afresh for each access."""
        if self._context is None:
            return SamplingContext(torch.zeros(3, dtype=torch.int64, device=self.device))
        return self._context

    def with_context(self, context: SamplingContext) -> "Graph":
        """A view of the graph that samples under the given key and sizes."""
        view = self._describe(Graph(self.indptr, self.indices, self.ndata, self.edata, context))
        view._formats = self._formats
        view.whole_degrees = self.whole_degrees
        view.positions, view._whole_sizes = self.positions, self._whole_sizes
        view.first_key, view.ranks = self.first_key, self.ranks
        return view

    @property
    def has_context(self) -> bool:
        """Whether this is a view with a key of its own."""
        return self._context is not None

    def keyed(self, seed: int = 0, epoch: int = 0, step: int = 0) -> "Graph":
        """A view whose samples are those of this (seed, epoch, step); its call sites are numbered from 0."""
        key = torch.tensor([check_seed(seed), epoch, step], dtype=torch.int64, device=self.device)
        return self.with_context(SamplingContext(key))

    def to(self, device) -> "Graph":
        """The graph with its structure, data and splits on ``device`` (itself if it is there)."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        graph = self._describe(Graph.from_csc(self.indptr.to(device), self.indices.to(device), validate=False))
        graph.ids = None if self.ids is None else self.ids.to(device)
        graph.whole_degrees = None if self.whole_degrees is None else self.whole_degrees.to(device)
        for frame, source in ((graph.ndata, self.ndata), (graph.edata, self.edata)):
            for name, value in source.items():
                far = source_of(source, name)
                frame[name] = (value if far is None else far).to(device)
        for name in SPLITS:
            split = getattr(self, name)
            setattr(graph, name, None if split is None else split.to(device))
        return graph

    def _check_whole(self, what: str) -> None:
        if self.positions is not None:
            raise GraphError(
                f"{what} needs all edges of the graph. With memory= and first_stage= a macro-batch has a part of them: "
                "compute what you need of them before compile, and put it into graph.ndata or graph.edata."
            )

    def _describe(self, graph: "Graph") -> "Graph":
        """``graph`` with this one's splits, name and classes: it has the same nodes."""
        graph._train_idx, graph._val_idx, graph._test_idx = self._train_idx, self._val_idx, self._test_idx
        graph.name, graph.num_classes, graph.multilabel = self.name, self.num_classes, self.multilabel
        graph.class_names, graph.feature_names = self.class_names, self.feature_names
        graph.mapping = self.mapping
        if self._ids is not None and self._ids.device == graph.device:
            graph._ids = self._ids
        return graph

    def __repr__(self) -> str:
        data = ", ".join(f"{name}{list(value.shape)}" for name, value in self.ndata.items())
        return f"Graph({self.name or 'unnamed'}: {self.num_nodes:,} nodes, {self.num_edges:,} edges; {data})"


def _is_selection(key) -> bool:
    return not isinstance(key, slice) or key == slice(None)
