"""Factors of rows become weights of edges (edge-map): no pass over the rows multiplies them.

Before                                                  After
    z = aten.mul(x, s)               s: [num_src, 1]        w = sddmm(sub, local, s, t, "mul")           [num_edges]
    y = spmm(sub, local, z, None, "sum")                    y = spmm(sub, local, x, w, "sum")
    h = aten.linear(y, weight)                              h = aten.linear(y, weight)
    o = aten.mul(h, t)               t: [num_dst, 1]

GCN normalises sources before the aggregation and destinations after the update: both are numbers per edge, made in one
pass over the edges. What is left between aggregation and activation is the product, whose bias then joins it as well.

Must not fire when a factor needs gradients, when the scaled or the aggregated rows have another reader, when the
aggregation is a max or min, when the product in between has a bias, or under autocast where the scaled results are
float32 in PyTorch and something else than a product reads them; in float16, when a product is in between.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, name, scaled, vector
from joestar.fusion.match.rounding import in_range, in_short
from joestar.fusion.record import Reject

PATTERN = "factor-aggregate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _LINEAR = _JOESTAR.spmm.default, _ATEN.linear.default


def run(gm: fx.GraphModule, context) -> int:
    """Folds every factor that fits; returns how many."""
    folded = 0
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.mul.Tensor:
            continue
        source = _scales_sources(node)
        if source is not None:
            if context.admits(PATTERN, node, _source_match(node, source, context)):
                folded += _fold_source(gm.graph, node, source, context)
            continue
        product = _scales_aggregated(node)
        if product is not None and context.admits(PATTERN, node, _target_match(node, *product, context)):
            folded += _fold_target(gm.graph, node, *product, context)
    return folded


# --- factors of sources ---


def _scales_sources(mul: fx.Node) -> fx.Node | None:
    """The rows that ``mul`` scales, if aggregations read the result."""
    if not any(user.target is _SPMM and user.args[2] is mul for user in mul.users):
        return None
    return next((rows for rows in mul.args if isinstance(rows, fx.Node) and scaled(mul, rows) is not None), None)


def _source_match(mul: fx.Node, rows: fx.Node, context) -> bool | Reject:
    for user in mul.users:
        if user.target is not _SPMM or user.args[2] is not mul or user.args[3] is mul:
            return Reject(f"the scaled rows are also read by {name(user)}")
        reason = _unweighable(user)
        if reason:
            return Reject(reason)
        short = in_short(user, context, rows)
        if isinstance(short, Reject):
            return short
    return _constant(mul, rows, context)


def _constant(mul: fx.Node, rows: fx.Node, context) -> bool | Reject:
    if mul.meta["val"].dtype != rows.meta["val"].dtype:
        return Reject("the factor converts the rows to another dtype")
    return Reject("the factor needs gradients") if context.depends_on_grad(scaled(mul, rows)) else True


def _unweighable(spmm: fx.Node) -> str:
    """Why the edges of an aggregation cannot take a weight."""
    if spmm.args[4] not in ("sum", "mean"):
        return f"the aggregation is a {spmm.args[4]}"
    weight = spmm.args[3]
    return "" if weight is None or weight.meta["val"].dim() == 1 else "the heads have edge weights of their own"


def _fold_source(graph: fx.Graph, mul: fx.Node, rows: fx.Node, context) -> int:
    factor = scaled(mul, rows)
    for spmm in list(mul.users):
        with graph.inserting_before(spmm):
            own = vector(graph, spmm, factor, rows)
            values = emit(graph, spmm, _JOESTAR.sddmm.default, *spmm.args[:2], own, None, "copy_lhs")
            _weigh(graph, spmm, values, rows)
        context.fired(PATTERN, spmm, "a factor per source")
    graph.erase_node(mul)
    return 1


def _weigh(graph: fx.Graph, spmm: fx.Node, values: fx.Node, rows: fx.Node) -> None:
    """Multiplies an aggregation's edge weights; it aggregates ``rows``."""
    spmm.args = (*spmm.args[:2], rows, _both(graph, spmm, values), spmm.args[4])


