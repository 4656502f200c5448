"""Reads at computed positions: padded entries of an index must be in range, and what they read finite."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from joestar.lowering.rules.arguments import argument
from joestar.lowering.rules.pointwise import pointwise
from joestar.lowering.sizes import RAGGED, expression, item, padded_dims, same_size
from joestar.ops.dense.gather_linear import NO_ROW
from joestar.ops.registry import OPS
from joestar.torch_private import OpOverload

aten, _JOESTAR = torch.ops.aten, torch.ops.joestar


_IDS = {op.target for op in OPS.values() if op.padded_ids}
"""Ops that give ids, which are in range in padded entries, too."""


def _in_range(index: fx.Node) -> bool:
    """Whether padded entries of an index are certainly valid: ids from sampling, ends of rows of an indptr."""
    if index.op == "placeholder":
        return True
    target = index.target
    if isinstance(target, OpOverload):
        if target in _IDS:
            return True
        if target._schema.name in ("aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous"):
            return _in_range(index.args[0])
        return target is aten.add.Tensor and index.args[1] == 1 and not index.kwargs and _in_range(index.args[0])
    return index.op == "call_function" and isinstance(index.args[0], fx.Node) and _in_range(index.args[0])


def _valid_index(context, node: fx.Node, index: fx.Node) -> fx.Node:
    """An index whose padded entries are 0 unless they are known to be in range: ``degree - 1`` is -1 there."""
    if not _out_of_range(index):
        return index
    context.note("guard")
    return context.guard(index, 0, node)


_NOWHERE = 2**31 - 1
"""A position that no table has: whoever reads there raises."""


def nowhere_if_beyond(context, node: fx.Node, index: fx.Node, size, padded: bool = True) -> fx.Node:
    """An index into rows of a set of this ``size``; what is behind the last valid row is out of range for PyTorch, too.

    Args:
        padded: whether padded entries of the index are set to 0.
    """
    value = index.meta.get("val") if isinstance(index, fx.Node) else None
    whole = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
    known = size is not None and context.known(size) and context.table.with_loops(size) is None
    if whole and known and not _in_range(index):
        beyond = context.call(aten.ge.Tensor, index, context.entries(size, node), like=index)
        index = context.call(aten.where.ScalarSelf, beyond, _NOWHERE, index, like=index)
    return _valid_index(context, node, index) if padded else index


_ANYWHERE = {op.target for op in OPS.values() if op.padded_ids == "graph"}
"""Ops whose padded ids are in range, but of an edge or node that need not be in the batch: it may hold anything."""


_BATCH = {op.target for op in OPS.values() if op.padded_ids == "batch"} | RAGGED.keys()
_MERGED = _JOESTAR.merge_hops.default


def _of_strangers(index: fx.Node) -> bool:
    """Whether padded entries of an index are, or are computed from, ids of no node or edge of the batch."""
    seen, waiting = set(), [index]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in _ANYWHERE:
            return True
        if node.target is _MERGED:  # ids of the hops, side by side
            waiting += node.args[1]
        elif node.target not in _BATCH:
            waiting += node.all_input_nodes
    return False


def _reads_strangers(node: fx.Node, indices: list[fx.Node]) -> bool:
    """Whether padded slots hold numbers that belong to no node or edge of the batch, NaN perhaps.

    They do as well where padded entries of an index are not in range, and so are set to 0.
    """
    table, value = (
        given[0] if isinstance(given, (list, tuple)) else given for given in (node.args[0], node.meta["val"])
    )
    holds_nan = value.dtype.is_floating_point or value.dtype.is_complex
    if not holds_nan or padded_dims(table.meta.get("val")):
        return False
    return any(_of_strangers(index) or _out_of_range(index) for index in indices)


def _out_of_range(index: fx.Node) -> bool:
    """Whether padded entries of an index may be no rows."""
    value = index.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.dtype is not torch.bool
        and bool(padded_dims(value))
        and not _in_range(index)
    )


def _products(context, node: fx.Node) -> None:
    """Products of rows that are read in place, which would bring strangers' into the gradient of the weight.

    A result of zeros would not do: 0 times NaN is NaN. Padded entries of such ids are ``NO_ROW``, rows of zeros.
    """
    ids = node.args[1]
    if padded_dims(ids.meta["val"]) and (_of_strangers(ids) or _out_of_range(ids)):
        node.update_arg(1, context.guard(ids, NO_ROW, node))
        context.note("guard")


def _lookup(position: int, along: Callable[[fx.Node], int] | None = None):
    """A rule for reads at the index ``args[position]`` (a tensor, or a list of tensors).

    Args:
        along: node -> the dimension of the table ``args[0]`` that is read along.
    """

    def rule(context, node: fx.Node) -> None:
        given = node.args[position]
        several = isinstance(given, (list, tuple))
        if several:
            index = [i if i is None else _valid_index(context, node, i) for i in given]
        else:
            size = None if along is None else expression(node.args[0].meta["val"].shape[along(node)])
            index = nowhere_if_beyond(context, node, given, size)
        parts = [i for i in (given if several else [given]) if isinstance(i, fx.Node)]
        if _reads_strangers(node, parts):
            context.guard_result(node, 0)
        node.update_arg(position, index)

    return rule


def _dim(node: fx.Node) -> int:
    return node.args[1]


def _index(context, node: fx.Node) -> None:
    """``x[i, j]``: as other reads; an index below 0 counts from the last valid row, not from the last row."""
    source, given = node.args[0].meta["val"], node.args[1]
    sizes = [expression(size) for size in source.shape]
    beyond = [i if i is None else nowhere_if_beyond(context, node, i, sizes[dim], False) for dim, i in enumerate(given)]
    node.update_arg(1, beyond)
    _lookup(1)(context, node)
    indices = list(node.args[1])
    for dim, index in enumerate(indices):
        size = sizes[dim]
        if index is None or size is None or not context.concerns(size) or _in_range(given[dim]):
            continue
        count = context.entries(size, node)
        from_end = context.call(aten.add.Tensor, index, count, like=index)
        before = context.call(aten.lt.Scalar, from_end, 0)  # the first one, which PyTorch does not have
        from_end = context.call(aten.where.ScalarSelf, before, _NOWHERE, from_end, like=index)
        negative = context.call(aten.lt.Scalar, index, 0)
        indices[dim] = context.call(aten.where.self, negative, from_end, index, like=index)
    node.update_arg(1, indices)


def _embedding(context, node: fx.Node) -> None:
    padded = padded_dims(node.args[1].meta["val"])
    if argument(node, "scale_grad_by_freq") and padded:
        raise context.refuse(node, "scales gradients by counts of padded rows", "Use scale_grad_by_freq=False.")
    _lookup(1, lambda node: 0)(context, node)
    if argument(node, "sparse") and padded:
        _rows_of_batch(context, node, padded)


def _rows_of_batch(context, node: fx.Node, padded: dict) -> None:
    """Sparse gradients have the rows that were read, and optimizers move these: padded entries read the first one.

    A batch that reads none runs exactly.
    """
    if padded.keys() != {0}:
        raise context.refuse(node, "has sparse=True and padded columns", "Use sparse=False.")
    context.want_rows(padded[0], node)
    count = context.entries(padded[0], node)
    node.update_arg(1, context.call(_JOESTAR.like_first.default, node.args[1], count, like=node.args[1]))
    context.note("guard")


def _of_one_size(ids: fx.Node, offsets: fx.Node) -> bool:
    """Whether bags have as many ids each, as those of ids ``[bags, ids of each]``: padded ids are in padded bags."""
    if getattr(offsets.target, "overloadpacket", None) is not aten.arange:
        return False
    given = (argument(offsets, name) for name in ("start", "end", "step"))
    first, end, step = (arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in given)
    return not first and expression(step) is None and same_size(end, ids.meta["val"].shape[0])


def _bags(context, node: fx.Node) -> None:
    """``embedding_bag``: bags of padded rows are behind all others, and read row 0."""
    ids, offsets = node.args[1:3]
    padded = padded_dims(ids.meta["val"])
    if argument(node, "scale_grad_by_freq"):
        raise context.refuse(node, "scales gradients by counts of padded rows", "Use scale_grad_by_freq=False.")
    if argument(node, "sparse") and padded:
        raise context.refuse(
            node, "has sparse=True, whose gradient would have a row that padded bags read",
            "Use sparse=False, or compile with execution='exact'.",
        )  # fmt: skip
    if (padded or padded_dims(offsets.meta["val"])) and not _of_one_size(ids, offsets):
        raise context.refuse(
            node, "has bags that its offsets cut: the last one would have the ids of padded rows",
            "Use ids of two dimensions, [bags, ids of each], or a sum over edges: "
            "block.pull(fn.copy_e(torch.nn.functional.embedding(ids, weight)), 'sum').",
        )  # fmt: skip
    if _reads_strangers(node, [ids]):
        context.guard_result(item(context.gm, node, 0), 0)
    size = expression(node.args[0].meta["val"].shape[0])
    node.update_arg(1, nowhere_if_beyond(context, node, ids, size))


def _whole_source(context, node: fx.Node, index: Tensor, source: Tensor) -> None:
    """PyTorch lets a scatter's index have fewer rows than its source: padding would be between those that count."""
    if index.dim() != source.dim():  # of ``index_add``, which is as long as the source
        return
    padded = padded_dims(index).keys() | padded_dims(source).keys()
    if not all(same_size(index.shape[dim], source.shape[dim]) for dim in padded):
        raise context.refuse(
            node, "has an index of other rows than its source", "Cut the source: source[: index.shape[0]]."
        )


