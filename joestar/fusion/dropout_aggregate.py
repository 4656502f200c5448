"""Activation and dropout happen where rows are read: their result is never stored, nor is a mask of the gradient.

Before                                                  After
    y    = joestar.keyed_dropout(h, ids, key,               bits = joestar.dropout_bits(ids, key, site, p, F)
                                 site, p, True)             both = joestar.aggregate_cat(sub, local, h, bits,
    both = joestar.aggregate_cat(sub, local, y,                                          1 / (1 - p), "mean")
                                 None, 1.0, "mean")

Forward, the aggregation applies ReLU and mask to every row that it gathers. Backward, the rows of the gradient are
summed from the edges of each source, masked, and written once.

Must not fire when the activated rows have another reader (jumping knowledge), which needs them stored.
"""

import torch
from torch import fx

from joestar.fusion.record import Reject

PATTERN = "dropout-aggregate"
_JOESTAR = torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every pair; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _JOESTAR.aggregate_cat.default or node.args[3] is not None:
            continue
        dropout = node.args[2]
        if context.admits(PATTERN, node, _match(dropout)):
            _rewrite(gm, node, dropout, context)
            fused += 1
    return fused


def _match(dropout: fx.Node) -> bool | Reject:
    if dropout.target is not _JOESTAR.keyed_dropout.default or len(dropout.args) < 6 or not dropout.args[5]:
        return Reject("the rows are not the result of ReLU and dropout")
    if len(dropout.users) != 1:
        return Reject("the activated rows have another reader")
    return True


def _rewrite(gm: fx.GraphModule, cat: fx.Node, dropout: fx.Node, context) -> None:
    h, ids, key, site, p, _ = dropout.args
    value = h.meta["val"]
    columns = int(value.shape[1])
    with gm.graph.inserting_before(cat):
        bits = gm.graph.call_function(_JOESTAR.dropout_bits.default, (ids, key, site, p, columns))
    bits.meta = {**dropout.meta, "val": value.new_empty((value.shape[0], -(-columns // 32)), dtype=torch.int32)}
    cat.args = (*cat.args[:2], h, bits, 1.0 / (1.0 - p), cat.args[5])
    context.fired(PATTERN, cat, f"{cat.args[5]}, p = {p}")
    gm.graph.erase_node(dropout)
