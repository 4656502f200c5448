"""Gather-aggregation with edge weights: an aggregation reads the feature table in place (thesis 5.3.2).

Before                                                 After
    x = aten.index_select(features, 0, srcs)               ids = aten.index_select(srcs, 0, local)   (or the sample's)
    z = aten.mul(x, s)               s: [num_src, 1]       w   = aten.index_select(s, 0, local)
    y = spmm(sub, local, z, None, "sum")                   y   = spmm(sub, ids, features, w, "sum")
    own = aten.slice(x, 0, 0, num_dst)                     own = aten.index_select(features, 0, dsts)

The gathered rows, most of a step's bytes, are never stored. A factor per source (GCN's normalisation) becomes a weight
per edge; edge weights and attention stay what they are; self-loops are edges like any other. ``multi_aggregate`` reads
in place like ``spmm``. What ``sample-gather-aggregate`` fuses further, without any edge stored, it has taken before.

Products of the same rows (attention scores) keep the gather, unless ``gather-update`` fuses them as well.

Must not fire when the features need gradients or are computed in the step, when the rows have another reader, or when
a factor needs gradients or meets a max or min.

Where a sample's self-loops were added and nothing but plain aggregations reads the edges, the loops are added to the
sample itself (``sampled_self_loops``): the outermost hop is then not relabelled.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit, name, scaled, vector
from joestar.fusion.match.gathers import destinations, gathers_rows, global_edges, readable_in_place, sources
from joestar.fusion.record import Reject

PATTERN = "gather-aggregate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _GATHER, _LINEAR = _JOESTAR.spmm.default, _ATEN.index_select.default, _ATEN.linear.default
_MULTI = _JOESTAR.multi_aggregate.default


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every gather whose readers all fit; returns the number of aggregations that read in place."""
    fused = 0
    for gather in list(gm.graph.nodes):
        if not gathers_rows(gather) or not _aggregated(gather):
            continue
        if context.admits(PATTERN, gather, _match(gather, context)):
            fused += _rewrite(gm.graph, gather, context)
    return fused


def _aggregated(gather: fx.Node) -> bool:
    """Whether an aggregation may read the rows, directly or behind one more operation."""
    readers = [user for node in (gather, *gather.users) for user in node.users]
    return any(user.target in (_SPMM, _MULTI) and user.args[2] in (gather, *gather.users) for user in readers)


def _match(gather: fx.Node, context) -> bool | Reject:
    readable = readable_in_place(gather, context)
    if not readable:
        return readable
    aggregations = 0
    for user in gather.users:
        found = _reader(user, gather, context)
        if isinstance(found, Reject):
            return found
        aggregations += found
    return True if aggregations else Reject("nothing aggregates the gathered rows")


def _reader(user: fx.Node, gather: fx.Node, context) -> int | Reject:
    """How many aggregations a reader of the rows stands for, or why it may not read in place."""
    if user.target is _SPMM and user.args[2] is gather:
        return 0 if user.args[3] is gather else 1
    if user.target is _MULTI:
        return 1
    if user.target is _LINEAR and user.args[0] is gather:
        return 0  # it keeps the gathered rows, unless gather-update fuses them as well
    if user.target is _ATEN.unsqueeze.default and user.args[1] == 1:
        return _all_aggregate(user, ("sum", "mean"))
    if destinations(user, gather) is not None:
        return 0
    factor = scaled(user, gather)
    if factor is not None:
        if user.meta["val"].dtype != gather.meta["val"].dtype:
            return Reject("the rows are converted to another dtype")
        if context.depends_on_grad(factor):
            return Reject("the rows are scaled by factors that need gradients")
        return _all_aggregate(user, ("sum", "mean"))
    return Reject(f"the gathered rows are also read by {name(user)}")


def _all_aggregate(value: fx.Node, reduces: tuple[str, ...]) -> int | Reject:
    for user in value.users:
        if user.target is not _SPMM or user.args[2] is not value or user.args[3] is value:
            return Reject(f"the gathered rows are also read by {name(user)}")
        if user.args[4] not in reduces:
            return Reject(f"the scaled rows are aggregated by {user.args[4]}")
    return len(value.users)