def _scatter_sum(context, node: fx.Node) -> None:
    """Additive scatters ``(self, dim, index, source)``: padded entries of the source are set to 0."""
    source = node.args[3]
    _whole_source(context, node, node.args[2].meta["val"], source.meta["val"])
    for dim in padded_dims(source.meta["val"]):
        source = context.mask(source, dim, 0, node)
    node.update_arg(3, source)
    _lookup(2, _dim)(context, node)


def _index_copy(context, node: fx.Node) -> None:
    """``(self, dim, index, source)`` along columns: every row on its own. Along rows, padding would write to row 0."""
    into, index, source = (node.args[place].meta["val"] for place in (0, 2, 3))
    if node.args[1] % max(into.dim(), 1) in padded_dims(into) or padded_dims(index):
        raise context.refuse(
            node,
            "writes rows at computed positions",
            "Use torch.where on whole tensors, or index_add.",
        )
    if padded_dims(source) != padded_dims(into):
        raise context.refuse(node, "copies rows of one set into those of another", _SCATTERED)


def _scatter_columns(context, node: fx.Node) -> None:
    """``(self, dim, index, ...)`` along columns: every row on its own, where all have the same rows."""
    into = node.args[0].meta["val"]
    among = [arg.meta["val"] for arg in node.args[2:4] if isinstance(arg, fx.Node)]
    dim = node.args[1] % max(into.dim(), 1)
    if any(dim in padded_dims(value) for value in (into, *among)):
        raise context.refuse(node, "scatters along padded rows", _SCATTERED)
    if any(padded_dims(value) != padded_dims(into) for value in among if value.dim()):
        raise context.refuse(node, "scatters rows of one set into those of another", _SCATTERED)
    _lookup(2)(context, node)


