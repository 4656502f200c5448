"""What disappears when a program is seen over the whole graph: a value in place of a call, or ``None`` for the call.

Every function takes the builder of values, the node of the captured graph and its translated arguments.
"""

import operator

import torch
from torch import fx

from joestar.errors import CaptureError
from joestar.lowering.origin import node_line

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def _getitem(builder, node: fx.Node, args):
    if isinstance(args[0], tuple):
        return args[0][args[1]]
    return None


def _slice_cols(builder, node: fx.Node, args):
    _expect(builder, node, args[:3] == (builder.indptr, builder.indices, builder.node_ids))
    return builder.indptr, builder.edge_sources, builder.const(_number(builder, builder.graph.num_edges))


def _compact(builder, node: fx.Node, args):
    fits = (args[0], *args[2:4]) == (builder.node_ids, builder.indptr, builder.edge_sources)
    _expect(builder, node, fits)
    return builder.node_ids, builder.edge_sources, builder.const(_number(builder, builder.graph.num_nodes))


def _number(builder, value: int) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int64, device=builder.graph.device)


def _expect(builder, node: fx.Node, holds: bool) -> None:
    if not holds:
        raise CaptureError(f"{node.target} at {node_line(node)}: a model may not sample while it is evaluated.")


def _sample_eids(builder, node: fx.Node, args):
    _expect(builder, node, args[:2] == (builder.indptr, builder.node_ids) and args[3] == -1)
    if builder.edge_ids is None:
        builder.edge_ids = builder.ids(builder.graph.num_edges, torch.int64, builder.graph_edges)
    return builder.edge_ids


def _index_select(builder, node: fx.Node, args):
    """All rows, in order; or the ids of nodes that are given by their ids."""
    table, dim, ids = args
    if dim != 0:
        return None
    if table is builder.node_ids and ids.meta.dtype == table.meta.dtype:
        return ids
    rows = {id(builder.node_ids): builder.graph.num_nodes, id(builder.edge_ids): builder.graph.num_edges}.get(id(ids))
    if rows is None:
        return None
    if table.space is ids.space:
        return table
    return builder.rows(table, ids.space) if table.fixed and int(table.meta.shape[0]) == rows else None


def _slice(builder, node: fx.Node, args):
    """``x[:num_dst]``: destinations are all sources."""
    rows, result = args[0], node.meta["val"]
    dim = args[1] if len(args) > 1 else 0
    start = args[2] if len(args) > 2 else None
    step = args[4] if len(args) > 4 else 1
    leading = dim == 0 and not start and step == 1 and rows.space is not None
    return rows if leading and builder.leading([builder.size(s) for s in result.shape]) is rows.space else None


def _where(builder, node: fx.Node, args):
    """``where(a == b, b, a)`` of ids is ``a``: a block of all nodes has the graph's self-loops."""
    test, one, other = args
    compared = test.target is _ATEN.eq.Tensor and set(map(id, test.args)) == {id(one), id(other)}
    return other if compared and not one.meta.dtype.is_floating_point and one.meta.dtype == other.meta.dtype else None


def _add_self_loops(builder, node: fx.Node, args):
    whole = builder.made(node.target, args, {}, node.meta["val"])
    whole.space = None
    parts = []
    for position in range(2):
        meta = node.meta["val"][position]
        part = builder.made(operator.getitem, (whole, position), {}, meta)
        part.space = None
        parts.append(part)
    indptr, indices = builder.structure(*parts)
    size = builder.size(indices.meta.shape[0])
    return indptr, builder.rows(indices, builder.spaces[size]) if size not in builder.apart else indices


def _attend_own(builder, node: fx.Node, args):
    """Scores of their own, then ``attend``: sources and destinations of a range of rows are different ones."""
    indptr, indices, x, v_src, v_dst, slope, bits, scale, *s_edge = args
    meta, vector = x.meta, v_src.meta
    scores = meta.new_empty((meta.shape[0], vector.shape[0]))
    dtype = meta.dtype
    vectors = [
        builder.made(_ATEN._to_copy.default, (v,), {"dtype": dtype}, v.meta.new_empty(v.meta.shape, dtype=dtype))
        for v in (v_src, v_dst)
    ]
    s_src, s_dst = (builder.made(_ATEN.linear.default, (x, v), {}, scores) for v in vectors)
    shared = builder.made(_ATEN.unsqueeze.default, (x, 1), {}, meta.new_empty((meta.shape[0], 1, *meta.shape[1:])))
    y, _, _, top, total = node.meta["val"]
    call = (indptr, indices, s_src, s_dst, shared, slope, bits, scale, *s_edge)
    attended = builder.made(_JOESTAR.attend.default, call, {}, (y, top, total))
    parts = [builder.made(operator.getitem, (attended, i), {}, part) for i, part in enumerate((y, top, total))]
    return parts[0], s_src, s_dst, *parts[1:]


SHORTCUTS = {
    operator.getitem: _getitem,
    _JOESTAR.slice_cols.default: _slice_cols,
    _JOESTAR.compact.default: _compact,
    _JOESTAR.sample_eids.default: _sample_eids,
    _JOESTAR.add_self_loops.default: _add_self_loops,
    _JOESTAR.attend_own.default: _attend_own,
    _ATEN.index_select.default: _index_select,
    _ATEN.slice.Tensor: _slice,
    _ATEN.where.self: _where,
}
