"""What a reduction over edges computes per edge, as a segment program, grown backwards from it to what it reads.

Values have a number per column, per head or per edge. One inside has readers inside alone; what somebody else reads as
well is stored anyway, and is read from there. Rows of the ends of edges (``sddmm``) and products of a few columns of
edge data are made where they are read, whoever else reads them. Views that keep rows apart are looked through.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.edges.edge_steps import (
    OF_BOTH,
    Leaf,
    Value,
    behind,
    edge_product,
    fixed,
    is_view,
    row_size,
    steps_of,
)
from joestar.fusion.match.emit import name, tensor
from joestar.fusion.record import Reject
from joestar.kernels.segment_program import FULL, HEAD, ONE, SegmentProgram
from joestar.lowering.sizes import same_size

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SDDMM, _SUM = _JOESTAR.sddmm.default, _ATEN.sum.dim_IntList


@dataclass
class Region:
    """Operations on edges in front of a reduction.

    Attributes:
        like: a value ``[E, ...]`` of the edges: their number and dtype.
        edges: (offsets, sources) of the edges; each ``None`` if not known before an end is read.
        heads, width: how columns are split.
        inside: values that the program computes; border: values in front of those, nearest first.
        leaves, steps: the program; values: of the nodes.
    """

    like: fx.Node
    edges: tuple[fx.Node | None, fx.Node | None]
    heads: int
    width: int
    inside: set[fx.Node] = field(default_factory=set)
    border: list[fx.Node] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)
    values: dict[fx.Node, Value] = field(default_factory=dict)

    # --- sizes ---

    def size(self, node: fx.Node) -> int | None:
        """``FULL``, ``HEAD`` or ``ONE`` of a value of the edges, in their dtype; ``None`` of anything else."""
        value, like = tensor(node), self.like.meta["val"]
        if (
            value is None
            or value.dim() < 1
            or value.dtype != like.dtype
            or not same_size(value.shape[0], like.shape[0])
        ):
            return None
        return self._size(row_size(node))

    def is_full(self, node: fx.Node) -> bool:
        """Whether a node holds a number per edge and column."""
        return self.size(node) == FULL

    def _size(self, numbers: int | None) -> int | None:
        return {1: ONE, self.heads: HEAD, self.heads * self.width: FULL}.get(numbers)

    def by_heads(self, node: fx.Node) -> bool:
        """Whether the last dimension of rows is that of a head's columns."""
        shape = tuple(node.meta["val"].shape[1:])
        return shape == (self.heads, self.width) or (self.heads == 1 and shape == (self.width,))

    # --- growth ---

    def grow(self, roots: Iterable[fx.Node], readers: set[fx.Node], context, strict: bool = True) -> Reject | None:
        """Encloses what is in front of ``roots``, which ``readers`` read, and writes the program.

        Args:
            strict: whether values with another reader end the region.
        """
        self._enclose({behind(root) for root in roots}, readers, strict)
        if self.edges[1] is None:
            found = self.loads()
            if not found:
                return Reject("the values read no end of their edges")
            self.edges = found[0].args[:2]
        inside, border = self.inside, set(self.border)
        for node in self.like.graph.nodes:
            if node in inside:
                self.values[node] = self._computed(node)
            elif node in border:
                value = self._loaded(node, context)
                if value is None:
                    return Reject(f"{name(node)} in front of the reduction is no step of a program")
                self.values[node] = value
        return None

    def loads(self) -> list[fx.Node]:
        """Values in front of the region that hold rows of the ends of its edges: the program reads the rows instead."""
        return [node for node in self.border if self._of_ends(node)]

    def _enclose(self, waiting: set[fx.Node], readers: set[fx.Node], strict: bool) -> None:
        position, border = {node: index for index, node in enumerate(self.like.graph.nodes)}, {}
        while waiting:
            node = max(waiting, key=position.__getitem__)
            waiting.remove(node)
            operands = self._operands(node)
            if operands is None or (strict and not _read_within(node, self.inside | readers)):
                border[node] = None
                continue
            self.inside.add(node)
            waiting.update(behind(part) for part, kind in operands.items() if kind == "value")
        self.border = list(border)

    def _operands(self, node: fx.Node) -> dict[fx.Node, str] | None:
        """How the operands of a step take part in it; ``None`` if the node is no step of a program."""
        steps = self._steps(node)
        if steps is None:
            return None
        parts = [part for step in steps for part in step[1:] if isinstance(part, fx.Node)]
        operands = {part: "value" if node.target is _SUM else self.kind(node, part) for part in parts}
        return None if None in operands.values() else operands

    def _steps(self, node: fx.Node) -> list[tuple] | None:
        if self.size(node) is None:
            return None
        return self._total(node) if node.target is _SUM else steps_of(node)

    def _total(self, node: fx.Node) -> list[tuple] | None:
        """Of a sum over the columns of each head."""
        of, dims = node.args[:2]
        if node.kwargs.get("dtype") is not None or not self.is_full(of) or not self.by_heads(of):
            return None
        return [("total", of)] if list(dims or ()) in ([-1], [of.meta["val"].dim() - 1]) else None

    def kind(self, node: fx.Node, operand: fx.Node) -> str | None:
        """``value`` (of edges), ``vector`` (the same for all edges), or ``None``: something else."""
        value, result = tensor(operand), node.meta["val"]
        if value is None or value.dtype != result.dtype:
            return None
        own, rows = tuple(value.shape[1:]), tuple(result.shape[1:])
        if value.dim() == result.dim() and same_size(value.shape[0], result.shape[0]):
            heads = own == (self.heads, 1) and rows == (self.heads, self.width)
            known = own == rows or heads or (math.prod(own) == 1 if fixed(own) else False)
            return "value" if known and self.size(operand) is not None else None
        if value.dim() > result.dim() or not fixed(value.shape) or self.size(node) == ONE:
            return None
        return "vector" if value.dim() < result.dim() or value.shape[0] == 1 else None

    # --- the program ---

    def leaf(self, kind: str, *operands, shape: tuple[int, ...] = ()) -> Value:
        """A leaf, the one that is there if it reads the same."""
        leaf = Leaf(kind, operands, shape)
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        return Value(True, self.leaves.index(leaf))

    def step(self, *step) -> Value:
        """A step more; what adds up a single column is that column."""
        if step[0] == "total" and self.heads * self.width == 1:
            return step[1]
        self.steps.append(step)
        return Value(False, len(self.steps) - 1)

    def value(self, node: fx.Node) -> Value:
        """Of an enclosed node, or one in front of these."""
        return self.values[behind(node)]

    def program(self, *results: tuple) -> SegmentProgram:
        """The program, its values numbered: leaves first."""

        def number(part):
            return (part.index + (not part.leaf) * len(self.leaves)) if isinstance(part, Value) else part

        steps, results = (tuple(tuple(map(number, step)) for step in found) for found in (self.steps, results))
        return SegmentProgram(tuple(leaf.kind for leaf in self.leaves), steps, results)

    def _computed(self, node: fx.Node) -> Value:
        """Adds the steps of a node inside."""
        kinds, last = self._operands(node), None
        for op, *parts in self._steps(node):
            operands = []
            for part in parts:
                if part is ...:
                    part = last
                elif isinstance(part, fx.Node):
                    part = self.values[behind(part)] if kinds[part] == "value" else self._vector(node, part)
                operands.append(part)
            last = self.step(op, *operands)
        return last

    def _vector(self, node: fx.Node, part: fx.Node) -> Value:
        kind = "vector" if self.is_full(node) else "vector_head"
        return self.leaf(kind, part, shape=tuple(map(int, node.meta["val"].shape[1:])))

    def _loaded(self, node: fx.Node, context) -> Value | None:
        """Adds the leaves of a value in front of the region."""
        size = self.size(node)
        if size is None:
            return None
        if self._of_ends(node):
            return self._ends(node)
        product = edge_product(self, node, context)
        if product is not None:
            data, weight, bias = product
            return self.leaf("narrow_plain", data, weight) if bias is None else self.leaf("narrow", *product)
        if row_size(node) == 1:
            return self.leaf("scalar", node)
        return self.leaf("edge" if size == FULL else "edge_head", node)

    def _of_ends(self, node: fx.Node) -> bool:
        """Whether a node holds rows of the ends of the region's edges, or a step of both."""
        if node.target is not _SDDMM or self.size(node) is None:
            return False
        *edges, src, dst, op = node.args
        if any(own not in (None, found) for own, found in zip(self.edges, edges, strict=True)):
            return False
        rows = [row for row in (src, dst) if row is not None]
        sizes = {self._size(row_size(row)) for row in rows}
        same = all(row.meta["val"].dtype == node.meta["val"].dtype for row in rows)
        if len(sizes) > 1 or not sizes <= {HEAD, FULL} or not same:
            return False  # leaves of ends have a number per head: one that several heads read is stored per edge
        return all(map(self.by_heads, rows)) if op == "dot" else op in ("copy_lhs", "copy_rhs", *OF_BOTH)

    def _ends(self, node: fx.Node) -> Value:
        *_, src, dst, op = node.args
        kind = "" if self._size(row_size(src if dst is None else dst)) == FULL else "_head"
        ends = [self.leaf("src" + kind, behind(src))] if op != "copy_rhs" else []
        ends += [self.leaf("dst" + kind, behind(dst))] if op != "copy_lhs" else []
        return ends[0] if op in ("copy_lhs", "copy_rhs") else self.step(op, *ends)


def _read_within(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether nobody else reads a value or a view of it."""
    return all(user in readers or (is_view(user) and _read_within(user, readers)) for user in node.users)
