"""What nodes are to a segment program: steps, leaves, and views that rows are looked through; and tensors of leaves."""

import math
from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.kernels.segment_program import WIDEST_NARROW, SegmentProgram, groups_of, repeated
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import expression, same_size

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_GATHER, _FLATTEN = _ATEN.index_select.default, _ATEN.flatten.using_ints
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
        kind: see ``SegmentProgram``; operands: its tensors, a pair (table, ids) for rows that are gathered first.
        shape: to which a vector is expanded.
    """

    kind: str
    operands: tuple
    shape: tuple[int, ...] = ()


# --- views ---


def row_size(node: fx.Node) -> int | None:
    """Numbers per row, ``None`` if that depends on the data."""
    sizes = node.meta["val"].shape[1:]
    return math.prod(map(int, sizes)) if fixed(sizes) else None


def fixed(sizes) -> bool:
    return all(expression(size) is None for size in sizes)


def behind(node: fx.Node) -> fx.Node:
    """The value that a chain of views shows, rows kept apart."""
    while is_view(node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node shows the same rows in another shape."""
    if node.target not in VIEWS or tensor(node) is None or tensor(node.args[0]) is None:
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    if not (len(before) and len(after) and same_size(before[0], after[0])):
        return False
    return row_size(node) is not None and row_size(node) == row_size(node.args[0])


# --- steps and leaves ---


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


def edge_product(region, node: fx.Node, context) -> tuple | None:
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
    if weight is None or any(part.meta["val"].dim() != 2 for part in (source, weight)):
        return None
    if bias is not None and tuple(bias.meta["val"].shape) != tuple(weight.meta["val"].shape[:1]):
        return None  # PyTorch also takes one number for all columns
    if any(part.meta["val"].dtype != node.meta["val"].dtype for part in parts):
        return None
    if weight.meta["val"].shape[1] > WIDEST_NARROW:
        return None
    return None if context.depends_on_grad(source) else (data, weight, bias)


# --- tensors ---


def leaves_of(program: str, operands: list) -> list[tuple[str, tuple]]:
    """(family, its operands) of every leaf of a ``segment``: "src", "dst", "vector", or something of edges.

    Leaves that are columns of one matrix have that matrix each.
    """
    parsed = SegmentProgram.parse(program)
    kinds, operands = parsed.leaves, repeated(parsed, operands)
    families = (kind.removesuffix("_head").removesuffix("_row") for kind in kinds)
    return list(zip(families, groups_of(kinds, operands), strict=True))


def tensors(graph: fx.Graph, like: fx.Node, leaf: Leaf) -> list[fx.Node]:
    """The tensors of a leaf, as the op takes them; what has to be made of them is inserted."""
    if leaf.kind == "bits":
        return list(leaf.operands)
    if leaf.kind.startswith("vector"):
        return [_vector(graph, like, leaf)]
    if leaf.kind in ("narrow", "narrow_plain"):
        data, *weights = leaf.operands
        data = emit(graph, like, _GATHER, data[0], 0, data[1]) if isinstance(data, tuple) else data
        return [data, *weights]
    return [_matrix(graph, like, operand) for operand in leaf.operands]


def _matrix(graph: fx.Graph, like: fx.Node, node: fx.Node) -> fx.Node:
    """Rows as a matrix: what is behind a view, or a new one."""
    source = node
    while tensor(source).dim() != 2:
        if not is_view(source):
            added = tensor(node).dim() == 1
            return emit(graph, like, *((_ATEN.unsqueeze.default, node, 1) if added else (_FLATTEN, node, 1)))
        source = source.args[0]
    return source


def _vector(graph: fx.Graph, like: fx.Node, leaf: Leaf) -> fx.Node:
    (vector,) = leaf.operands
    value, shape = vector.meta["val"], leaf.shape or (1,)
    width = math.prod(shape)
    if tuple(value.shape) == (width,):
        return vector
    if value.numel() != width:
        lead = [1] if value.dim() > len(shape) else []
        vector = emit(graph, like, _ATEN.expand.default, vector, [*lead, *shape])
    return emit(graph, like, _ATEN.reshape.default, vector, [width])
