"""Activation, dropout and aggregation share their backward pass: the gradient is gathered and masked at once.

Before                                                  After
    y    = joestar.keyed_dropout(h, ids, key,               bits = joestar.dropout_bits(ids, key, site, p, F)
                                 site, p, True)             y, both = joestar.dropout_aggregate_cat(h, bits, p,
    both = joestar.aggregate_cat(sub, local, y, "mean")                             sub, local, "mean")

Forward, the new op dissolves into the two old ones (the activation then fuses into the GEMM before it). Backward, the
rows of the gradient are summed from the edges of each source, masked where ``y`` is not positive, and written once.

Must not fire when the activated rows have another reader (jumping knowledge), whose gradient would have to join.
"""

import operator

import torch
from torch import fx

from joestar.fusion.record import Reject

PATTERN = "dropout-aggregate"
_JOESTAR = torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every pair; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _JOESTAR.aggregate_cat.default:
            continue
        dropout = node.args[2]
        match = _match(dropout)
        if match:
            _rewrite(gm, node, dropout, context)
            fused += 1
        else:
            context.refused(PATTERN, node, match)
    return fused


def _match(dropout: fx.Node) -> bool | Reject:
    if dropout.target is not _JOESTAR.keyed_dropout.default or len(dropout.args) < 6 or not dropout.args[5]:
        return Reject("the rows are not the result of ReLU and dropout")
    if len(dropout.users) != 1:
        return Reject("the activated rows have another reader")
    return True


def _rewrite(gm: fx.GraphModule, cat: fx.Node, dropout: fx.Node, context) -> None:
    indptr, indices, _, reduce = cat.args
    h, ids, key, site, p, _ = dropout.args
    value, graph = h.meta["val"], gm.graph
    columns = int(value.shape[1])
    with graph.inserting_before(cat):
        bits = graph.call_function(_JOESTAR.dropout_bits.default, (ids, key, site, p, columns))
        bits.meta = {**dropout.meta, "val": value.new_empty((value.shape[0], -(-columns // 32)), dtype=torch.int32)}
        pair = graph.call_function(_JOESTAR.dropout_aggregate_cat.default, (h, bits, p, indptr, indices, reduce))
        pair.meta = {**cat.meta, "val": (dropout.meta["val"], cat.meta["val"])}
        both = graph.call_function(operator.getitem, (pair, 1))
        both.meta = dict(cat.meta)
    context.fired(PATTERN, pair, f"{reduce}, p = {p}")
    cat.replace_all_uses_with(both)
    graph.erase_node(cat)
    graph.erase_node(dropout)
