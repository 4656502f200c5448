"""Scatters and lookups by the ends of edges, as PyTorch Geometric writes them, become segment ops over a CSC structure.

Before (E edges, sorted by destination)                   After
    src, dst = indices.long(), edge_dst(indptr).long()        y = spmm(indptr, indices, x, None, "sum")
    m = aten.index_select(x, 0, src)
    i = aten.expand(aten.view(dst, [-1, 1]), [-1, F])
    y = aten.scatter_add(zeros, 0, i, m)

    k = aten.clamp(aten.scatter_add(zeros, 0, dst, ones), 1)  y = spmm(indptr, indices, x, None, "mean")
    y = aten.div(sum of m as above, k by columns)

    t = aten.scatter_reduce(zeros, 0, i, s, "amax", False)    a = edge_softmax(indptr, s)
    e = aten.exp(aten.sub(s, aten.index_select(t, 0, dst)))
    d = aten.add(aten.scatter_add(zeros, 0, i, e), 1e-16)
    a = aten.div(e, aten.index_select(d, 0, dst))

    z = aten.add(index_select(a, 0, src), index_select(b, 0, dst))    z = sddmm(indptr, indices, a, b, "add")

``index_add`` and ``scatter_reduce`` as well (sum, mean, amax, amin); weights per edge or head belong to the sum.
Segment ops skip padding by contract, read rows where they are, and are what the passes behind this one recognise.

Must not fire where the index is not certainly the destination of every edge in order, what is scattered into is not
zero, the values are no floating-point numbers or fewer than the edges, or extrema would start from what is there.
"""

import torch
from torch import fx

from joestar.fusion.clean import dce
from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape, same_size

PATTERN = "segments"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _SDDMM, _DST = _JOESTAR.spmm.default, _JOESTAR.sddmm.default, _JOESTAR.edge_dst.default
_CASTS = {_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.clone.default, _ATEN.contiguous.default, _ATEN.alias.default,
          _ATEN.detach.default}  # fmt: skip
_SHAPES = {_ATEN.view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default, _ATEN.expand.default,
           _ATEN.expand_as.default}  # fmt: skip
_ZEROS = {_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default}
_ONES = {_ATEN.ones.default, _ATEN.new_ones.default, _ATEN.ones_like.default}
_REDUCES = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}
_SCATTERS = {_ATEN.scatter_add.default, _ATEN.index_add.default, _ATEN.scatter_reduce.two}
_IDS = {torch.int32, torch.int64}
_BINARY = {_ATEN.add.Tensor: "add", _ATEN.sub.Tensor: "sub", _ATEN.mul.Tensor: "mul"}


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites everything that fits; returns how many."""
    _ends_apart(gm)
    made = 0
    for rewrite in (_scatter, _mean, _softmax, _product, _both_ends, _end):
        structures = _structures(gm)
        for node in list(gm.graph.nodes):
            made += bool(node.users) and rewrite(gm.graph, node, structures, context)
        dce.run(gm, context)
    return made


def _structures(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Sources of a structure's edges -> its ``edge_dst``."""
    return {node.args[2]: node for node in gm.graph.find_nodes(op="call_function", target=_DST)}


def _ends_apart(gm: fx.GraphModule) -> None:
    """``edge_index[0]`` of a pair that was put together in the graph is its first half."""
    for node in list(gm.graph.find_nodes(op="call_function", target=_ATEN.select.int)):
        stack = node.args[0]
        if stack.target is not _ATEN.stack.default or argument(stack, "dim") != 0 or argument(node, "dim") != 0:
            continue
        if isinstance(node.args[2], int):
            node.replace_all_uses_with(stack.args[0][node.args[2]])
            gm.graph.erase_node(node)


# --- what a node is ---


def _plain(node) -> fx.Node:
    """The value behind conversions between dtypes of ids and the like."""
    while isinstance(node, fx.Node) and node.target in _CASTS:
        if not {_val(node).dtype, _val(node.args[0]).dtype} <= _IDS:
            break
        node = node.args[0]
    return node


def _val(node: fx.Node):
    return node.meta["val"]


