"""Edge-map-reduce: what a model computes per edge and what adds it up are one op (thesis 5.3.2, edge-map fusion).

Before                                                   After
    a = sddmm(indptr, indices, x, None, "copy_lhs")          y, = segment(indptr, indices, [x, f, w, b],
    b = aten.linear(f, w, b)           f: [E, 4]                          "src narrow | add 0 1 | relu 2 -> sum 3", 1)
    m = aten.relu(aten.add(a, b))
    y = spmm(indptr, arange(E), m, None, "sum")

    z = sddmm(indptr, indices, l, r, "add")                  s, = segment(indptr, indices, [l, r, att],
    p = aten.mul(aten.leaky_relu(z, 0.2), att)                            "src dst vector | add 0 1 | leaky_relu 3 0.2"
    s = aten.sum(p, [-1])              p: [E, H, F]                       " | mul 4 2 | total 5 -> edges 6", H)

Values ``[E, ...]`` are made where they are added up, forward and backward. ``segment_region.py`` says what a program
computes and what it reads: rows of the ends, products of few columns of edge data, numbers per edge, vectors, and
whatever else is stored per edge; ``emit_segment.py`` when features are read in place.

A choice ``message:<hop>``, by default taken on a GPU; on a CPU, stored messages are added up faster.

Must not fire when the reduction is a max or min, when the message or all that it is made of has another reader, when
nothing elementwise stands in front of the reduction, when the message reads no end of its edges, or those of other
edges, or has one number per edge, or when a head has more columns than a program holds.
"""

import math

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.edges.edge_steps import Value, row_size
from joestar.fusion.edges.emit_segment import replace_by_segment
from joestar.fusion.edges.segment_region import Region
from joestar.fusion.match.emit import name
from joestar.fusion.record import Reject

PATTERN = "edge-map-reduce"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _SUM = _JOESTAR.spmm.default, _ATEN.sum.dim_IntList
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
    return _reads_ends(node, context)


def _reads_ends(node: fx.Node, context) -> bool:
    """Whether a message would read ends of its edges if nothing else read its values."""
    region = _region(node)
    if region is None:
        return False
    region.grow([_message(node)], {node}, context, strict=False)
    return bool(region.loads())


def _message(node: fx.Node) -> fx.Node:
    return node.args[2] if node.target is _SPMM else node.args[0]


def _region(node: fx.Node) -> Region | None:
    """An empty region in front of a reduction; ``None`` of something without columns, or of an unknown number."""
    message = _message(node)
    sizes = message.meta["val"].shape[1:]
    if not sizes or row_size(message) is None:
        return None
    edges = (node.args[0] if node.target is _SPMM else None, None)
    return Region(message, edges, math.prod(map(int, sizes[:-1])), int(sizes[-1]))


def _match(node: fx.Node, context) -> tuple[Region, tuple] | Reject:
    """The region in front of a reduction, and the result of its program."""
    refusal = _unfit(node) if node.target is _SPMM else ""
    if refusal:
        return Reject(refusal)
    region, message = _region(node), _message(node)
    refused = region.grow([message], {node}, context)
    if refused is not None:
        return refused if region.loads() else Reject(_obstacle(node, region, context))
    result = region.value(message)
    if node.target is _SUM:
        result = ("edges", region.step("total", result))
    else:
        result = (node.args[4], _weighted(region, result, node.args[3]))
    if region.program(result).has_heads and region.width > _WIDEST_HEAD:
        return Reject(f"heads of {region.width} columns are too wide for one program")
    return (region, result) if region.steps else Reject("nothing is computed per edge")


def _weighted(region: Region, value: Value, weight: fx.Node | None) -> Value:
    if weight is None:
        return value
    kind = "scalar" if weight.meta["val"].dim() == 1 else "edge_head"
    return region.step("mul", value, region.leaf(kind, weight))


def _obstacle(node: fx.Node, region: Region, context) -> str:
    """Why a program reads no end of its edges."""
    if _reads_ends(node, context):
        return "the message, or a value on the way to it, has another reader"
    if region.inside or not region.border:
        return "the message reads no end of its edges"
    return f"{name(region.border[0])} in front of the reduction is no step of a program"


def _unfit(spmm: fx.Node) -> str:
    """Why an aggregation of edge values is none that the op computes."""
    message, weight, reduce = spmm.args[2:5]
    value = message.meta["val"]
    if reduce not in ("sum", "mean"):
        return f"the aggregation is a {reduce}"
    if not value.dtype.is_floating_point or spmm.meta["val"].dtype != value.dtype:
        return f"the message is {value.dtype}"
    if value.dim() < 2:
        return "the message is one number per edge"
    if row_size(message) is None:
        return "the columns of the message are not known"
    if weight is not None and weight.meta["val"].dtype != value.dtype:
        return f"the weights are {weight.meta['val'].dtype}"
    of_heads = weight is not None and weight.meta["val"].dim() > 1
    if of_heads and (value.dim() != 3 or weight.meta["val"].shape[1] != value.shape[1]):
        return "the weights are not those of heads"
    return ""


def _chosen(node: fx.Node, match: tuple, taken: dict[str, int], context) -> tuple | Reject:
    default = FUSED if context.device == "cuda" else STORED
    place = site_name(match[0].loads()[0], taken)
    if context.choose("message", place, (STORED, FUSED), default, node) == FUSED:
        return match
    return Reject("storing the messages is chosen")


def _rewrite(graph: fx.Graph, node: fx.Node, match: tuple, context) -> None:
    region, result = match
    y, program, place = replace_by_segment(graph, node, region, result, context)
    heads = f", {region.heads} heads" if region.heads > 1 else ""
    context.fired(PATTERN, y, f"{program}{heads}{place}")