def _rewrite(graph: fx.Graph, gather: fx.Node, context) -> int:
    table, _, ids = gather.args
    fused, edges = 0, _LoopedEdges(graph, gather)
    for user in list(gather.users):
        if user.target is _LINEAR:
            continue
        if user.target is _SPMM:
            fused += _read_in_place(graph, user, table, ids, None, context, edges)
        elif user.target is _MULTI:
            fused += _several_in_place(graph, user, table, ids, context, edges)
        elif user.target is _ATEN.slice.Tensor:
            with graph.inserting_before(user):
                own = emit(graph, user, _GATHER, table, 0, destinations(user, gather))
            user.replace_all_uses_with(own)
            graph.erase_node(user)
        else:
            factor = scaled(user, gather)
            for spmm in list(user.users):
                fused += _read_in_place(graph, spmm, table, ids, factor, context)
            graph.erase_node(user)
    if not gather.users:
        graph.erase_node(gather)
    return fused


class _LoopedEdges:
    """Global ids of edges among which are self-loops, where no other reader needs local ones."""

    def __init__(self, graph: fx.Graph, gather: fx.Node):
        self.graph, self.ids = graph, gather.args[2]
        self.plain = {user for user in gather.users if user.target is _MULTI or _is_plain(user, gather)}
        self.made: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def of(self, like: fx.Node, indptr: fx.Node, local: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(offsets, global ids of the edges' sources), if that is so."""
        if local in self.made:
            return self.made[local]
        made_by = local.args[0] if local.target is operator.getitem else local
        readers = {reader for output in made_by.users for reader in output.users}
        if made_by.target is not _JOESTAR.block_self_loops.default or not readers <= self.plain:
            return None
        looped = global_edges(self.graph, like, indptr, local, self.ids)
        if looped[0] is not indptr:
            self.plain |= set(looped)
            self.made[local] = looped
        return looped


def _is_plain(user: fx.Node, rows: fx.Node) -> bool:
    return user.target is _SPMM and user.args[2] is rows and user.args[3] is None


def _read_in_place(
    graph: fx.Graph, spmm: fx.Node, table, ids: fx.Node, factor: fx.Node | None, context, looped=None
) -> int:
    indptr, local, rows, weight, reduce = spmm.args
    with graph.inserting_before(spmm):
        found = looped.of(spmm, indptr, local) if looped is not None else None
        if factor is not None:
            own = emit(graph, spmm, _GATHER, vector(graph, spmm, factor, rows), 0, local)
            weight = own if weight is None else emit(graph, spmm, _ATEN.mul.Tensor, weight, _like(graph, own, weight))
        if rows.meta["val"].dim() == 3:
            table = emit(graph, spmm, _ATEN.unsqueeze.default, table, 1)
        indptr, edges = found or (indptr, sources(graph, spmm, ids, local))
        new = emit(graph, spmm, _SPMM, indptr, edges, table, weight, reduce)
    context.fired(PATTERN, new, f"{reduce}{'' if weight is None else ', weighted,'} of {_origin(table).name}")
    spmm.replace_all_uses_with(new)
    graph.erase_node(spmm)
    return 1


def _several_in_place(graph: fx.Graph, node: fx.Node, table: fx.Node, ids: fx.Node, context, looped) -> int:
    indptr, local, _, reduces, ties = node.args
    with graph.inserting_before(node):
        indptr, edges = looped.of(node, indptr, local) or (indptr, sources(graph, node, ids, local))
        new = emit(graph, node, _MULTI, indptr, edges, table, reduces, ties)
    context.fired(PATTERN, new, f"{reduces} of {table.name}")
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return 1


def _origin(table: fx.Node) -> fx.Node:
    return table if table.op == "placeholder" else table.args[0]


def _like(graph: fx.Graph, column: fx.Node, weight: fx.Node) -> fx.Node:
    """Values per edge, so that they broadcast over the weights of several heads."""
    if weight.meta["val"].dim() == 1:
        return column
    return emit(graph, column, _ATEN.unsqueeze.default, column, -1)