_SCATTERED = "Scatter columns (dim=1) of rows of the same set, or use index_add or scatter_reduce along dimension 0."


def _scatter_reduce(context, node: fx.Node) -> None:
    """``(self, dim, index, source, reduce)``: padded entries of the source go to a row of their own, and that away."""
    into, dim, index, source = (arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:4])
    _whole_source(context, node, index, source)
    padded = padded_dims(source)
    dim = dim % max(into.dim(), 1)
    if padded and dim not in padded and node.args[4] != "prod":
        _scatter_columns(context, node)
        return
    if padded.keys() - {dim}:
        raise context.refuse(node, "scatters along columns of padded rows", "Scatter along the first dimension.")
    _lookup(2, _dim)(context, node)
    if not padded:
        return
    count = context.entries(padded[dim], node)
    args = (node.args[0], dim, *node.args[2:5], argument(node, "include_self"), count)
    node.target, node.args, node.kwargs = _JOESTAR.scatter_valid.default, args, {}  # a buffer may be this node
    if padded_dims(into):  # which nothing was added to: they may be of minus infinities, as a maximum begins
        context.guard_result(node, 0)


def _bounded_search(position: int):
    """A rule for lookups of values among sorted ones, ``args[position]``, which may not be padded."""

    def rule(context, node: fx.Node) -> None:
        if padded_dims(node.args[position].meta["val"]):
            raise context.refuse(node, "searches among padded rows", "Search among constants.")

    return rule


