"""A bias that is added to a product becomes part of it (an epilogue).

Before                                   After
    h = aten.linear(x, w)                    h = aten.linear(x, w, b)
    o = aten.add(h, b)        b: [C]

Must not fire when the product has another reader or a bias already, or when what is added is no vector of its columns.
"""

import torch
from torch import fx

from joestar.fusion.emit import emit, tensor
from joestar.fusion.record import Reject

PATTERN = "bias"
_ATEN = torch.ops.aten


def run(gm: fx.GraphModule, context) -> int:
    """Joins every bias that fits; returns how many."""
    joined = 0
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        pair = _pair(node)
        if pair is None or not context.admits(PATTERN, node, _match(*pair)):
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


def _pair(add: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(product, vector of its columns) if the node adds them."""
    for linear, bias in (add.args, add.args[::-1]):
        if isinstance(linear, fx.Node) and linear.target is _ATEN.linear.default and tensor(bias) is not None:
            rows = linear.meta["val"]
            if rows.dim() == 2 and tuple(tensor(bias).shape) == (rows.shape[1],):
                return linear, bias
    return None


def _match(linear: fx.Node, bias: fx.Node) -> bool | Reject:
    if len(linear.args) > 2 and linear.args[2] is not None:
        return Reject("the product has a bias already")
    if len(linear.users) != 1:
        return Reject("the product has another reader")
    same = bias.meta["val"].dtype == linear.meta["val"].dtype
    return True if same else Reject("the bias has another dtype")
