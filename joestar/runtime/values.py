"""A captured program as values over all nodes and edges of the graph: what layer-wise inference evaluates.

The program was captured with a sampler that takes every neighbour at every hop. Over the whole graph its sampled sets
are the graph itself: sources and destinations of every hop are all nodes, in order, and its edges are the graph's.
Sampling, relabelling and gathers of all rows therefore disappear; sizes become numbers.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, PaddingError
from joestar.graph_api import Graph
from joestar.lowering import fakes
from joestar.lowering.capture import Captured
from joestar.lowering.dropout import refuse_random
from joestar.lowering.inputs import Input, Kind
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import expression
from joestar.runtime.rows import OVER_SEGMENTS, is_view, tensors_of
from joestar.runtime.shortcuts import SHORTCUTS
from joestar.torch_private import OpOverload

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_NODES, _EDGES = sympy.Symbol("nodes", integer=True, positive=True), sympy.Symbol("edges", integer=True, positive=True)


@dataclass(eq=False)
class Space:
    """What rows range over: the nodes (``indptr`` is ``None``), or edges whose offsets per node are ``indptr``."""

    indptr: "Value | None" = None


@dataclass(eq=False)
class Value:
    """A tensor, or several, over all nodes or edges, or without rows.

    Attributes:
        target, args, kwargs: the call that computes it; ``None`` and a tensor for a given one.
        meta: shape and dtype, symbolic; space: what dimension 0 ranges over, ``None`` for nothing or something else.
        fixed: whether no dimension depends on the graph's size. node: of the captured graph, for messages.
        edges, nodes: for operations on in-edges, the edges of their offsets, and the nodes.
        shape: sizes over the graph, in numbers; of given and of several tensors empty.
        nbytes: bytes of all of it (0 for what takes no memory of its own).
    """

    target: Callable | None
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    meta: object = None
    space: Space | None = None
    fixed: bool = False
    node: fx.Node | None = None
    tensor: Tensor | None = None
    edges: Space | None = None
    nodes: Space | None = None
    shape: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def num_rows(self) -> int:
        """Size of dimension 0."""
        return self.shape[0] if self.shape else 0

    def operands(self) -> list["Value"]:
        """Every value that it is computed from."""
        return tensors_of((*self.args, *self.kwargs.values()))


class _AmbiguousEdgesError(Exception):
    """Two structures have as many edges: their rows could not be told apart."""

    def __init__(self, size: sympy.Expr):
        self.size = size


@dataclass
class Values:
    """The values of a program in order, its results, and the node space."""

    order: list[Value]
    results: list[Value]
    nodes: Space
    num_nodes: int
    num_edges: int


def values_of(captured: Captured, graph: Graph) -> Values:
    """The captured program (``roles`` per placeholder, labels ``slice`` and ``compact`` per hop) over the whole graph.

    Raises:
        CaptureError: the program draws random numbers or writes to a buffer in evaluation mode.
    """
    apart: set[sympy.Expr] = set()
    while True:
        try:
            return _Builder(captured, graph, apart).run()
        except _AmbiguousEdgesError as ambiguous:
            apart.add(ambiguous.size)


def as_rows(table: Tensor) -> Tensor:
    """A tensor with a row per node or edge, seen as rows."""
    return table


class _Builder:
    """Translates nodes one by one; equal calls become one value."""

    def __init__(self, captured: Captured, graph: Graph, apart: set[sympy.Expr]):
        self.captured, self.graph = captured, graph
        self.apart = apart
        self.sizes = {_NODES: sympy.Integer(graph.num_nodes), _EDGES: sympy.Integer(graph.num_edges)}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.nodes = Space()
        self.spaces: dict[sympy.Expr, Space] = {_NODES: self.nodes}
        self.known: dict[fx.Node, object] = {}
        self.order: list[Value] = []
        self.calls: dict[tuple, Value] = {}
        self.consts: dict[int, Value] = {}
        self.node: fx.Node | None = None
        self.edge_ids: Value | None = None

    def run(self) -> Values:
        gm = self.captured.gm
        self.indptr, self.indices = self.const(self.graph.indptr), self.const(self.graph.indices)
        self.graph_edges = self.spaces[_EDGES] = Space(self.indptr)
        self.node_ids = self.ids(self.graph.num_nodes, self.graph.indices.dtype, self.nodes)
        self.edge_sources = self.rows(self.indices, self.spaces[_EDGES])
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, role in zip(placeholders, self.captured.roles, strict=True):
            self.node = node
            self.known[node] = self._placeholder(node, role)
        for node in gm.graph.nodes:
            self.node = node
            if node.op == "get_attr":
                self.known[node] = self.const(getattr(gm, node.target))
            elif node.op == "call_function":
                self.known[node] = self._call(node)
        (output,) = gm.graph.find_nodes(op="output")
        results = [self.known[node] for node in output.args[0]]
        return Values(self._needed(results), results, self.nodes, self.graph.num_nodes, self.graph.num_edges)

    def _needed(self, results: list[Value]) -> list[Value]:
        needed, stack = set(), list(results)
        while stack:
            value = stack.pop()
            if id(value) in needed:
                continue
            needed.add(id(value))
            stack += value.operands()
            stack += [value.space.indptr] if value.space is not None and value.space.indptr is not None else []
        return [value for value in self.order if id(value) in needed]

    # --- inputs ---

    def _placeholder(self, node: fx.Node, role: Input):
        if role.held:
            return self.const(role.tensor)
        if role.kind is Kind.KEY:
            return self.const(torch.zeros(3, dtype=torch.int64, device=self.graph.device))
        if role.kind is Kind.SEEDS:
            self.symbols[expression(node.meta["val"].shape[0])] = _NODES
            return self.node_ids
        if role.kind is Kind.NUM_SEEDS:
            self.symbols[expression(node.meta["val"])] = _NODES
            return self.graph.num_nodes
        edges = self.captured.labels[role.index] == "slice"
        self.symbols[expression(node.meta["val"])] = _EDGES if edges else _NODES
        return self.graph.num_edges if edges else self.graph.num_nodes

    def const(self, tensor: Tensor) -> Value:
        """A given tensor."""
        if id(tensor) not in self.consts:
            value = Value(None, meta=tensor, fixed=True, tensor=tensor, node=self.node)
            self.consts[id(tensor)] = value
            self.order.append(value)
        return self.consts[id(tensor)]

    def ids(self, count: int, dtype: torch.dtype, space: Space) -> Value:
        """0, 1, 2, ...: made only if something reads more than its order."""
        options = {"dtype": dtype, "device": self.graph.device}
        meta = fakes.run(self.captured.gm.graph, torch.empty, count, **options)
        value = Value(_ATEN.arange.default, (count,), options, meta, space, node=self.node, shape=(count,))
        value.nbytes = count * dtype.itemsize
        self.order.append(value)
        return value

    def rows(self, table: Value, space: Space) -> Value:
        """A tensor that has a row per node or edge as rows of the space."""
        key = (as_rows, id(table), id(space))
        if key not in self.calls:
            value = Value(as_rows, (table,), meta=table.meta, space=space, node=self.node)
            value.shape = tuple(map(self._number, table.meta.shape))
            self.order.append(value)
            self.calls[key] = value
        return self.calls[key]

    # --- sizes ---

    def _number(self, symbolic):
        """A symbolic number under the graph's sizes."""
        expr = getattr(getattr(symbolic, "node", None), "expr", symbolic)
        value = sympy.sympify(expr).xreplace(self.symbols).xreplace(self.sizes)
        if isinstance(symbolic, torch.SymBool) or value in (sympy.true, sympy.false):
            return bool(value)
        number = sympy.N(value) if not value.is_number or not value.is_integer else value
        return int(value) if number.is_integer and not isinstance(symbolic, torch.SymFloat) else float(number)

    def size(self, size) -> sympy.Expr:
        """Canonical size of a dimension: an integer, or an expression in nodes and edges."""
        expr = expression(size)
        return sympy.Integer(int(size)) if expr is None else sympy.expand(expr.xreplace(self.symbols))

    def _space(self, meta) -> tuple[Space | None, bool]:
        """(what the rows of a result range over, whether no size depends on the graph)."""
        tensors = [t for t in (meta if isinstance(meta, (list, tuple)) else [meta]) if isinstance(t, Tensor)]
        sizes = [[self.size(size) for size in tensor.shape] for tensor in tensors]
        if not any(size.free_symbols for shape in sizes for size in shape):
            return None, True
        spaces = {id(space): space for space in (self.leading(shape) for shape in sizes)}
        (space,) = spaces.values() if len(spaces) == 1 else (None,)
        return space, False

    def leading(self, shape: list[sympy.Expr]) -> Space | None:
        """What dimension 0 ranges over, if no other dimension does."""
        if not shape or any(size.free_symbols for size in shape[1:]) or shape[0] in self.apart:
            return None
        return self.spaces.get(shape[0])

    # --- calls ---

    def _call(self, node: fx.Node):
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            return self._number(node.meta["val"])
        args = fx.map_arg(node.args, self.known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self.known.__getitem__)
        short = SHORTCUTS.get(node.target)
        found = None if short is None else short(self, node, args)
        if found is not None:
            return found
        self._check(node)
        return self.made(node.target, args, kwargs, node.meta["val"])

    def made(self, target: Callable, args: tuple, kwargs: dict, meta) -> Value:
        """The value of a call; that of an equal call, if there was one."""
        key = (target, _frozen(args), _frozen(tuple(kwargs.items())))
        if key in self.calls:
            return self.calls[key]
        space, fixed = self._space(meta)
        value = Value(target, tuple(args), dict(kwargs), meta, space, fixed, self.node)
        if target in OVER_SEGMENTS:
            value.nodes, value.edges = self.nodes, self._edges_of(args[0])
        if target in (_JOESTAR.edge_dst.default, _JOESTAR.edge_softmax.default, _JOESTAR.sddmm.default):
            value.space = value.edges
        if value.target is not operator.getitem and (not is_view(target) or target._schema.name in _MAYBE_COPIES):
            value.nbytes = sum(map(self._nbytes, meta if isinstance(meta, (list, tuple)) else [meta]))
        value.shape = tuple(map(self._number, meta.shape)) if isinstance(meta, Tensor) else ()
        self.order.append(value)
        self.calls[key] = value
        return value

    def _nbytes(self, meta) -> int:
        if not isinstance(meta, Tensor):
            return 0
        return math.prod(self._number(size) for size in meta.shape) * meta.element_size()

    def _edges_of(self, indptr: Value) -> Space | None:
        return next((space for space in self.spaces.values() if space.indptr is indptr), None)

    def _check(self, node: fx.Node) -> None:
        if not isinstance(node.target, OpOverload):
            return
        if node.target._schema.is_mutable and node.target is not _ATEN.batch_norm.default:
            raise CaptureError(
                f"{node.target} at {node_line(node)} writes to a buffer in evaluation mode: inference changes nothing. "
                "Do it while training only (if self.training: ...)."
            )
        if _is_random(node):
            raise CaptureError(
                f"{node.target} at {node_line(node)} is random in evaluation mode, and exact inference is not. Hand "
                "training=self.training to F.dropout, or use torch.nn.Dropout."
            )
        if node.target is _ATEN.batch_norm.default and node.args[5] and node.args[3] is not None:
            raise CaptureError(
                f"batch_norm at {node_line(node)} would update its running statistics in evaluation mode. Hand it "
                "training=self.training."
            )

    def structure(self, indptr: Value, indices: Value) -> tuple[Value, Value]:
        """Offsets and sources that were made, whose edges are a space of their own."""
        size = self.size(indices.meta.shape[0])
        if size in self.spaces and self.spaces[size].indptr is not indptr and size not in self.apart:
            raise _AmbiguousEdgesError(size)
        self.spaces.setdefault(size, Space(indptr))
        return indptr, indices


def _is_random(node: fx.Node) -> bool:
    try:
        refuse_random(node)
    except PaddingError:
        return True
    return False


_MAYBE_COPIES = {"aten::to", "aten::contiguous", "aten::reshape"}


def _frozen(argument):
    if isinstance(argument, Value):
        return ("value", id(argument))
    if isinstance(argument, (list, tuple)):
        return tuple(map(_frozen, argument))
    return (type(argument), repr(argument) if isinstance(argument, float) else argument)


def row_bytes(meta) -> int:
    """Bytes per row of a result, all its tensors together."""
    tensors = [tensor for tensor in (meta if isinstance(meta, (list, tuple)) else [meta]) if isinstance(tensor, Tensor)]
    return sum(math.prod(map(int, tensor.shape[1:])) * tensor.element_size() for tensor in tensors)
