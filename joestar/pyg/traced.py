"""The sets of edges of the batch that is being traced, which functions of PyG's are told by the tensors they get."""

from torch import Tensor

CUT = "edges are cut out by the mask of their set"
"""A note in the graph of a mask of edges, and that of the set that stands in for what it cuts out."""


class Traced:
    """The sets of edges of the batch that is being traced.

    Attributes:
        edges: what the model is called with (``graph_api.subgraph.LocalEdges``), ``None`` outside of a trace.
        loop_free, looped, free_looped: those made of it, ``None`` as long as nobody asked for them.
        relation: the next type of edges that a layer over types asks for, ``None`` outside of such layers.
    """

    def __init__(self):
        self.edges = None
        self.subgraph = None
        self.loop_free = None
        self.looped = None
        self.free_looped = None
        self.typed = None
        self.relation = None

    def begin(self, edges, subgraph) -> None:
        """A new batch: ``edges`` is what the model is called with (``graph_api.subgraph.LocalEdges``)."""
        self.edges, self.subgraph = edges, subgraph
        self.loop_free = self.looped = self.free_looped = self.typed = self.relation = None

    def without_loops(self):
        """The edges between different nodes."""
        if self.loop_free is None:
            self.loop_free = self.subgraph.loop_free()
        return self.loop_free

    def with_loops(self, edges):
        """``edges`` and a loop per node."""
        if edges is self.edges:
            if self.looped is None:
                self.looped = edges.with_loops()
            return self.looped
        if self.free_looped is None:
            self.free_looped = edges.with_loops()
        return self.free_looped

    def of_types(self):
        """The edges of each type that the sampler told apart."""
        if self.typed is None:
            self.typed = self.subgraph.of_types()
        return self.typed

    def has_types(self, edge_index, edge_type) -> bool:
        """Whether the sampler told the edges apart by this very tensor."""
        return (
            self.holds(edge_index, self.edges)
            and self.subgraph.types is not None
            and (self.subgraph.types is edge_type)
        )

    @staticmethod
    def holds(edge_index: Tensor, edges) -> bool:
        """Whether a tensor is the one that a set of edges was handed out as."""
        return edges is not None and edge_index is edges.edge_index


TRACED = Traced()