def _both(graph: fx.Graph, spmm: fx.Node, values: fx.Node) -> fx.Node:
    """An aggregation's edge weights times ``values``; factors of both ends are one op."""
    weight = spmm.args[3]
    if weight is None:
        return values
    for one, other in ((weight, values), (values, weight)):
        left, right = _of_sources(one), _of_destinations(other)
        if left is None or right is None or right[0] is not spmm.args[0]:
            continue
        alike = [left[0].meta["val"].dtype == right[1].meta["val"].dtype, _ids(left[1]) == _ids(spmm.args[1])]
        if all(alike) and len(weight.users) == 1:
            return emit(graph, spmm, _JOESTAR.sddmm.default, right[0], left[1], left[0], right[1], "mul")
    return emit(graph, spmm, _ATEN.mul.Tensor, weight, values)


def _of_sources(weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(numbers of sources, these of the edges) if edge weights are such numbers."""
    if weight.target is _JOESTAR.sddmm.default and weight.args[4] == "copy_lhs":
        numbers, sources = weight.args[2], weight.args[1]
    elif weight.target is _ATEN.index_select.default and weight.args[1] == 0 and weight.args[0].op != "placeholder":
        numbers, sources = weight.args[0], weight.args[2]
    else:
        return None
    return (numbers, sources) if numbers.meta["val"].dim() == 1 else None


def _of_destinations(weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(the edges' offsets, numbers of destinations) if edge weights are such numbers."""
    if weight.target is not _JOESTAR.sddmm.default or weight.args[4] != "copy_rhs":
        return None
    return (weight.args[0], weight.args[3]) if weight.args[3].meta["val"].dim() == 1 else None


def _ids(indices: fx.Node) -> torch.dtype:
    return indices.meta["val"].dtype


# --- factors of destinations ---


def _scales_aggregated(mul: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(the rows that ``mul`` scales, the aggregation behind them), through a product or directly."""
    for rows in mul.args:
        if not isinstance(rows, fx.Node) or scaled(mul, rows) is None:
            continue
        spmm = rows.args[0] if rows.target is _LINEAR else rows
        if spmm.target is _SPMM:
            return rows, spmm
    return None


def _target_match(mul: fx.Node, rows: fx.Node, spmm: fx.Node, context) -> bool | Reject:
    if rows is not spmm and len(rows.args) > 2 and rows.args[2] is not None:
        return Reject("the product has a bias, which is scaled as well")
    for node in {rows, spmm}:
        if len(node.users) != 1:
            return Reject("the aggregated rows have another reader")
    reason = _unweighable(spmm)
    constant = Reject(reason) if reason else _constant(mul, rows, context)
    if isinstance(constant, Reject):
        return constant
    return in_short(mul, context, spmm.args[2]) if rows is spmm else in_range(context, rows) and in_short(mul, context)


def _fold_target(graph: fx.Graph, mul: fx.Node, rows: fx.Node, spmm: fx.Node, context) -> int:
    factor = scaled(mul, rows)
    with graph.inserting_before(mul):  # the factor may be computed after the aggregation: both move behind it
        own = vector(graph, spmm, factor, rows)
        values = emit(graph, spmm, _JOESTAR.sddmm.default, *spmm.args[:2], None, own, "copy_rhs")
        new = emit(graph, spmm, _SPMM, *spmm.args[:3], _both(graph, spmm, values), spmm.args[4])
        result = new if rows is spmm else emit(graph, rows, _LINEAR, new, *rows.args[1:])
    context.fired(PATTERN, new, "a factor per destination")
    mul.replace_all_uses_with(result)
    for node in dict.fromkeys((mul, rows, spmm)):
        graph.erase_node(node)
    return 1
