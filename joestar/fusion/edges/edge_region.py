"""What a reduction over edges computes per edge: elementwise operations, grown backwards from it to what they read.

A value inside has readers inside alone; what somebody else reads as well is stored anyway, and is read from there. Rows
of the ends of edges (``sddmm``) and products of a few columns of edge data are made where they are read, whoever else
reads them. Heads are columns: views that keep rows apart are looked through.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.kernels.edge_program import LEAVES, WIDEST_NARROW, EdgeProgram
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import expression, same_shape, same_size

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SDDMM, _GATHER = _JOESTAR.sddmm.default, _ATEN.index_select.default
_UNARY = {getattr(_ATEN, op).default: op for op in ("neg", "relu", "sigmoid", "tanh", "exp", "abs", "silu")}
_BINARY = {
    _ATEN.add.Tensor: "add", _ATEN.sub.Tensor: "sub", _ATEN.mul.Tensor: "mul", _ATEN.div.Tensor: "div",
    _ATEN.maximum.default: "maximum", _ATEN.minimum.default: "minimum", _ATEN.max.other: "maximum",
    _ATEN.min.other: "minimum", _JOESTAR.add_bias.default: "add",
}  # fmt: skip
_WITH_NUMBER = {
    "add": lambda number: ("add_scalar", number), "sub": lambda number: ("add_scalar", -number),
    "mul": lambda number: ("mul_scalar", number), "div": lambda number: ("mul_scalar", 1 / number),
}  # fmt: skip
VIEWS = {
    _ATEN.view.default, _ATEN.reshape.default, _ATEN.unflatten.int, _ATEN.flatten.using_ints, _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
}  # fmt: skip
_SMALLEST = 1e-30
"""Divisor that still has a reciprocal, in float32 as well."""
OF_BOTH = ("add", "sub", "mul", "div")


@dataclass(frozen=True)
class Value:
    """A value of a program that is being written: a leaf or a step, by position."""

    leaf: bool
    index: int


@dataclass(frozen=True)
class Leaf:
    """What a leaf reads.

    Attributes:
        kind: see ``EdgeProgram``; operands: its tensors, a pair (table, ids) for rows that are gathered first.
        shape: to which a vector is expanded.
    """

    kind: str
    operands: tuple
    shape: tuple[int, ...] = ()


@dataclass
class Region:
    """Elementwise operations on edges, in front of ``message`` (``[E, ...]``).

    Attributes:
        edges: (offsets, sources) of the edges whose ends are read, ``None`` if no end is: there is no program then.
        inside: values that the program computes; border: values in front of those, nearest first.
        leaves, steps: the program; result: its last value.
    """

    message: fx.Node
    edges: tuple[fx.Node, fx.Node] | None = None
    inside: set[fx.Node] = field(default_factory=set)
    border: list[fx.Node] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)
    result: Value | None = None

    @property
    def width(self) -> int | None:
        """Numbers per edge."""
        return _row_size(self.message)

    def program(self) -> EdgeProgram:
        """The program, its values numbered: leaves first."""
        leaves = len(self.leaves)

        def number(operand):
            if not isinstance(operand, Value):
                return operand
            return operand.index if operand.leaf else leaves + operand.index

        steps = (tuple(map(number, step)) for step in self.steps)
        return EdgeProgram(tuple(leaf.kind for leaf in self.leaves), tuple(steps))

    def loads(self) -> list[fx.Node]:
        """Values in front of the region that hold rows of the ends of edges: the program reads the rows instead."""
        return [node for node in self.border if self.reads_ends(node)]

    def reads_ends(self, node: fx.Node) -> bool:
        """Whether a node holds rows of the ends of the region's edges, or a step of both."""
        if node.target is not _SDDMM or node.args[:2] != self.edges or not self.is_full(node):
            return False
        if node.args[4] not in ("copy_lhs", "copy_rhs", *OF_BOTH):
            return False
        return all(_row_size(x) == self.width and _same_dtype(x, node) for x in node.args[2:4] if x is not None)

    def is_full(self, node: fx.Node) -> bool:
        """Whether a node holds a row per edge, as wide as the message."""
        value, message = tensor(node), self.message.meta["val"]
        if value is None or value.dim() < 2 or value.dtype != message.dtype:
            return False
        return same_size(value.shape[0], message.shape[0]) and _row_size(node) == self.width

    def leaf(self, kind: str, *operands, shape: tuple[int, ...] = ()) -> Value:
        """A leaf, the one that is there if it reads the same."""
        leaf = Leaf(kind, operands, shape)
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        return Value(True, self.leaves.index(leaf))

    def step(self, *step) -> Value:
        """A step more."""
        self.steps.append(step)
        return Value(False, len(self.steps) - 1)


