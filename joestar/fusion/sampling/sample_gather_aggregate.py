"""Sample-gather-aggregation: the first layer reads features straight through the sample (thesis 5.3.2, figure 5.7).

Before                                                          After
    sub, picked, _ = sample_cols(indptr, indices, dsts, ...)        y, _  = sample_aggregate(indptr, indices, dsts, ...,
    srcs, local, _ = compact(dsts, count, sub, picked, ...)                                  features, "mean")
    x     = aten.index_select(features, 0, srcs)                    x_dst = aten.index_select(features, 0, dsts)
    y     = spmm(sub, local, x, None, "mean")
    x_dst = aten.slice(x, 0, 0, num_dst)

The outermost hop is then neither compacted nor stored; destinations come first in every block, so their own rows are
``features[dsts]``. Several aggregations of the same block fire one by one: each recomputes the sample.

Must not fire when: the gathered rows or the local ids have any other reader (a GEMM before the aggregation, edge
weights, attention); the product has edge weights; the features need gradients (the fused op has none); the sources of
the block are sampled further.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import hashed, name
from joestar.fusion.match.gathers import compact_behind, destinations, gathers_rows, readable_in_place
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument, position

PATTERN = "sample-gather-aggregate"
_JOESTAR = torch.ops.joestar
_ATEN = torch.ops.aten


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every gather whose readers all fit; returns the number of aggregations replaced."""
    fused = 0
    for gather in list(gm.graph.nodes):
        if not gathers_rows(gather) or compact_behind(gather.args[2]) is None:
            continue
        match = _match(gather, context)
        if context.admits(PATTERN, gather, match):
            fused += _rewrite(gm, gather, *match, context)
    return fused


def _match(gather: fx.Node, context) -> tuple[fx.Node, list[fx.Node], list[fx.Node]] | Reject:
    """(sample node, aggregations, slices of the destinations' rows)."""
    srcs = gather.args[2]
    compact = srcs.args[0]
    sub, picked = compact.args[2], compact.args[3]
    sample = sub.args[0] if sub.target is operator.getitem else sub
    if sample.target is not _JOESTAR.sample_cols.default or picked.args[0] is not sample:
        return Reject("the block does not come straight from a sample of columns")
    readable = readable_in_place(gather, context)
    if not readable:
        return readable
    local = next((user for user in compact.users if user.args[1] == 1), None)
    aggregations, slices = [], []
    for user in gather.users:
        reason = None
        if user.target is _JOESTAR.spmm.default and user.args[2] is gather:
            indptr, indices, _, weight, _ = user.args
            if weight is not None:
                reason = "the aggregation has edge weights"
            elif indptr is not sub or indices is not local:
                reason = "the aggregation runs over another structure (self-loops were added, or edges recomputed)"
            aggregations.append(user)
        elif destinations(user, gather) is not None:
            slices.append(user)
        else:
            reason = f"the gathered rows are also read by {name(user)} before the aggregation"
        if reason:
            return Reject(reason)
    if not aggregations:
        return Reject("nothing aggregates the gathered rows")
    others = [user for user in srcs.users if user is not gather]
    if others:
        return Reject(f"the sources of the block are also read by {name(others[0])}")
    others = [user for user in local.users if user not in aggregations]
    if others:
        return Reject(f"the local ids of the block are also read by {name(others[0])}")
    for size, made_by in ((argument(sample, "num_edges"), sample), (argument(compact, "num_src"), compact)):
        if isinstance(size, fx.Node) and set(size.users) != {made_by}:
            return Reject("the number of edges or sources of the block is read as well")
    return sample, aggregations, slices


def _rewrite(gm: fx.GraphModule, gather, sample, aggregations, slices, context) -> int:
    table = gather.args[0]
    dsts = argument(sample, "dsts")
    draw = sample.args[: position(sample, "num_edges")]
    for spmm in aggregations:
        with gm.graph.inserting_before(spmm):
            fused = gm.graph.call_function(
                _JOESTAR.sample_aggregate.default, (*draw, table, spmm.args[4]), hashed(sample)
            )
            fused.meta = {**spmm.meta, "val": (spmm.meta["val"], sample.meta["val"][2])}
            y = gm.graph.call_function(operator.getitem, (fused, 0))
            y.meta = dict(spmm.meta)
        context.fired(PATTERN, fused, f"{spmm.args[4]} of {table.name} over fanout {argument(sample, 'k')}")
        spmm.replace_all_uses_with(y)
        gm.graph.erase_node(spmm)
    for part in slices:
        with gm.graph.inserting_before(part):
            own = gm.graph.call_function(_ATEN.index_select.default, (table, 0, dsts))
            own.meta = dict(part.meta)
        part.replace_all_uses_with(own)
        gm.graph.erase_node(part)
    gm.graph.erase_node(gather)
    return len(aggregations)
