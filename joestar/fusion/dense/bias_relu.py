"""Bias, ReLU and dropout of rows are one pass over them, and so is their gradient (an epilogue, thesis 5.3.2).

Before (on a GPU)                                       After
    h = aten.linear(x, w, b)                                h    = aten.linear(x, w)
    y = joestar.keyed_dropout(h, ids, key,                  bits = joestar.dropout_bits(ids, key, site, p, F)
                              site, p, True)                y, kept = joestar.bias_relu(h, b, bits, 1 / (1 - p))

The same for ``aten.relu(h)`` (no bits then), and for ``add_bias(h, b)`` in place of the product's bias. Forward, a bit
per entry notes what gradients reach. Backward, the rows of the gradient are masked by those bits, 16 bytes in place of
512 for rows of 128 float32, and added up for the bias while they are in registers: no pass of its own.

A choice ``epilogue:0`` per place, numbered in the order of the graph, by default ``fused`` on a GPU and ``separate`` on
a CPU, where the op is composed.

Must not fire without a bias in front of a plain ReLU (the backend fuses that), when the rows with the bias
have another reader, or when the bias is no trained vector of the columns in the dtype of the rows.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape

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


def _biased(rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(what makes the rows with a bias, the bias)."""
    if rows.target is _JOESTAR.add_bias.default:
        return rows, rows.args[1]
    if rows.target is _ATEN.linear.default and len(rows.args) > 2 and rows.args[2] is not None:
        return rows, rows.args[2]
    return None


def _match(node: fx.Node, context) -> bool | Reject:
    rows = node.args[0]
    value = tensor(rows)
    if value is None or value.dim() != 2 or not value.dtype.is_floating_point:
        return Reject("what is activated is no matrix of floats")
    found = _biased(rows)
    if found is None:
        return Reject("no bias is added in front of it") if node.target is _ATEN.relu.default else True
    if len(rows.users) != 1:
        return Reject("the rows with the bias have another reader")
    bias = found[1]
    if not same_shape(tensor(bias).shape, value.shape[1:]) or tensor(bias).dtype != value.dtype:
        return Reject("the bias is no vector of the columns in their dtype")
    return True if context.depends_on_grad(bias) else Reject("the bias needs no gradients")


def _rewrite(graph: fx.Graph, node: fx.Node, context) -> None:
    rows, bits, scale = node.args[0], None, 1.0
    found = _biased(rows)
    with graph.inserting_before(node):
        if node.target is not _ATEN.relu.default:
            _, ids, key, site, p = node.args[:5]
            bits = emit(graph, node, _JOESTAR.dropout_bits.default, ids, key, site, p, int(tensor(rows).shape[1]))
            scale = 1.0 / (1.0 - p)
        bias = None
        if found is not None:
            made, bias = found
            plain = rows.args[0]
            if made.target is _ATEN.linear.default:
                plain = emit(graph, made, _ATEN.linear.default, *made.args[:2])
            rows = plain
        both = emit(graph, node, _JOESTAR.bias_relu.default, rows, bias, bits, scale)
        new = emit(graph, node, operator.getitem, both, 0)
    context.fired(PATTERN, node, f"bias {bias.name}" if bias is not None else "no bias")
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if found is not None:
        graph.erase_node(found[0])