def grow(message: fx.Node, reader: fx.Node, indptr: fx.Node | None, context, strict: bool = True) -> Region:
    """The region in front of ``message``, as ``reader`` sees it.

    Args:
        indptr: of the edges, ``None`` if not known; strict: whether values with another reader end the region.
    """
    region = Region(message)
    if message.meta["val"].dim() < 2 or region.width is None:
        return region
    _enclose(region, reader, strict)
    for node in region.border:
        if node.target is _SDDMM and (indptr is None or node.args[0] is indptr):
            region.edges = node.args[:2]
            if region.reads_ends(node):
                break
    else:
        region.edges = None
        return region
    values = {}
    for node in message.graph.nodes:
        if node in region.inside:
            values[node] = _computed(region, node, values)
        elif node in region.border:
            values[node] = _loaded(region, node, context)
    region.result = values[behind_views(message)]
    return region


def behind_views(node: fx.Node) -> fx.Node:
    """The value that a chain of views shows, rows kept apart."""
    while _is_view(node):
        node = node.args[0]
    return node


def flat(graph: fx.Graph, like: fx.Node, node: fx.Node) -> fx.Node:
    """Rows as a matrix: what is behind a view, or a new one."""
    source = node
    while source.meta["val"].dim() > 2:
        if not _is_view(source):
            return emit(graph, like, _ATEN.flatten.using_ints, node, 1)
        source = source.args[0]
    return source


def tensors(graph: fx.Graph, like: fx.Node, leaf: Leaf) -> list[fx.Node]:
    """The tensors of a leaf, as the op takes them; what has to be made of them is inserted."""
    if leaf.kind == "vector":
        return [_vector(graph, like, leaf)]
    if leaf.kind in ("narrow", "narrow_plain"):
        data, *weights = leaf.operands
        data = emit(graph, like, _GATHER, data[0], 0, data[1]) if isinstance(data, tuple) else data
        return [data, *weights]
    return [flat(graph, like, operand) for operand in leaf.operands]


def _vector(graph: fx.Graph, like: fx.Node, leaf: Leaf) -> fx.Node:
    (vector,) = leaf.operands
    value, width = vector.meta["val"], math.prod(leaf.shape)
    if tuple(value.shape) == (width,):
        return vector
    if value.numel() != width:
        lead = [1] if value.dim() > len(leaf.shape) else []
        vector = emit(graph, like, _ATEN.expand.default, vector, [*lead, *leaf.shape])
    return emit(graph, like, _ATEN.reshape.default, vector, [width])


# --- which values ---------------------------------------------------------------------------------------------------


def _enclose(region: Region, reader: fx.Node, strict: bool) -> None:
    """Finds what is inside and what is in front of it, from the last value to the first."""
    position = {node: index for index, node in enumerate(region.message.graph.nodes)}
    waiting, border = {behind_views(region.message)}, {}
    while waiting:
        node = max(waiting, key=position.__getitem__)
        waiting.remove(node)
        operands = _operands(region, node)
        if operands is None or (strict and not _read_within(node, region.inside | {reader})):
            border[node] = None
            continue
        region.inside.add(node)
        waiting.update(behind_views(operand) for operand, kind in operands.items() if kind == "full")
    region.border = list(border)


