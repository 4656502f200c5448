"""Gather-update: a product reads the feature table in place (gather-GEMM, thesis 5.3.2).

Before                                              After
    x   = aten.index_select(features, 0, srcs)          h = gather_linear(features, srcs, w, b)
    h   = aten.linear(x, w, b)                          o = gather_linear(features, dsts, v, None)
    own = aten.slice(x, 0, 0, num_dst)
    o   = aten.linear(own, v)

For models that update rows before they are aggregated, where the order may not be exchanged (a norm in between,
attention that is not linear in the rows, a choice). Gathering followed by elementwise work is left to the backend,
which compiles both into one loop.

Reading in place gathers again in the backward pass: a choice ``gather:<table>_<n>``, by default taken on a GPU, where
the stored rows are what costs, and not on a CPU, where gathering is.

Must not fire when the features need gradients or are computed in the step, when the rows have any reader but products
and the destinations' own rows, or when more than two products would gather the same rows.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, has_plain_bias, is_product, name
from joestar.fusion.match.gathers import destinations, gathers_rows, readable_in_place
from joestar.fusion.record import Reject

PATTERN = "gather-update"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_GATHER, _LINEAR = _ATEN.index_select.default, _ATEN.linear.default
STORED, IN_PLACE = "stored", "in-place"
_MOST = 2


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every gather whose readers all fit; returns the number of products."""
    fused = 0
    gathers = [node for node in gm.graph.nodes if gathers_rows(node) and _products(node)]
    for position, gather in enumerate(gathers):
        if context.admits(PATTERN, gather, _chosen(gather, position, context)):
            fused += _rewrite(gm.graph, gather, context)
    return fused


def _products(rows: fx.Node) -> list[fx.Node]:
    return [user for user in rows.users if is_product(user) and user.args[0] is rows]


def _chosen(gather: fx.Node, position: int, context) -> bool | Reject:
    match = _match(gather, context)
    if not match:
        return match
    default = IN_PLACE if context.device == "cuda" else STORED
    place = f"{gather.args[0].name}_{position}"
    chosen = context.choose("gather", place, (STORED, IN_PLACE), default, gather)
    return True if chosen == IN_PLACE else Reject("storing the gathered rows is chosen")


def _match(gather: fx.Node, context) -> bool | Reject:
    readable = readable_in_place(gather, context)
    if not readable:
        return readable
    for user in gather.users:
        if is_product(user) and user.args[0] is gather:
            continue
        if destinations(user, gather) is None:
            return Reject(f"the gathered rows are also read by {name(user)}")
    readers = [gather, *(user for user in gather.users if not is_product(user))]
    if not all(has_plain_bias(product) for rows in readers for product in _products(rows)):
        return Reject("a bias is no vector of the product's columns")
    if len(_products(gather)) > _MOST:
        return Reject(f"{len(_products(gather))} products read the gathered rows: storing them once is cheaper")
    return True


def _rewrite(graph: fx.Graph, gather: fx.Node, context) -> int:
    table, _, ids = gather.args
    fused = 0
    for user in list(gather.users):
        if user.target is _LINEAR:
            fused += _fuse(graph, user, table, ids, context)
            continue
        dsts = destinations(user, gather)
        if set(user.users) == set(_products(user)) and len(user.users) <= _MOST:
            for product in list(user.users):
                fused += _fuse(graph, product, table, dsts, context)
        else:
            with graph.inserting_before(user):
                own = emit(graph, user, _GATHER, table, 0, dsts)
            user.replace_all_uses_with(own)
        graph.erase_node(user)
    graph.erase_node(gather)
    return fused


def _fuse(graph: fx.Graph, linear: fx.Node, table: fx.Node, ids: fx.Node, context) -> int:
    bias = linear.args[2] if len(linear.args) > 2 else None
    with graph.inserting_before(linear):
        new = emit(graph, linear, _JOESTAR.gather_linear.default, table, ids, linear.args[1], bias)
    context.fired(PATTERN, new, f"{table.name} times {linear.args[1].name}")
    linear.replace_all_uses_with(new)
    graph.erase_node(linear)
    return 1
