"""Activation and dropout happen where rows are read: their result is never stored, nor is a mask of the gradient.

Before                                                  After
    y    = joestar.keyed_dropout(h, ids, key,               bits = joestar.dropout_bits(ids, key, site, p, F)
                                 site, p, True)             both = joestar.aggregate_cat(sub, local, h, bits,
    both = joestar.aggregate_cat(sub, local, y,                                          1 / (1 - p), "mean")
                                 None, 1.0, "mean")

Forward, the aggregation applies ReLU and mask to every row that it gathers. Backward, the rows of the gradient are
summed from the edges of each source, masked, and written once. The same for ``aggregate_rows``, and for an ``spmm``
(sum or mean, edge weights without gradients), which becomes ``aggregate_rows(sub, local, h, w, None, bits, ...)``.
On a GPU for a ReLU without dropout as well, whose bits are all set.

Must not fire when the activated rows have another reader (jumping knowledge), which needs them stored, or when edge
weights need gradients.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument

PATTERN = "dropout-aggregate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_RELU = _ATEN.relu.default
_CAT, _ROWS, _SPMM = _JOESTAR.aggregate_cat.default, _JOESTAR.aggregate_rows.default, _JOESTAR.spmm.default
_BITS = {_CAT: 3, _ROWS: 5}
"""Aggregations that can apply bits: the position of the bits among their arguments."""


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every pair; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        plain = node.target is _SPMM and not of_edges(node) and _activated(node.args[2], context)
        waiting = node.target in _BITS and node.args[_BITS[node.target]] is None
        if not plain and not waiting:
            continue
        dropout = node.args[2]
        if context.admits(PATTERN, node, _match(node, dropout, context)):
            _rewrite(gm.graph, node, dropout, context)
            fused += 1
    return fused


def of_edges(spmm: fx.Node) -> bool:
    """Whether what is aggregated are values of edges, in their order: a message, which other passes take whole."""
    return spmm.args[1].target is _ATEN.arange.default


def _activated(rows: fx.Node, context) -> bool:
    if rows.target is _RELU:
        return context.device == "cuda"
    return rows.target is _JOESTAR.keyed_dropout.default and argument(rows, "relu")


def _match(node: fx.Node, dropout: fx.Node, context) -> bool | Reject:
    if not _activated(dropout, context) or dropout.meta["val"].dim() != 2:
        return Reject("the rows are not the result of ReLU and dropout")
    if len(dropout.users) != 1:
        return Reject("the activated rows have another reader")
    if node.target is _SPMM:
        if node.args[4] not in ("sum", "mean"):
            return Reject(f"the aggregation is a {node.args[4]}")
        weight = node.args[3]
        if weight is not None and (weight.meta["val"].dim() != 1 or context.depends_on_grad(weight)):
            return Reject("the aggregation has edge weights that need gradients")
    return True


def _rewrite(graph: fx.Graph, node: fx.Node, dropout: fx.Node, context) -> None:
    h, p = dropout.args[0], 0.0 if dropout.target is _RELU else dropout.args[4]
    scale = 1.0 / (1.0 - p)
    with graph.inserting_before(node):
        bits = _bits(graph, dropout)
        reduce = argument(node, "reduce")
        if node.target is _CAT:
            args = (*node.args[:2], h, bits, scale, reduce)
        elif node.target is _ROWS:
            args = (*node.args[:2], h, *node.args[3:5], bits, scale, reduce)
        else:
            args = (*node.args[:2], h, node.args[3], None, bits, scale, reduce)
        new = emit(graph, node, _CAT if node.target is _CAT else _ROWS, *args)
    context.fired(PATTERN, new, f"{reduce}, p = {p}")
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(dropout)


def _bits(graph: fx.Graph, dropout: fx.Node) -> fx.Node:
    """A bit per entry of the rows, 32 columns to a word: whether it is kept."""
    rows = dropout.args[0]
    columns = int(rows.meta["val"].shape[1])
    if dropout.target is not _RELU:
        ids, key, site, p = dropout.args[1:5]
        return emit(graph, dropout, _JOESTAR.dropout_bits.default, ids, key, site, p, columns)
    words = emit(graph, dropout, _ATEN.slice.Tensor, rows, 1, 0, -(-columns // 32))
    return emit(
        graph, dropout, _ATEN.full_like.default, words, -1, dtype=torch.int32, memory_format=torch.contiguous_format
    )
