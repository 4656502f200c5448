"""Gathered rows, seen from the passes that read them in place instead."""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit, leads
from joestar.fusion.record import Reject
from joestar.lowering.sizes import same_size

_JOESTAR = torch.ops.joestar
_GATHER, _COMPACT, _LOOPS = (
    torch.ops.aten.index_select.default,
    _JOESTAR.compact.default,
    _JOESTAR.block_self_loops.default,
)


def gathers_rows(node: fx.Node) -> bool:
    """Whether the node is ``index_select(table, 0, ids)`` of floating-point rows."""
    return node.target is _GATHER and node.args[1] == 0 and node.args[0].meta["val"].dtype.is_floating_point


def readable_in_place(gather: fx.Node, context) -> bool | Reject:
    """Whether the table is a matrix, an input of the program, and needs no gradients."""
    table = gather.args[0]
    if table.op != "placeholder":
        return Reject("the features are computed in this step")
    if context.needs_grad(table):
        return Reject("the features need gradients")
    return True if table.meta["val"].dim() == 2 else Reject("the features are not a matrix")


def compact_behind(ids: fx.Node) -> fx.Node | None:
    """The ``compact`` whose sources the ids are."""
    if ids.target is operator.getitem and ids.args[1] == 0 and ids.args[0].target is _COMPACT:
        return ids.args[0]
    return None


def destinations(part: fx.Node, gather: fx.Node) -> fx.Node | None:
    """The ids behind ``part`` if it is the destinations' own rows: the first rows of what a ``compact`` numbered."""
    compact = compact_behind(gather.args[2])
    if compact is None or not leads(part, gather, compact.args[0].meta["val"].shape[0]):
        return None
    return compact.args[0]


def sources(graph: fx.Graph, like: fx.Node, ids: fx.Node, local: fx.Node) -> fx.Node:
    """Global ids of the edges' sources: those that were sampled, where the local ids are theirs."""
    compact = compact_behind(ids)
    plain = compact is not None and local.target is operator.getitem and local.args == (compact, 1)
    return compact.args[3] if plain else emit(graph, like, _GATHER, ids, 0, local)


def global_edges(
    graph: fx.Graph, like: fx.Node, indptr: fx.Node, local: fx.Node, ids: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """(offsets, global ids of the edges' sources); self-loops of a sample are added to it before it is numbered."""
    compact = compact_behind(ids)
    if compact is not None and local.target is operator.getitem and local.args[1] == 1:
        source = local.args[0]
        if source.target is _LOOPS and source.args[2] is compact.args[3] and indptr.args[0] is source:
            sub, _, picked, dsts, count, _ = source.args
            looped = emit(graph, like, _JOESTAR.sampled_self_loops.default, sub, picked, dsts, count)
            return tuple(emit(graph, like, operator.getitem, looped, output) for output in range(2))
    return indptr, sources(graph, like, ids, local)


def at_most(graph: fx.Graph, few, many) -> bool:
    """Whether the size ``few`` is known not to exceed ``many``: sources of a block begin with its destinations."""
    found = [many]
    for size in found:
        if same_size(size, few):
            return True
        for node in graph.find_nodes(op="call_function", target=_COMPACT):
            if same_size(node.meta["val"][0].shape[0], size):
                inner = node.args[0].meta["val"].shape[0]
                found += [] if any(same_size(inner, other) for other in found) else [inner]
    return False
