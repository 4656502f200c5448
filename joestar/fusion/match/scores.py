"""Scores: rows times a vector per head, added up, computed from what the rows are a product of.

``sum((x W^T) * att)`` over the columns of a head is ``x`` times ``sum(att * W)``, a vector per head.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.match.rounding import in_short, widened
from joestar.fusion.record import Reject
from joestar.lowering.sizes import same_shape

_ATEN = torch.ops.aten


def is_score(mul: fx.Node, rows: fx.Node) -> bool:
    """Whether ``mul`` is rows ``[n, H, C]`` times ``[1, H, C]`` or ``[H, C]`` (or ``[n, C]`` times ``[1, C]`` or
    ``[C]``), and its sum over C, without that dimension, is all that is read."""
    found = tensor(rows)
    if mul.target is not _ATEN.mul.Tensor or mul.kwargs or found.dim() not in (2, 3) or len(mul.users) != 1:
        return False
    if mul.args[0] is mul.args[1] or tensor(_vector(mul, rows)) is None:
        return False
    vector = tensor(_vector(mul, rows))
    if torch.promote_types(vector.dtype, found.dtype) != found.dtype:
        return False  # the product is wider than the rows
    shape = vector.shape
    leading = shape[: len(shape) - found.dim() + 1]
    if not same_shape(shape[len(leading) :], found.shape[1:]) or not (leading == () or leading == (1,)):
        return False
    (total,) = mul.users
    last = total.target is _ATEN.sum.dim_IntList and list(total.args[1] or ()) in ([-1], [found.dim() - 1])
    return last and len(total.args) == 2 and not total.kwargs


def score(graph: fx.Graph, mul: fx.Node, rows: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """The sum that reads ``mul``, computed from ``x``: ``rows`` are those of ``linear(x, weight, bias)``."""
    heads, att = heads_of(rows), _vector(mul, rows)
    if tensor(att).dim() == tensor(rows).dim():
        att = emit(graph, mul, _ATEN.squeeze.dim, att, 0)
    column = emit(graph, mul, _ATEN.unsqueeze.default, att, -1)
    vectors = _head_sums(graph, mul, by_head(graph, mul, weight, heads), column, 1)
    if bias is not None:
        each = emit(graph, mul, _ATEN.view.default, bias, [heads, int(tensor(bias).shape[0]) // heads])
        bias = _head_sums(graph, mul, each, att, 1)
    operands = (x, vectors) if bias is None else (x, vectors, bias)
    new = emit(graph, mul, _ATEN.linear.default, *operands)
    return new if tensor(rows).dim() == 3 else emit(graph, mul, _ATEN.squeeze.dim, new, 1)


def replace(graph: fx.Graph, node: fx.Node, context, new: fx.Node) -> None:
    """By ``new``, which a product gave; under autocast in float32 where the sums in its place were, and it counts."""
    if isinstance(in_short(node, context), Reject) and not widened(node, context):
        new = emit(graph, new, _ATEN.to.dtype, new, torch.float32)
    node.replace_all_uses_with(new)


def heads_of(rows: fx.Node) -> int:
    """Heads of rows ``[n, H, C]``; 1 for ``[n, C]``."""
    shape = rows.meta["val"].shape
    return int(shape[1]) if len(shape) == 3 else 1


def by_head(graph: fx.Graph, like: fx.Node, weight: fx.Node, heads: int) -> fx.Node:
    """Weights ``[H C, F]`` as ``[H, C, F]``."""
    total, width = weight.meta["val"].shape
    return emit(graph, like, _ATEN.view.default, weight, [heads, int(total) // heads, int(width)])


def _vector(mul: fx.Node, rows: fx.Node):
    return mul.args[1] if mul.args[0] is rows else mul.args[0]


def _head_sums(graph: fx.Graph, like: fx.Node, left: fx.Node, right: fx.Node, dim: int) -> fx.Node:
    return emit(graph, like, _ATEN.sum.dim_IntList, emit(graph, like, _ATEN.mul.Tensor, left, right), [dim])
