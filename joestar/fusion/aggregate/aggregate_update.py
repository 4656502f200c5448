"""Aggregation and update: neighbours' and own rows side by side in one matrix, one GEMM for both (thesis 5.3.2).

Before (first layer)                                    After
    y, _ = sample_aggregate(indptr, indices, dsts,          both, _ = sample_aggregate_cat(indptr, indices, dsts,
                            ..., features, "mean")                                  ..., features, "mean")
    own  = aten.index_select(features, 0, dsts)             w    = join_columns([w_l, w_r, b], width)
    a    = aten.linear(y, w_l, b)                           out  = aten.linear(both, w)
    c    = aten.linear(own, w_r)
    out  = aten.add(a, c)

Before (inner layer)                                    After
    y    = spmm(sub, local, x, None, "mean")                both = aggregate_cat(sub, local, x, None, 1.0, "mean")
    own  = aten.slice(x, 0, 0, num_dst)                     w    = join_columns([w_l, w_r], 2 F)
    ...as above                                             out  = aten.linear(both, w, b)

The kernel writes ``[y, own]``; one product reads it once, without adding to an earlier result. In the first layer a
column of ones follows, which makes the bias part of the weights: its gradient is then a column of theirs, not a
reduction of its own over the many rows. (An inner layer's matrix has a gradient itself: no column that needs none.)

Must not fire when the aggregated rows, the own rows or either product has another reader (a norm in between), when the
own rows are those of other nodes, or when the aggregation is no sum or mean, or weighted.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import is_product, leads
from joestar.fusion.record import Reject
from joestar.kernels.layout import cat_width
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape

PATTERN = "aggregate-update"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Joins every pair of products that fits; returns how many."""
    joined = 0
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        pair = _linear_pair(node)
        if pair is None:
            continue
        if context.admits(PATTERN, node, _match(*pair)):
            _rewrite(gm, node, *pair, context)
            joined += 1
    return joined


def _linear_pair(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(product of the aggregated rows, the other product) if the node adds such a pair."""
    for first, second in (node.args, node.args[::-1]):
        if is_product(first) and is_product(second) and _aggregation(first.args[0]) is not None:
            return first, second
    return None


def _aggregation(rows: fx.Node) -> fx.Node | None:
    """The aggregation whose result the rows are."""
    if rows.target is _JOESTAR.spmm.default:
        return rows
    if rows.target is operator.getitem and rows.args[1] == 0:
        source = rows.args[0]
        return source if source.target is _JOESTAR.sample_aggregate.default else None
    return None


def _match(first: fx.Node, second: fx.Node) -> bool | Reject:
    rows, own = first.args[0], second.args[0]
    source = _aggregation(rows)
    reason = _own_rows(source, own) if source is not rows else _own_slice(rows, own)
    if reason:
        return Reject(reason)
    reduce = argument(source, "reduce")
    if reduce not in ("sum", "mean"):
        return Reject(f"the aggregation is a {reduce}")
    if rows.meta["val"].dim() != 2:
        return Reject("the rows are no vectors")
    if not same_shape(first.meta["val"].shape, second.meta["val"].shape):
        return Reject("one product is broadcast over the columns of the other")
    for part, text in ((first, "a product has"), (second, "a product has"), (rows, "the aggregation has"),
                       (own, "own rows have")):  # fmt: skip
        if len(part.users) != 1:
            return Reject(f"{text} another reader")
    return True


def _own_rows(fused: fx.Node, own: fx.Node) -> str:
    """Why ``own`` is not ``features[dsts]`` of a ``sample_aggregate``."""
    if own.target is not _ATEN.index_select.default or own.args[0] is not argument(fused, "x") or own.args[1] != 0:
        return "the other operand does not hold the destinations' own rows"
    return "" if own.args[2] is argument(fused, "dsts") else "the own rows are those of other nodes"


def _own_slice(spmm: fx.Node, own: fx.Node) -> str:
    """Why ``own`` is not ``x[:num_dst]`` of an ``spmm`` over ``x``."""
    if spmm.args[3] is not None:
        return "the aggregation has edge weights"
    if own.target is not _ATEN.slice.Tensor or own.args[0] is not spmm.args[2]:
        return "the other operand does not hold the destinations' own rows"
    return "" if leads(own, spmm.args[2], spmm.meta["val"].shape[0]) else "the own rows are those of other nodes"


def _rewrite(gm: fx.GraphModule, add: fx.Node, first: fx.Node, second: fx.Node, context) -> None:
    graph, rows, own = gm.graph, first.args[0], second.args[0]
    source = _aggregation(rows)
    value = rows.meta["val"]
    inner = source is rows
    wide = value.new_empty((value.shape[0], 2 * value.shape[1] if inner else cat_width(value.shape[1])))
    with graph.inserting_before(add):
        bias = _added_biases(graph, first, second)
        if inner:
            indptr, indices, x, _, reduce = rows.args
            matrix = graph.call_function(_JOESTAR.aggregate_cat.default, (indptr, indices, x, None, 1.0, reduce))
            detail = f"{reduce} and own rows of {x.name}"
        else:
            both = graph.call_function(_JOESTAR.sample_aggregate_cat.default, source.args, source.kwargs)
            both.meta = {**source.meta, "val": (wide, source.meta["val"][1])}
            matrix = graph.call_function(operator.getitem, (both, 0))
            detail = f"{argument(source, 'reduce')} and own rows of {argument(source, 'x').name}"
            for user in [user for user in source.users if user is not rows]:
                user.update_arg(0, both)
        matrix.meta = {**rows.meta, "val": wide}
        parts = [first.args[1], second.args[1], *([bias] if bias is not None and not inner else [])]
        weight = graph.call_function(_JOESTAR.join_columns.default, (parts, wide.shape[1]))
        weight.meta = {
            **first.meta,
            "val": parts[0].meta["val"].new_empty((parts[0].meta["val"].shape[0], wide.shape[1])),
        }
        arguments = (matrix, weight, bias) if bias is not None and inner else (matrix, weight)
        product = graph.call_function(_ATEN.linear.default, arguments)
        product.meta = dict(add.meta)
    add.replace_all_uses_with(product)
    for node in dict.fromkeys((add, first, second, rows, own, source)):
        graph.erase_node(node)
    context.fired(PATTERN, product, detail)


def _added_biases(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """The bias of the sum of two products."""
    biases = [part.args[2] for part in (first, second) if len(part.args) > 2 and part.args[2] is not None]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.call_function(_ATEN.add.Tensor, tuple(biases))
    both.meta = {**first.meta, "val": biases[0].meta["val"]}
    return both
