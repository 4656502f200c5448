"""How a region is written into the graph as a ``segment``; features that all of its sources are, are read in place.

Before (first layer)                                     After
    x   = aten.index_select(features, 0, srcs)               y,  = segment(indptr, picked, [features, ...], ...)
    y,  = segment(indptr, local, [x, ...], ...)              own = aten.index_select(features, 0, dsts)
    own = aten.slice(x, 0, 0, num_dst)

Where nothing but messages and the destinations' own rows read the gathered rows, the features are read in place, and
the outermost hop is not relabelled. Features stay gathered where they need gradients, are computed in the step, or have
another reader.
"""

import operator

import torch
from torch import fx

from joestar.fusion.edges.edge_steps import tensors
from joestar.fusion.edges.segment_region import Region
from joestar.fusion.match.emit import emit, erase_unread
from joestar.fusion.match.gathers import destinations, gathers_rows, global_edges, readable_in_place

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SDDMM, _GATHER = _JOESTAR.sddmm.default, _ATEN.index_select.default


def replace_by_segment(graph: fx.Graph, node: fx.Node, region: Region, result: tuple, context) -> tuple:
    """Puts the region's program, of one result, in the place of ``node``.

    Returns:
        (the node of the result, the program, and " of " the tables that are read in place, if any).
    """
    program, shape = region.program(result), node.meta["val"].shape
    gathers, edges = _table_gathers(region, context), region.edges
    with graph.inserting_before(node):
        if gathers:
            edges = global_edges(graph, node, *edges, gathers[0].args[2])
        operands = []
        for leaf in region.leaves:
            in_place = gathers and leaf.kind.startswith("src")
            operands += [leaf.operands[0].args[0]] if in_place else tensors(graph, node, leaf)
        made = emit(graph, node, _JOESTAR.segment.default, *edges, operands, str(program), region.heads)
        y = emit(graph, node, operator.getitem, made, 0)
        if context.autocast is None and y.meta["val"].dtype != node.meta["val"].dtype:
            y = emit(graph, node, _ATEN.to.dtype, y, node.meta["val"].dtype)
        if len(shape) > 2:
            y = emit(graph, node, _ATEN.unflatten.int, y, 1, [int(size) for size in shape[1:]])
        elif len(shape) == 1:
            y = emit(graph, node, _ATEN.squeeze.dim, y, 1)
    tables = dict.fromkeys(gather.args[0].name for gather in gathers)
    node.replace_all_uses_with(y)
    erase_unread(graph, node)
    for gather in gathers:
        _own_rows(graph, gather)
    return y, program, f" of {', '.join(tables)}" if tables else ""


def _table_gathers(region: Region, context) -> list[fx.Node]:
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


def _own_rows(graph: fx.Graph, gather: fx.Node) -> None:
    """The destinations' rows of a table that is read in place are gathered alone."""
    for part in list(gather.users):
        dsts = destinations(part, gather)
        if dsts is not None:
            with graph.inserting_before(part):
                own = emit(graph, part, _GATHER, gather.args[0], 0, dsts)
            part.replace_all_uses_with(own)
            erase_unread(graph, part)
