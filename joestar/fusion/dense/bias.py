"""A bias that is added to a product becomes part of it (an epilogue); elsewhere its gradient reads stored rows.

Before                                   After
    h = aten.linear(x, w)                    o = aten.linear(x, w, b)
    o = aten.add(h, b)        b: [C]

Before (on a GPU)                        After
    y, _, _ = attend(...)                    y, _, _ = attend(...)
    o = aten.add(y.flatten(1), b)            o = add_bias(y.flatten(1), b)

The gradient of ``b`` is a sum over rows. A backend that fuses it with what makes the rows computes these twice, once to
store and once to add them up; the gradient of ``add_bias`` adds up the stored ones.

Must not fire when the product has another reader or a bias already, when what is added is no vector of its columns or
needs no gradients, or under autocast where the sum is float32 in PyTorch and something else than a product reads it.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.match.rounding import in_short
from joestar.fusion.record import Reject
from joestar.lowering.sizes import same_shape, same_size

PATTERN = "bias"
_ATEN = torch.ops.aten


def run(gm: fx.GraphModule, context) -> int:
    """Joins every bias that fits; returns how many."""
    joined = 0
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        pair = _pair(node)
        if pair is None and context.device == "cuda":
            joined += _stored(gm.graph, node, context)
        if pair is None or not context.admits(PATTERN, node, _match(node, *pair, context)):
            continue
        linear, bias = pair
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, linear, _ATEN.linear.default, *linear.args[:2], bias)
        context.fired(PATTERN, new, bias.name)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        gm.graph.erase_node(linear)
        joined += 1
    return joined


def _stored(graph: fx.Graph, add: fx.Node, context) -> int:
    """Replaces the addition of a trained vector to rows that no product made."""
    rows, bias = add.args
    if tensor(rows) is None or tensor(bias) is None or tensor(rows).dim() != 2 or tensor(bias).dim() != 1:
        return 0
    if not isinstance(bias, fx.Node) or bias.op != "placeholder":
        return 0
    same = same_size(tensor(rows).shape[1], tensor(bias).shape[0]) and tensor(rows).dtype == tensor(bias).dtype
    match = in_short(add, context, rows) if context.needs_grad(bias) else Reject("the vector needs no gradients")
    if not same or not context.admits(PATTERN, add, match):
        return 0
    with graph.inserting_before(add):
        new = emit(graph, add, torch.ops.joestar.add_bias.default, rows, bias)
    context.fired(PATTERN, new, f"{bias.name}, gradient from stored rows")
    add.replace_all_uses_with(new)
    graph.erase_node(add)
    return 1


def _pair(add: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(product, vector of its columns) if the node adds them."""
    for linear, bias in (add.args, add.args[::-1]):
        if isinstance(linear, fx.Node) and linear.target is _ATEN.linear.default and tensor(bias) is not None:
            rows = linear.meta["val"]
            if rows.dim() == 2 and same_shape(tensor(bias).shape, rows.shape[1:]):
                return linear, bias
    return None


def _match(add: fx.Node, linear: fx.Node, bias: fx.Node, context) -> bool | Reject:
    if len(linear.args) > 2 and linear.args[2] is not None:
        return Reject("the product has a bias already")
    if len(linear.users) != 1:
        return Reject("the product has another reader")
    same = bias.meta["val"].dtype == linear.meta["val"].dtype
    return in_short(add, context) if same else Reject("the bias has another dtype")