def _read_within(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether nobody else reads a value or a view of it."""
    return all(user in readers or (_is_view(user) and _read_within(user, readers)) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    if node.target not in VIEWS or tensor(node) is None or tensor(node.args[0]) is None:
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    if min(len(before), len(after)) < 2 or not same_size(before[0], after[0]):
        return False
    return _row_size(node) is not None and _row_size(node) == _row_size(node.args[0])


def _row_size(node: fx.Node) -> int | None:
    """Numbers per row, ``None`` if that depends on the data."""
    sizes = node.meta["val"].shape[1:]
    return None if any(expression(size) is not None for size in sizes) else math.prod(map(int, sizes))


def _same_dtype(left: fx.Node, right: fx.Node) -> bool:
    return left.meta["val"].dtype == right.meta["val"].dtype


def _operands(region: Region, node: fx.Node) -> dict[fx.Node, str] | None:
    """How the operands of a step take part in it; ``None`` if the node is no step of a program."""
    steps = steps_of(node) if region.is_full(node) else None
    if steps is None:
        return None
    operands = {part: _kind(region, node, part) for step in steps for part in step[1:] if isinstance(part, fx.Node)}
    return None if None in operands.values() else operands


def _kind(region: Region, node: fx.Node, operand: fx.Node) -> str | None:
    """``full``, ``scalar`` (one per edge), ``vector`` (one per column, for all edges), or ``None``: something else."""
    value, result = tensor(operand), node.meta["val"]
    if value is None or value.dtype != result.dtype:
        return None
    if value.dim() == result.dim() and same_size(value.shape[0], result.shape[0]):
        if same_shape(value.shape, result.shape):
            return "full"
        return "scalar" if _row_size(operand) == 1 else None
    if value.dim() > result.dim() or any(expression(size) is not None for size in value.shape):
        return None
    return "vector" if value.dim() < result.dim() or value.shape[0] == 1 else None


# --- steps and leaves -----------------------------------------------------------------------------------------------


def steps_of(node: fx.Node) -> list[tuple] | None:
    """(op, operands) of the steps that a node stands for; ``...`` is the value of the step before."""
    target, args = node.target, node.args
    if target in _BINARY and len(args) == 2:
        return _binary(_BINARY[target], *args, **node.kwargs)
    if node.kwargs:
        return None
    if target in _UNARY:
        return [(_UNARY[target], args[0])]
    if target is _ATEN.leaky_relu.default:
        return [("leaky_relu", args[0], float(argument(node, "negative_slope")))]
    if target is _ATEN.elu.default and all(value == 1 for value in args[2:]):
        return [("elu", args[0], float(argument(node, "alpha")))]
    if target is _ATEN.rsub.Scalar and len(args) == 2 and _is_number(args[1]):
        return [("neg", args[0]), ("add_scalar", ..., float(args[1]))]
    if target is _ATEN.square.default or (target is _ATEN.pow.Tensor_Scalar and args[1] == 2):
        return [("mul", args[0], args[0])]
    return None


def _binary(op: str, left, right, alpha=1, **others) -> list[tuple] | None:
    if others or not isinstance(left, fx.Node) or not _is_number(alpha):
        return None
    if isinstance(right, fx.Node):
        return [(op, left, right)] if alpha == 1 else [("mul_scalar", right, float(alpha)), (op, left, ...)]
    if op not in _WITH_NUMBER or not _is_number(right) or (op == "div" and abs(right) < _SMALLEST):
        return None
    return [_number(op, left, float(right) * alpha)]


def _number(op: str, left: fx.Node, right: float) -> tuple:
    step, number = _WITH_NUMBER[op](right)
    return step, left, number


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _computed(region: Region, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
    """Adds the steps of a node inside."""
    kinds, last = _operands(region, node), None
    for op, *parts in steps_of(node):
        operands = []
        for part in parts:
            if part is ...:
                operands.append(last)
            elif not isinstance(part, fx.Node):
                operands.append(part)
            elif kinds[part] == "full":
                operands.append(values[behind_views(part)])
            else:
                shape = tuple(map(int, node.meta["val"].shape[1:])) if kinds[part] == "vector" else ()
                operands.append(region.leaf(kinds[part], part, shape=shape))
        last = region.step(op, *operands)
    return last


def _loaded(region: Region, node: fx.Node, context) -> Value:
    """Adds the leaves of a value in front of the region."""
    if region.reads_ends(node):
        _, _, src, dst, op = node.args
        ends = [region.leaf("src", behind_views(src))] if op != "copy_rhs" else []
        ends += [region.leaf("dst", behind_views(dst))] if op != "copy_lhs" else []
        return region.step(op, *ends) if op in OF_BOTH else ends[0]
    product = edge_product(region, node, context)
    if product is not None:
        data, weight, bias = product
        return region.leaf("narrow_plain", data, weight) if bias is None else region.leaf("narrow", *product)
    return region.leaf("edge", node)


def edge_product(region: Region, node: fx.Node, context) -> tuple | None:
    """(edge data or their (table, ids), weight, bias or ``None``) of a product of few columns."""
    args = node.args
    if node.kwargs or not region.is_full(node):
        return None
    if node.target is _ATEN.linear.default:
        data, weight, bias = (*args, None)[:3]
    elif node.target is _JOESTAR.gather_linear.default:
        data, weight, bias = args[:2], args[2], args[3]
    elif node.target in (_ATEN.mm.default, _ATEN.addmm.default):
        bias, data, rows = args if len(args) == 3 else (None, *args)
        turned = rows.args[0] if rows.target is _ATEN.clone.default else rows
        weight = turned.args[0] if turned.target is _ATEN.t.default else None
    else:
        return None
    source = data[0] if isinstance(data, tuple) else data
    parts = [part for part in (source, weight, bias) if part is not None]
    if weight is None or source.meta["val"].dim() != 2 or (bias is not None and bias.meta["val"].dim() != 1):
        return None
    if any(not _same_dtype(part, node) for part in parts) or weight.meta["val"].shape[1] > WIDEST_NARROW:
        return None
    return None if context.depends_on_grad(source) else (data, weight, bias)


def leaves_of(program: str, operands: list) -> list[tuple[str, list]]:
    """(kind, its operands) of every leaf of a program, whose text and operands ``edge_map`` has."""
    found, position = [], 0
    for kind in EdgeProgram.parse(program).leaves:
        found.append((kind, operands[position : position + LEAVES[kind]]))
        position += LEAVES[kind]
    return found
