"""Which set a symbolic size belongs to: its bound, its count on the device, and the ids of its rows.

While the graph is symbolic, a dimension *is* the set it ranges over: ``s43`` may be "the sources of hop 0". That lets
dropout find the node ids behind a row, and padding find the count behind a mean.
"""

import functools
import operator
from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor, fx

from joestar.lowering.inputs import Input, Kind
from joestar.ops.registry import OPS

RAGGED = {op.target: op.position(op.makes.bound) for op in OPS.values() if op.makes}
"""Ops that make a set of data-dependent size: position of the bound among their arguments; the count is output 2."""

ROW_IDS = {op.target: op.position(op.makes.rows) for op in OPS.values() if op.makes and op.makes.rows}
"""Those that make edges: position of the ids of their rows."""

NODES = RAGGED.keys() - ROW_IDS.keys()
"""Those that make nodes, which begin with those of their first argument; output 0 are their ids."""

LOOPED = {op.target: op.loops for op in OPS.values() if op.loops}
"""Ops that give (offsets, sources, ...) of a block with self-loops; the offsets of the block are their first input."""


def expression(size) -> sympy.Expr | None:
    """The symbolic expression of a size, or ``None`` for a plain integer."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return expr if expr.free_symbols else None
    return None


def same_size(a, b) -> bool:
    """Whether two sizes, symbolic or plain integers, are equal in every batch.

    A symbolic size equals no plain integer. (Never compare their ``expression``: it is ``None`` for every integer.)
    """
    left, right = expression(a), expression(b)
    if left is None or right is None:
        return left is right and int(a) == int(b)
    return left == right or sympy.expand(left - right) == 0


def same_shape(a, b) -> bool:
    """Whether two shapes are equal in every batch."""
    return len(a) == len(b) and all(map(same_size, a, b))


def padded_dims(value) -> dict[int, sympy.Expr]:
    """Dimensions of a tensor that range over a set of data-dependent size."""
    if not isinstance(value, Tensor):
        return {}
    found = ((dim, expression(size)) for dim, size in enumerate(value.shape))
    return {dim: expr for dim, expr in found if expr is not None}


def item(gm: fx.GraphModule, node: fx.Node, index: int) -> fx.Node:
    """Output ``index`` of a multi-output node: the getitem that exists, else a new one right behind it."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(operator.getitem, (node, index))
    new.meta = {"val": node.meta["val"][index], "stack_trace": node.meta.get("stack_trace")}
    return new


def is_counted(node: fx.Node) -> bool:
    """Whether an op makes a set whose size is read elsewhere, and no other op makes it: its count is the true size."""
    if node.target not in RAGGED:
        return False
    size = node.args[RAGGED[node.target]]
    others = [user for user in size.users if user is not node] if isinstance(size, fx.Node) else []
    return bool(others) and not any(o.target in RAGGED and o.args[RAGGED[o.target]] is size for o in others)


@dataclass
class SizeTable:
    """What is known of every symbol of a captured graph.

    Attributes:
        bounds: symbol -> (index of the size, the op's node) for sets of data-dependent size.
        ids: expression of a node set -> node with the ids of its rows.
        edges: expression of an edge set -> (indptr node, node with the ids of its rows).
        seeds: symbol of the seeds, or ``None`` if their number is not used.
        exact: sizes of edges with appended loops: as many as edges and rows together, whatever the loops before.
        parents: size of a node set -> size of the set that is its beginning (the destinations among the sources).
    """

    bounds: dict[sympy.Symbol, tuple[int, fx.Node]] = field(default_factory=dict)
    ids: dict[sympy.Expr, fx.Node] = field(default_factory=dict)
    edges: dict[sympy.Expr, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    exact: set[sympy.Expr] = field(default_factory=set)
    seeds: sympy.Symbol | None = None
    parents: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict)

    def begins(self, part: sympy.Expr | None, whole: sympy.Expr | None) -> bool:
        """Whether the set ``part`` is the beginning of the set ``whole``, in any batch."""
        while whole is not None and whole != part:
            whole = self.parents.get(whole)
        return whole is not None

    def with_loops(self, expr: sympy.Expr) -> sympy.Expr | None:
        """The edges with added self-loops (valid ones unknown from sizes alone) that ``expr`` is a multiple of."""
        for edges in self.edges:
            if not edges.is_Symbol and edges not in self.exact and _is_multiple(expr, edges):
                return edges
        return None


@functools.lru_cache(maxsize=1 << 12)
def _is_multiple(expr: sympy.Expr, of: sympy.Expr) -> bool:
    """Whether one is a number of times the other; asked of the same sizes over and over, and slow to find."""
    return expr.free_symbols == of.free_symbols and sympy.cancel(expr / of).is_number


def size_table(gm: fx.GraphModule, roles: list[Input]) -> SizeTable:
    """Reads the table off the graph."""
    table = SizeTable()
    size_of = {}
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if role.kind is Kind.SIZE:
            size_of[node] = role.index
        elif role.kind is Kind.SEEDS:
            table.seeds = expression(node.meta["val"].shape[0])
            table.ids[table.seeds] = node
    for node in list(gm.graph.nodes):
        if node.target in RAGGED:
            bound = node.args[RAGGED[node.target]]
            if not isinstance(bound, fx.Node) or bound not in size_of:
                continue
            symbol = expression(bound.meta["val"])
            if symbol in table.bounds:
                continue  # the same sample, drawn again; what needs its count may stand in between
            table.bounds[symbol] = (size_of[bound], node)
            if node.target in NODES:
                table.ids[symbol] = item(gm, node, 0)
                table.parents[symbol] = expression(node.args[0].meta["val"].shape[0])
            else:
                table.edges[symbol] = (item(gm, node, 0), node.args[ROW_IDS[node.target]])
        elif node.target in LOOPED:
            rows = expression(node.args[0].meta["val"].shape[0])
            edges = expression(node.meta["val"][1].shape[0])
            if rows is not None and rows - 1 in table.ids:
                table.edges[edges] = (item(gm, node, 0), table.ids[rows - 1])
                table.exact |= {edges} if LOOPED[node.target] == "all" else set()
    return table