def _per_row(node: fx.Node) -> fx.Node:
    """The vector ``[E]`` of which a tensor ``[E, ...]`` repeats every entry along its other dimensions."""
    rows = _val(node).shape[0]
    while node.target in _SHAPES | _CASTS:
        before = _val(node.args[0])
        if before.dim() == 0 or not same_size(before.shape[0], rows):
            return node
        if any(not (same_size(size, 1) or before.dim() == _val(node).dim()) for size in before.shape[1:]):
            return node
        if node.target in (_ATEN.expand.default, _ATEN.expand_as.default) and before.dim() != _val(node).dim():
            return node  # what it repeats is not along its rows
        if _val(node).dtype != before.dtype and not {_val(node).dtype, before.dtype} <= _IDS:
            return node
        node = node.args[0]
    return node


def _destination(node: fx.Node) -> fx.Node | None:
    """The ``edge_dst`` of which an index, one entry per edge, is made."""
    found = _plain(_per_row(node)) if isinstance(node, fx.Node) and _val(node).dim() else None
    found = found and _plain(_per_row(found))
    return found if found is not None and found.target is _DST and _val(found).dim() == 1 else None


def _zero(node) -> bool:
    if node.target is _ATEN.full.default:
        return node.args[1] == 0
    return node.target in _ZEROS


