"""Several aggregations of the same rows over the same edges become one op that reads the rows once.

Before                                                  After
    a = spmm(sub, local, x, None, "mean")                   y = multi_aggregate(sub, local, x, "mean,max,mean2", True)
    b = spmm(sub, local, x, None, "max")                    a, b, c = y[0], y[1], y[2]
    z = aten.mul(x, x)
    c = spmm(sub, local, z, None, "mean")

Every row is read once per edge, backward once per source, and squares are not stored; where gradients reach the rows,
the op also notes how many edges attain an extremum, which its gradient asks. Rows that come from the feature table are
then read in place by ``gather-aggregate``: the sample is drawn once, and the outermost hop is not relabelled.

They are joined even where ``sample-gather-aggregate``, ``aggregate-update`` or ``own-aggregate`` would fuse one of them
with something else: those save some rows per destination, this saves one per edge for every aggregation but the first.

A choice ``reductions:hop<n>`` per place, by default ``together``; on a CPU ``apart`` where products or rows have
16 bits, whose gradients are summed in another order then.

Must not fire where an aggregation has edge weights, where rows are no vectors (heads), where no two of them run over
the same edges, or where sums and means read scaled rows, whose factors become weights of the edges. Squares stay apart
when they have another reader or are not added up.
"""

import operator

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.match.emit import emit, scaled, tensor
from joestar.fusion.match.rounding import in_full
from joestar.fusion.record import Reject

PATTERN = "multi-aggregate"
APART, TOGETHER = "apart", "together"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _SUMS = _JOESTAR.spmm.default, ("sum", "mean")
Group = dict[str, list[fx.Node]]
"""Reduction -> aggregations over the same edges."""


def run(gm: fx.GraphModule, context) -> int:
    """Joins what aggregates the same rows; returns the number of ops that it makes."""
    made, taken, seen = 0, {}, set()
    for rows in list(gm.graph.nodes):
        found = [(kind, spmm) for kind, spmm in _aggregations(rows, context) if spmm not in seen]
        if len(found) < 2:
            continue
        seen.update(spmm for _, spmm in found)  # those of squares are no place of their own
        match = _match(rows, found)
        for group in match or (match,):
            first = _first(gm.graph, group) if group else found[0][1]
            if context.admits(PATTERN, first, group and _chosen(first, taken, context)):
                _rewrite(gm.graph, rows, group, context)
                made += 1
    return made


def _readers(rows: fx.Node) -> list[fx.Node]:
    """The aggregations of the rows."""
    return [user for user in rows.users if user.target is _SPMM and user.args[2] is rows]


def _aggregations(rows: fx.Node, context) -> list[tuple[str, fx.Node]]:
    """(reduction, aggregation) of the rows, and of their squares where these are not needed otherwise."""
    found = [(user.args[4], user) for user in _readers(rows)]
    for square in list(rows.users) if found else ():
        if not _is_square(square, rows) or not _readers(square):
            continue
        if len(_readers(square)) != len(square.users):
            context.refused(PATTERN, square, Reject("the squares have another reader"))
        elif any(user.args[4] not in _SUMS for user in square.users):
            context.refused(PATTERN, square, Reject("the squares are not added up"))
        else:
            found += [(f"{user.args[4]}2", user) for user in square.users]
    return found


def _is_square(node: fx.Node, rows: fx.Node) -> bool:
    if node.kwargs:
        return False
    if node.target is _ATEN.mul.Tensor:
        return node.args == (rows, rows)
    if node.target is _ATEN.pow.Tensor_Scalar:
        return node.args == (rows, 2)
    return node.target is _ATEN.square.default


def _match(rows: fx.Node, found: list[tuple[str, fx.Node]]) -> list[Group] | Reject:
    """Reductions over the same edges, at least two of them each."""
    value = tensor(rows)
    if value is None or value.dim() != 2 or not value.dtype.is_floating_point:
        return Reject("the rows are no vectors of floats")
    groups: dict[tuple, Group] = {}
    for kind, spmm in found:
        if spmm.args[3] is None:
            groups.setdefault(spmm.args[:2], {}).setdefault(kind, []).append(spmm)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        weighted = any(spmm.args[3] is not None for _, spmm in found)
        return Reject("an aggregation has edge weights" if weighted else "the aggregations run over different edges")
    if all(kind in _SUMS for kind, _ in found) and any(scaled(rows, part) for part in rows.all_input_nodes):
        return Reject("the rows are scaled: their factors become weights of the edges")
    return several


def _first(graph: fx.Graph, group: Group) -> fx.Node:
    """The first aggregation in the order of the graph."""
    members = {spmm for nodes in group.values() for spmm in nodes}
    return next(node for node in graph.nodes if node in members)


def _chosen(first: fx.Node, taken: dict[str, int], context) -> bool | Reject:
    default = TOGETHER if context.device == "cuda" or in_full(context, first) else APART
    form = context.choose("reductions", site_name(first, taken), (APART, TOGETHER), default, first)
    return True if form == TOGETHER else Reject("reading the rows for each is chosen")


def _rewrite(graph: fx.Graph, rows: fx.Node, group: Group, context) -> None:
    first, reduces = _first(graph, group), ",".join(group)
    with graph.inserting_before(first):
        ties = context.depends_on_grad(rows)
        joined = emit(graph, first, _JOESTAR.multi_aggregate.default, *first.args[:2], rows, reduces, ties)
        results = [emit(graph, nodes[0], operator.getitem, joined, i) for i, nodes in enumerate(group.values())]
    context.fired(PATTERN, joined, f"{reduces} of {rows.name}")
    for result, nodes in zip(results, group.values(), strict=True):
        for spmm in nodes:
            read = spmm.args[2]
            spmm.replace_all_uses_with(result)
            graph.erase_node(spmm)
            if read is not rows and not read.users:
                graph.erase_node(read)
