"""Bias, ReLU and dropout of rows are one pass over them, and so is their gradient (an epilogue, thesis 5.3.2).

Before (on a GPU)                                       After
    h = aten.linear(x, w, b)                                h    = aten.linear(x, w)
    y = joestar.keyed_dropout(h, ids, key,                  bits = joestar.dropout_bits(ids, key, site, p, F)
                              site, p, True)                y, kept = joestar.bias_relu(h, b, bits, 1 / (1 - p))

The same for ``aten.relu(h)`` (no bits then), and for ``add_bias(h, b)`` in place of the product's bias. Forward, a bit
per entry notes what gradients reach. Backward, the rows of the gradient are masked by those bits, 16 bytes in place of
512 for rows of 128 float32, and added up for the bias while they are in registers: no pass of its own.

Where what is activated is a sum of two matrices that are stored anyway (a product of own rows and an aggregation), the
op reads both, ``bias_relu(h, b, bits, scale, addend)``: the sum is no pass of its own, and a bias in one of them (of
``linear``, ``gather_linear``, ``add_bias``) is the op's.

A choice ``epilogue:0`` per place, numbered in the order of the graph, by default ``fused`` on a GPU and ``separate`` on
a CPU, where the op is composed.

Must not fire without a bias or such a sum in front of a plain ReLU (the backend fuses that), when the rows with the
bias have another reader, or when the bias is no trained vector of the columns in the dtype of the rows. A sum with
another reader, of other dtypes, or of what the backend computes in the same loop stays in front of the op.
"""

import operator

import torch
from torch import fx

from joestar.fusion.edges.edge_steps import is_view
from joestar.fusion.match.emit import emit, erase_unread, tensor
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape
from joestar.ops.registry import op_of

PATTERN = "bias-relu"
FUSED, SEPARATE = "fused", "separate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every activation that fits; returns how many."""
    fused = places = 0
    default = FUSED if context.device == "cuda" else SEPARATE
    for node in list(gm.graph.nodes):
        if not _is_activation(node):
            continue
        match = _match(node, context)
        if match:
            form = context.choose("epilogue", str(places), (SEPARATE, FUSED), default, node)
            match = match if form == FUSED else Reject(f"{SEPARATE} is chosen")
            places += 1
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, context)
            fused += 1
    return fused


def _is_activation(node: fx.Node) -> bool:
    if node.target is _ATEN.relu.default:
        return True
    if node.target is not _JOESTAR.keyed_dropout.default or argument(node, "padded_columns"):
        return False
    return argument(node, "relu") and argument(node, "p") > 0


def _is_stored(node: fx.Node) -> bool:
    """Whether rows are stored whoever reads them: products, and what our ops make; the backend computes the rest."""
    while is_view(node) or node.target is _ATEN.slice.Tensor:
        node = node.args[0]
    if node.target is operator.getitem:
        node = node.args[0]
    made = op_of(node.target) if node.op == "call_function" and hasattr(node.target, "_schema") else None
    ours = made is not None and made.gradient is not None and "cuda" not in made.dissolved
    return ours or node.target is _ATEN.linear.default or node.target is _JOESTAR.add_bias.default


def _terms(rows: fx.Node, context) -> tuple[fx.Node, fx.Node] | None:
    """The two matrices whose sum the rows are, that with a bias first, if the op can read both."""
    if rows.target is not _ATEN.add.Tensor or len(rows.users) != 1 or rows.kwargs.get("alpha", 1) != 1:
        return None
    if not all(isinstance(term, fx.Node) and _is_stored(term) for term in rows.args[:2]) or len(rows.args) > 2:
        return None
    left, right = rows.args
    dtypes = [_dtype(node, context) for node in (rows, left, right)]
    shapes = [tensor(node).shape for node in (left, right)]
    if left is right or len(set(dtypes)) > 1 or not all(same_shape(shape, tensor(rows).shape) for shape in shapes):
        return None
    return (right, left) if _fits(right, context) and not _fits(left, context) else (left, right)


def _dtype(node: fx.Node, context) -> torch.dtype:
    """Of what a node gives, under autocast as well."""
    if context.autocast is None:
        return tensor(node).dtype
    context.dtypes.take_in(node.graph)
    return context.dtypes.values[node].dtype


def _fits(rows: fx.Node, context) -> bool:
    """Whether a term of a sum has a bias that the op can add."""
    return _biased(rows) is not None and _obstacle(rows, context) == ""


def _biased(rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(what makes the rows with a bias, the bias)."""
    if rows.target is _JOESTAR.add_bias.default:
        return rows, rows.args[1]
    if rows.target is _ATEN.linear.default and len(rows.args) > 2 and rows.args[2] is not None:
        return rows, rows.args[2]
    if rows.target is _JOESTAR.gather_linear.default and rows.args[3] is not None:
        return rows, rows.args[3]
    return None


def _obstacle(rows: fx.Node, context) -> str:
    """Why the bias of rows cannot be the op's; empty if it can."""
    bias, value = _biased(rows)[1], tensor(rows)
    if len(rows.users) != 1:
        return "the rows with the bias have another reader"
    if not same_shape(tensor(bias).shape, value.shape[1:]) or tensor(bias).dtype != value.dtype:
        return "the bias is no vector of the columns in their dtype"
    return "" if context.depends_on_grad(bias) else "the bias needs no gradients"


def _match(node: fx.Node, context) -> bool | Reject:
    rows = node.args[0]
    value = tensor(rows)
    if value is None or value.dim() != 2 or not value.dtype.is_floating_point:
        return Reject("what is activated is no matrix of floats")
    if _terms(rows, context) is not None:
        return True
    if _biased(rows) is None:
        return Reject("no bias is added in front of it") if node.target is _ATEN.relu.default else True
    obstacle = _obstacle(rows, context)
    return Reject(obstacle) if obstacle else True


def _rewrite(graph: fx.Graph, node: fx.Node, context) -> None:
    rows, bits, scale = node.args[0], None, 1.0
    terms = _terms(rows, context)
    first, *addend = terms or (rows,)
    found = _biased(first) if terms is None or _fits(first, context) else None
    with graph.inserting_before(node):
        if node.target is not _ATEN.relu.default:
            _, ids, key, site, p = node.args[:5]
            bits = emit(graph, node, _JOESTAR.dropout_bits.default, ids, key, site, p, int(tensor(rows).shape[1]))
            scale = 1.0 / (1.0 - p)
        plain, bias = first, None
        if found is not None:
            made, bias = found
            plain = made.args[0] if made.target is _JOESTAR.add_bias.default else _without_bias(graph, made)
        both = emit(graph, node, _JOESTAR.bias_relu.default, plain, bias, bits, scale, *addend)
        new = emit(graph, node, operator.getitem, both, 0)
    detail = f"bias {bias.name}" if bias is not None else "no bias"
    context.fired(PATTERN, node, f"{detail}, a sum" if addend else detail)
    node.replace_all_uses_with(new)
    erase_unread(graph, node)


def _without_bias(graph: fx.Graph, product: fx.Node) -> fx.Node:
    """The same product without its bias, in its place."""
    gathers = product.target is _JOESTAR.gather_linear.default
    with graph.inserting_before(product):
        return emit(graph, product, product.target, *product.args[: 3 if gathers else 2], *([None] if gathers else []))