def _picked(context, node: fx.Node) -> None:
    """A mask picks no padded entry."""
    if padded_dims(node.args[0].meta["val"]):
        node.update_arg(0, context.guard(node.args[0], False, node))
        context.note("masked index")


def _assigned(context, node: fx.Node) -> None:
    """``x[mask] = value``, one value, or row, for all that are picked: a choice among entries, of its own for each."""
    into, given, values = node.args[0].meta["val"], list(node.args[1]), node.args[2].meta["val"]
    mask = given[0].meta["val"] if len(given) == 1 and isinstance(given[0], fx.Node) else None
    if not padded_dims(into) and not any(isinstance(i, fx.Node) and padded_dims(i.meta["val"]) for i in given):
        return
    row = 0 if mask is None else into.dim() - mask.dim()
    alike = all(same_size(n, 1) for n in values.shape[: values.dim() - row])
    if mask is None or mask.dtype is not torch.bool or not alike:
        raise context.refuse(
            node, "writes rows at computed positions, or a row of its own to each",
            "Use torch.where on whole tensors, or index_add.",
        )  # fmt: skip
    value = node.args[2]
    if argument(node, "accumulate"):
        value = context.call(aten.add.Tensor, node.args[0], value, like=node.args[0])
    elif values.dim() > row:
        value = context.call(aten.view.default, value, list(values.shape[values.dim() - row :]))
        value.meta["val"] = values.new_empty(values.shape[values.dim() - row :])
    picked = given[0]
    for _ in range(row):
        like, picked = picked.meta["val"], context.call(aten.unsqueeze.default, picked, -1)
        picked.meta["val"] = like.unsqueeze(-1)
    args = picked, value, node.args[0]
    node.target, node.args, node.kwargs = aten.where.self, args, {}  # a buffer may be this node
    pointwise(context, node)


RULES = {
    **dict.fromkeys(("index_select", "gather"), _lookup(2, _dim)),
    **dict.fromkeys(("gather_linear", "gather_linears"), _products),
    "gather_rows": _lookup(3),
    "gather_shards": _lookup(5),
    "take_along_dim": _lookup(1, lambda node: argument(node, "dim")),
    **dict.fromkeys(("index_add", "scatter_add"), _scatter_sum),
    "scatter_reduce": _scatter_reduce,
    "scatter": _scatter_columns,
    "index_copy": _index_copy,
    "index": _index,
    "index_put": _assigned,
    "one_hot": _lookup(0),
    "first_where": _picked,
    "embedding": _embedding,
    "embedding_bag": _bags,
    "bucketize": _bounded_search(1),
    "searchsorted": _bounded_search(0),
}
