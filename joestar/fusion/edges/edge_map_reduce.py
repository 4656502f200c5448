"""Edge-map-reduce: what a model computes per edge and what adds it up are one op (thesis 5.3.2, edge-map fusion).

Before                                                   After
    a = sddmm(indptr, indices, x, None, "copy_lhs")          y = edge_map(indptr, indices, [x, f, w, b],
    b = aten.linear(f, w, b)           f: [E, 4]                          "src narrow | add 0 1 | relu 2", "sum")
    m = aten.relu(aten.add(a, b))
    y = spmm(indptr, arange(E), m, None, "sum")

    z = sddmm(indptr, indices, l, r, "add")                  s = edge_map(indptr, indices, [l, r, att],
    p = aten.mul(aten.leaky_relu(z, 0.2), att)                            "src dst vector | add 0 1 | "
    s = aten.sum(p, [-1])              p: [E, H, F]                       "leaky_relu 3 0.2 | mul 4 2", "heads:H")

Values ``[E, ...]`` are made where they are added up, forward and backward. ``fusion/edges/edge_region.py`` says what a
program computes and what it reads: rows of the ends, products of few columns of edge data, numbers per edge, vectors,
and whatever else is stored per edge.

Before (first layer)                                     After
    x   = aten.index_select(features, 0, srcs)               y   = edge_map(indptr, picked, [features, ...], ...)
    y   = edge_map(indptr, local, [x, ...], ...)             own = aten.index_select(features, 0, dsts)
    own = aten.slice(x, 0, 0, num_dst)

Where nothing but messages and the destinations' own rows read the gathered rows, the features are read in place, and
the outermost hop is not relabelled.

A choice ``message:<hop>``, by default taken on a GPU; on a CPU, stored messages are added up faster.

Must not fire when the reduction is a max or min, when the heads have edge weights of their own, when the message or
all that it is made of has another reader, when nothing elementwise stands in front of the reduction, when the message
reads no end of its edges, or those of other edges, or has one number per edge, or when a head has more columns than a
program holds. Features stay gathered where they need gradients, are computed in the step, or have another reader.
"""

import math

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.edges.edge_region import Region, grow, tensors
from joestar.fusion.match.emit import emit, erase_unread, name
from joestar.fusion.match.gathers import destinations, gathers_rows, global_edges, readable_in_place
from joestar.fusion.record import Reject