def _lookup(node) -> tuple[fx.Node, fx.Node] | None:
    """(rows, index) of a lookup along the first dimension."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is _ATEN.index_select.default and node.args[1] % max(_val(node.args[0]).dim(), 1) == 0:
        return node.args[0], node.args[2]
    if node.target is _ATEN.index.Tensor and len(node.args[1]) == 1 and node.args[1][0] is not None:
        index = node.args[1][0]
        return (node.args[0], index) if _val(index).dim() == 1 and _val(index).dtype is not torch.bool else None
    return None


def _at(node, structures: dict) -> tuple[fx.Node, str, fx.Node] | None:
    """(rows, ``src`` or ``dst``, structure's ``edge_dst``) of floating-point rows looked up at an end of every edge."""
    found = _lookup(node)
    if found is None or not _val(found[0]).dtype.is_floating_point:
        return None
    index = _plain(found[1])
    if index.target is _DST:
        return found[0], "dst", index
    return (found[0], "src", structures[index]) if index in structures else None


def _order(graph: fx.Graph, like: fx.Node, dst: fx.Node) -> fx.Node:
    """Positions of the edges, int ``[E]``."""
    size = graph.call_function(_ATEN.sym_size.int, (dst, 0))
    size.meta = {"val": _val(dst).shape[0], "stack_trace": like.meta.get("stack_trace")}
    options = {"dtype": _val(dst).dtype, "device": _val(dst).device}
    return emit(graph, like, _ATEN.arange.default, size, **options)


def _is_order(node: fx.Node) -> bool:
    return node.target is _ATEN.arange.default


# --- rewrites ---


def _scatter(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """Scatters by destination."""
    if node.target not in _SCATTERS:
        return False
    match = _match_scatter(node)
    if not context.admits(PATTERN, node, match):
        return False
    dst, values, reduce = match
    indptr = dst.args[0]
    with graph.inserting_before(node):
        if reduce == "sum" and values.target in _ONES and _val(values).dim() == 1:
            new = _degrees(graph, node, indptr)
        else:
            new = emit(graph, node, _SPMM, indptr, _order(graph, node, dst), values, None, reduce)
    _swap(graph, node, new, context, reduce)
    return True


def _match_scatter(node: fx.Node):
    into, dim, index, values = node.args[:4]
    if _val(into).dim() == 0 or dim % _val(into).dim() != 0:
        return Reject("it scatters along another dimension than the first")
    dst = _destination(index)
    if dst is None:
        return Reject("the index is not the destination of every edge")
    if not _zero(into):
        return Reject("it adds to what is there")
    value = _val(values)
    if not value.dtype.is_floating_point or value.dtype != _val(into).dtype:
        return Reject("the values are no floating-point numbers")
    if node.target is _ATEN.index_add.default:
        if argument(node, "alpha") != 1:
            return Reject("it has a factor")
    elif not same_shape(_val(index).shape, value.shape):
        return Reject("index and values differ in shape")
    rows = _val(dst.args[0]).shape[0] - 1
    if not same_size(value.shape[0], _val(dst).shape[0]) or not same_shape(_val(node).shape, (rows, *value.shape[1:])):
        return Reject("it does not have a row per node")
    reduce = "sum"
    if node.target is _ATEN.scatter_reduce.two:
        reduce = _REDUCES.get(node.args[4])
        if reduce is None or (reduce != "sum" and argument(node, "include_self")):
            return Reject(f"the reduction is {node.args[4]}, or starts from what is there")
    return dst, values, reduce


def _degrees(graph: fx.Graph, node: fx.Node, indptr: fx.Node) -> fx.Node:
    end = emit(graph, node, _ATEN.slice.Tensor, indptr, 0, 1)
    start = emit(graph, node, _ATEN.slice.Tensor, indptr, 0, 0, -1)
    return emit(graph, node, _ATEN.to.dtype, emit(graph, node, _ATEN.sub.Tensor, end, start), _val(node).dtype)


def _degrees_of(node: fx.Node) -> fx.Node | None:
    """The ``indptr`` of which a node is the degrees, by ``_degrees``."""
    if node.target is not _ATEN.to.dtype or node.args[0].target is not _ATEN.sub.Tensor:
        return None
    ends = node.args[0].args[:2]
    if any(not isinstance(end, fx.Node) or end.target is not _ATEN.slice.Tensor for end in ends):
        return None
    (end, start), indptr = ends, ends[0].args[0]
    cut = [end.args[1:], start.args[1:]] == [(0, 1), (0, 0, -1)]
    return indptr if cut and start.args[0] is indptr and not _val(indptr).dtype.is_floating_point else None


def _mean(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """A sum by destination divided by how many there are, at least 1."""
    if node.target is not _ATEN.div.Tensor or not isinstance(node.args[1], fx.Node):
        return False
    total, count = node.args
    if total.target is not _SPMM or total.args[4] != "sum" or tensor(count) is None:
        return False  # a count of nodes is a number, as is its root
    if _val(count).dim() != _val(total).dim():
        return False
    if not same_size(_val(count).shape[0], _val(total).shape[0]):
        return False
    count = _per_row(count)
    if count.target not in (_ATEN.clamp.default, _ATEN.clamp_min.default) or count.args[1:] != (1,) or count.kwargs:
        return False
    if _val(node).dtype != _val(total).dtype:
        return False  # the count is wider
    if _degrees_of(count.args[0]) is not total.args[0] or not same_shape(_val(node).shape, _val(total).shape):
        return False
    if not context.admits(PATTERN, node, True):
        return False
    with graph.inserting_before(node):
        new = emit(graph, node, _SPMM, *total.args[:4], "mean")
    _swap(graph, node, new, context, "mean")
    return True


def _softmax(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """Exponentials of what is left of the largest, divided by their sum, per destination."""
    if node.target is not _ATEN.div.Tensor:
        return False
    match = _match_softmax(*node.args[:2], structures)
    if match is None or not context.admits(PATTERN, node, match):
        return False
    indptr, scores = match
    with graph.inserting_before(node):
        new = emit(graph, node, _JOESTAR.edge_softmax.default, indptr, scores)
    _swap(graph, node, new, context, "softmax")
    return True


def _match_softmax(power, total, structures: dict) -> tuple[fx.Node, fx.Node] | None:
    below = _at(total, structures)
    if below is None or below[1] != "dst" or getattr(power, "target", None) is not _ATEN.exp.default:
        return None
    added, _, dst = below
    if added.target is _ATEN.add.Tensor and isinstance(added.args[1], float) and 0 <= added.args[1] <= 1e-12:
        added = added.args[0]
    difference = power.args[0]
    if not _segment(added, dst, power, "sum") or difference.target is not _ATEN.sub.Tensor or difference.kwargs:
        return None
    scores, top = difference.args
    top = _at(top, structures)
    if top is None or top[1:] != ("dst", dst) or _val(scores).dim() not in (1, 2):
        return None
    largest = top[0].args[0] if top[0].target is _ATEN.detach.default else top[0]
    detached = isinstance(largest, fx.Node) and largest.target is _SPMM and largest.args[2]
    of = detached.args[0] if isinstance(detached, fx.Node) and detached.target is _ATEN.detach.default else detached
    if of is not scores or not _segment(largest, dst, detached, "max"):
        return None
    return dst.args[0], scores


def _segment(node: fx.Node, dst: fx.Node, values: fx.Node, reduce: str) -> bool:
    """Whether a node reduces these values per destination."""
    if node.target is not _SPMM or node.args[0] is not dst.args[0] or node.args[3] is not None:
        return False
    return _is_order(node.args[1]) and node.args[2] is values and node.args[4] == reduce


def _product(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """Reductions of rows at the sources, or of these times a weight per edge or head."""
    if node.target is not _SPMM or not _is_order(node.args[1]) or node.args[3] is not None:
        return False
    indptr, _, values, _, reduce = node.args
    found, weight = _at(values, structures), None
    if found is None and values.target is _ATEN.mul.Tensor and reduce in ("sum", "mean"):
        for rows, factor in (values.args, values.args[::-1]):
            if isinstance(factor, fx.Node) and isinstance(rows, fx.Node):
                found, weight = _at(rows, structures), _weight(factor, rows)
                if found is not None and weight is not None and found[1] == "src":
                    break
                found = None
    if found is None or found[1] != "src" or found[2].args[0] is not indptr:
        return False
    if not same_shape(_val(values).shape[1:], _val(found[0]).shape[1:]) or not context.admits(PATTERN, node, True):
        return False
    with graph.inserting_before(node):
        new = emit(graph, node, _SPMM, indptr, found[2].args[2], found[0], weight, reduce)
    _swap(graph, node, new, context, f"{reduce} of {'weighted ' if weight is not None else ''}rows")
    return True


def _weight(factor: fx.Node, rows: fx.Node) -> fx.Node | None:
    """The weight ``[E]`` or ``[E, H]`` that a factor of rows ``[E, ...]`` or ``[E, H, ...]`` is; of their dtype."""
    value, of = _val(factor), _val(rows)
    if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor):  # a size
        return None
    if value.dtype != of.dtype or not 0 < value.dim() <= of.dim() or not same_size(value.shape[0], of.shape[0]):
        return None
    if value.dim() != of.dim() or value.dim() == 1:
        return factor if value.dim() == of.dim() == 1 else None
    while factor.target in (_ATEN.view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default):
        before = _val(factor.args[0])
        heads = of.dim() == 3 and before.dim() == 2 and same_size(before.shape[1], of.shape[1])
        shape = _val(factor).shape
        if before.dim() == 1 and all(same_size(size, 1) for size in shape[1:]) and same_size(before.shape[0], shape[0]):
            return factor.args[0]
        if heads and same_size(shape[1], of.shape[1]) and same_size(shape[2], 1):
            return factor.args[0]
        factor = factor.args[0]
        if not same_shape(_val(factor).shape, shape):
            return None
    return None


def _both_ends(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """A sum, difference or product of a row at either end."""
    if node.target not in _BINARY or node.kwargs or len(node.args) != 2:
        return False
    left, right = (_at(arg, structures) for arg in node.args)
    if left is None or right is None or left[2] is not right[2] or {left[1], right[1]} != {"src", "dst"}:
        return False
    if not same_shape(_val(left[0]).shape[1:], _val(right[0]).shape[1:]) or _val(left[0]).dtype != _val(right[0]).dtype:
        return False
    if not context.admits(PATTERN, node, True):
        return False
    swapped = left[1] == "dst"
    (source, *_), (destination, *_) = (right, left) if swapped else (left, right)
    indptr, _, indices = left[2].args
    with graph.inserting_before(node):
        new = emit(graph, node, _SDDMM, indptr, indices, source, destination, _BINARY[node.target])
        if swapped and node.target is _ATEN.sub.Tensor:
            new = emit(graph, node, _ATEN.neg.default, new)
    _swap(graph, node, new, context, f"{_BINARY[node.target]} of both ends")
    return True


def _end(graph: fx.Graph, node: fx.Node, structures: dict, context) -> bool:
    """Rows at an end of every edge, for whoever still reads them."""
    found = _at(node, structures)
    if found is None or not context.admits(PATTERN, node, True):
        return False
    rows, end, dst = found
    ends = (rows, None, "copy_lhs") if end == "src" else (None, rows, "copy_rhs")
    with graph.inserting_before(node):
        new = emit(graph, node, _SDDMM, dst.args[0], dst.args[2], *ends)
    _swap(graph, node, new, context, f"rows of {'sources' if end == 'src' else 'destinations'}")
    return True


def _swap(graph: fx.Graph, node: fx.Node, new: fx.Node, context, what: str) -> None:
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    context.fired(PATTERN, new, what)
