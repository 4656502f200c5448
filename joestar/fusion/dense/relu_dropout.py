"""ReLU and dropout become one op, whose backward pass needs no mask (an epilogue of the update).

Before                                              After
    a = aten.relu(h)                                    d = joestar.keyed_dropout(h, ids, key, site, p, True)
    d = joestar.keyed_dropout(a, ids, key, site, p)

The result is positive exactly where an entry was positive and kept, and it is stored for the next layer anyway: the
gradient reads it instead of two masks.

Must not fire when the activation has another reader (a skip connection), which would compute it twice.
"""

import torch
from torch import fx

from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument

PATTERN = "relu-dropout"
_DROPOUT = torch.ops.joestar.keyed_dropout.default
_RELU = torch.ops.aten.relu.default


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every dropout of a ReLU; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _DROPOUT or node.args[0].target is not _RELU or _has_form(node):
            continue
        relu = node.args[0]
        if not context.admits(PATTERN, node, _match(relu, node)):
            continue
        node.args = (relu.args[0], *node.args[1:5], True)
        gm.graph.erase_node(relu)
        context.fired(PATTERN, node, f"p = {node.args[4]}")
        fused += 1
    return fused


def _has_form(dropout: fx.Node) -> bool:
    """Whether ReLU is in it already, or the number of its columns varies."""
    return argument(dropout, "relu") or argument(dropout, "padded_columns")


def _match(relu: fx.Node, dropout: fx.Node) -> bool | Reject:
    others = [user for user in relu.users if user is not dropout]
    if others:
        return Reject(f"the activation is also read by {str(others[0].target).removesuffix('.default')}")
    return True