PATTERN = "edge-map-reduce"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _SDDMM = _JOESTAR.spmm.default, _JOESTAR.sddmm.default
_SUM, _GATHER = _ATEN.sum.dim_IntList, _ATEN.index_select.default
STORED, FUSED = "stored", "fused"
_WIDEST_HEAD = 2048
"""Columns that a program holds of every value, where it adds them up."""


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every reduction of a message that fits; returns how many."""
    fused, taken = 0, {}
    for node in list(gm.graph.nodes):
        if not (_adds_edges(node) or _adds_columns(node, context)):
            continue
        match = _match(node, context)
        if match:
            match = _chosen(node, match, taken, context)
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match, context)
            fused += 1
    return fused


def _adds_edges(node: fx.Node) -> bool:
    """Whether a node reduces values of edges, in their order, per destination."""
    if node.target is not _SPMM or node.args[1].target is not _ATEN.arange.default:
        return False
    return len(node.args[1].args) == 1


def _adds_columns(node: fx.Node, context) -> bool:
    """Whether a node adds up the columns of each head of something that reads ends of edges."""
    if node.target is not _SUM or node.kwargs.keys() - {"dtype"} or node.kwargs.get("dtype") is not None:
        return False
    message, (dim, *others) = node.args[0], node.args[1] or (None,)
    if others or dim not in (-1, message.meta["val"].dim() - 1) or not message.meta["val"].dtype.is_floating_point:
        return False
    return grow(message, node, None, context, strict=False).edges is not None


def _match(node: fx.Node, context) -> Region | Reject:
    """The region in front of a reduction."""
    message, indptr = (node.args[2], node.args[0]) if node.target is _SPMM else (node.args[0], None)
    if node.target is _SPMM:
        refusal = _unfit(node, message)
        if refusal:
            return Reject(refusal)
    region = grow(message, node, indptr, context)
    if node.target is _SUM and int(message.meta["val"].shape[-1]) > _WIDEST_HEAD:
        return Reject(f"heads of {message.meta['val'].shape[-1]} columns are too wide for one program")
    if region.edges is None:
        return Reject(_obstacle(region, grow(message, node, indptr, context, strict=False)))
    if node.target is _SPMM and node.args[3] is not None:
        region.result = region.step("mul", region.result, region.leaf("scalar", node.args[3]))
    return region if region.steps else Reject("nothing is computed per edge")


def _obstacle(region: Region, loose: Region) -> str:
    """Why a program reads no end of its edges; ``loose`` is the region if nothing else read its values."""
    if loose.edges is not None:
        return "the message, or a value on the way to it, has another reader"
    if region.inside or not region.border:
        return "the message reads no end of its edges"
    return f"{name(region.border[0])} in front of the reduction is no step of a program"


def _unfit(spmm: fx.Node, message: fx.Node) -> str:
    """Why an aggregation of edge values is none that the op computes."""
    weight, reduce = spmm.args[3:5]
    value = message.meta["val"]
    if reduce not in ("sum", "mean"):
        return f"the aggregation is a {reduce}"
    if not value.dtype.is_floating_point or spmm.meta["val"].dtype != value.dtype:
        return f"the message is {value.dtype}"
    if value.dim() < 2:
        return "the message is one number per edge"
    if weight is not None and (weight.meta["val"].dim() != 1 or weight.meta["val"].dtype != value.dtype):
        return "the heads have edge weights of their own"
    return ""


def _chosen(node: fx.Node, region: Region, taken: dict[str, int], context) -> Region | Reject:
    default = FUSED if context.device == "cuda" else STORED
    place = site_name(region.loads()[0], taken)
    if context.choose("message", place, (STORED, FUSED), default, node) == FUSED:
        return region
    return Reject("storing the messages is chosen")


# --- the first layer ------------------------------------------------------------------------------------------------


def table_gathers(region, context) -> list[fx.Node]:
    """Gathers of features that all rows of sources in a region's program are, if it can read these in place."""
    rows = [leaf.operands[0] for leaf in region.leaves if leaf.kind.startswith("src")]
    if not rows or not all(gathers_rows(x) and readable_in_place(x, context) for x in rows):
        return []
    if any(x.args[2] is not rows[0].args[2] for x in rows):
        return []
    fits = all(_yields(user, x) for x in rows for user in x.users)
    return rows if fits else []


def _yields(reader: fx.Node, gather: fx.Node) -> bool:
    """Whether a reader of gathered rows is this message's, maybe another one's, or can gather rows of its own."""
    return reader.target is _SDDMM or destinations(reader, gather) is not None


def own_rows(graph: fx.Graph, gather: fx.Node) -> None:
    """The destinations' rows of a table that is read in place are gathered alone."""
    for part in list(gather.users):
        dsts = destinations(part, gather)
        if dsts is not None:
            with graph.inserting_before(part):
                own = emit(graph, part, _GATHER, gather.args[0], 0, dsts)
            part.replace_all_uses_with(own)
            erase_unread(graph, part)


# --- the rewrite ----------------------------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, node: fx.Node, region: Region, context) -> None:
    program, gathers = str(region.program()), table_gathers(region, context)
    shape = node.meta["val"].shape
    heads = 0 if node.target is _SPMM else math.prod(map(int, node.args[0].meta["val"].shape[1:-1]))
    reduce = f"heads:{heads}" if heads else node.args[4]
    indptr, indices = region.edges
    with graph.inserting_before(node):
        if gathers:
            indptr, indices = global_edges(graph, node, indptr, indices, gathers[0].args[2])
        operands = []
        for leaf in region.leaves:
            in_place = gathers and leaf.kind == "src"
            operands += [leaf.operands[0].args[0]] if in_place else tensors(graph, node, leaf)
        y = emit(graph, node, _JOESTAR.edge_map.default, indptr, indices, operands, program, reduce)
        if len(shape) > 2:
            y = emit(graph, node, _ATEN.unflatten.int, y, 1, [int(size) for size in shape[1:]])
        elif len(shape) == 1:
            y = emit(graph, node, _ATEN.squeeze.dim, y, 1)
    place = f"{program}, {reduce}{' of ' + gathers[0].args[0].name if gathers else ''}"
    context.fired(PATTERN, y, place)
    node.replace_all_uses_with(y)
    erase_unread(graph, node)
    for gather in gathers:
        own_rows(graph, gather)
