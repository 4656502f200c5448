"""Aggregated rows plus own rows, in one pass (gather-elementwise).

Before (inner layer)                                    After
    y   = spmm(sub, local, x, None, "sum")                  z = aggregate_rows(sub, local, x, None, e, None, 1.0,
    own = aten.slice(x, 0, 0, num_dst)                                         "sum")
    m   = aten.mul(own, e)             e: one entry, or a number
    z   = aten.add(y, m)

Before (first layer)                                    After
    y, _ = sample_aggregate(..., features, "sum")           z, _ = sample_aggregate_own(..., features, e, "sum")
    own  = aten.index_select(features, 0, dsts)
    m    = aten.mul(own, e)
    z    = aten.add(y, m)

GIN's ``(1 + eps) x_i + sum x_j``, and every layer that adds its own row (then ``e`` is 1).

Must not fire when ``e`` is trained, when the aggregated or own rows have another reader, when the own rows are those of
other nodes, or when the aggregation is a max or min, or has edge weights that need gradients; under autocast
where the sum is float32 in PyTorch (a factor is a tensor of one entry) and something else than a product reads it.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit, leads, tensor
from joestar.fusion.match.rounding import in_short
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape, same_size

PATTERN = "own-aggregate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every such sum; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        pair = _pair(node)
        if pair is not None and context.admits(PATTERN, node, _match(node, *pair, context)):
            _rewrite(gm.graph, node, *pair, context)
            fused += 1
    return fused


def _pair(add: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | float | None, fx.Node] | None:
    """(aggregated rows, own term, its factor or ``None``, own rows) if the node adds them."""
    for rows, term in (add.args, add.args[::-1]):
        if not isinstance(rows, fx.Node) or not isinstance(term, fx.Node) or rows is term:
            continue
        source = _aggregation(rows)
        if source is None:
            continue
        for own, factor in _terms(term):
            if _is_own(source, own):
                return rows, term, factor, own
    return None


def _aggregation(rows: fx.Node) -> fx.Node | None:
    if rows.target is _JOESTAR.spmm.default and rows.meta["val"].dim() == 2:
        return rows
    if rows.target is operator.getitem and rows.args[1] == 0:
        source = rows.args[0]
        return source if source.target is _JOESTAR.sample_aggregate.default else None
    return None


def _terms(term: fx.Node):
    """(rows, factor) that a term may be the product of."""
    yield term, None
    if term.target is _ATEN.mul.Tensor and not term.kwargs:
        for own, factor in (term.args, term.args[::-1]):
            if tensor(own) is not None and (_is_one_number(factor) or _is_python_number(factor)):
                yield own, factor


def _is_one_number(value) -> bool:
    found = tensor(value)
    return found is not None and all(same_size(size, 1) for size in found.shape)


def _is_python_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_own(source: fx.Node, own: fx.Node) -> bool:
    if source.target is _JOESTAR.spmm.default:
        return leads(own, source.args[2], source.meta["val"].shape[0])
    if own.target is not _ATEN.index_select.default or own.args[1] != 0:
        return False
    return own.args[0] is argument(source, "x") and own.args[2] is argument(source, "dsts")


def _match(
    add: fx.Node, rows: fx.Node, term: fx.Node, factor: fx.Node | float | None, own: fx.Node, context
) -> bool | Reject:
    source = _aggregation(rows)
    reduce, weight = argument(source, "reduce"), argument(source, "weight")
    if reduce not in ("sum", "mean"):
        return Reject(f"the aggregation is a {reduce}")
    if weight is not None and (weight.meta["val"].dim() != 1 or context.depends_on_grad(weight)):
        return Reject("the aggregation has edge weights that need gradients")
    if isinstance(factor, fx.Node) and context.depends_on_grad(factor):
        return Reject("the factor of the own rows is trained")
    if term.meta["val"].dtype != rows.meta["val"].dtype:
        return Reject("the own rows have another dtype")
    if not same_shape(term.meta["val"].shape, rows.meta["val"].shape):
        return Reject("the own rows have another shape")
    parts = {rows: "the aggregation has", term: "the own rows have", own: "the own rows have"}
    for part, text in parts.items():
        if len(part.users) != 1:
            return Reject(f"{text} another reader")
    return in_short(add, context, rows)


def _rewrite(graph: fx.Graph, add: fx.Node, rows: fx.Node, term: fx.Node, factor, own: fx.Node, context) -> None:
    source, value = _aggregation(rows), rows.meta["val"]
    with graph.inserting_before(add):
        if not isinstance(factor, fx.Node):
            one = 1 if factor is None else factor
            one = emit(graph, add, _ATEN.full.default, [1], one, dtype=value.dtype, device=value.device)
        else:
            one = emit(graph, add, _ATEN.to.dtype, emit(graph, add, _ATEN.view.default, factor, [1]), value.dtype)
        if source is rows:
            indptr, indices, x, weight, reduce = source.args
            new = emit(
                graph, add, _JOESTAR.aggregate_rows.default, indptr, indices, x, weight, one, None, 1.0, reduce
            )  # fmt: skip
        else:
            *sample, x, reduce = source.args
            own_too = _JOESTAR.sample_aggregate_own.default
            both = emit(graph, source, own_too, *sample, x, one, reduce, **source.kwargs)
            new = emit(graph, add, operator.getitem, both, 0)
            for user in [user for user in source.users if user is not rows]:
                user.update_arg(0, both)
    context.fired(PATTERN, new, f"{reduce} of {x.name} and own rows")
    add.replace_all_uses_with(new)
    for node in dict.fromkeys((add, term, own, rows, source)):
        graph.erase_node(node)
