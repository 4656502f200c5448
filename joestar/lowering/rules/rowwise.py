"""Ops that treat every row on its own, and the conditions under which they do."""

import torch
from torch import Tensor, fx

from joestar.lowering.rules.arguments import argument, padded_among
from joestar.lowering.sizes import LOOPED, RAGGED, expression, padded_dims

aten = torch.ops.aten

SINGULAR = {
    **dict.fromkeys(("div", "divide", "true_divide", "floor_divide", "remainder", "fmod", "xlogy", "atan2"), (1, 1)),
    **dict.fromkeys(("special_xlogy", "special_xlog1py", "hypot", "arctan2"), (1, 1)),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "float_power"), (0, 1)),
    **dict.fromkeys(("digamma", "lgamma", "special_entr", "special_digamma", "special_gammaln"), (0, 1)),
    **dict.fromkeys(("acos", "asin", "atanh", "arccos", "arcsin", "arctanh", "erfinv", "special_erfinv"), (0, 0)),
    **dict.fromkeys(("acosh", "arccosh"), (0, 2)),
    **dict.fromkeys(("logit", "special_logit"), (0, 0.5)),
    "addcdiv": (2, 1),
}
"""Pointwise ops that can turn a finite input into NaN or infinity (in value or gradient): the operand that does it, and
a value at which it does not."""


def safe(context, node: fx.Node) -> None:
    """Nothing to do."""


def pointwise(context, node: fx.Node) -> None:
    """Safe, but padded rows of a dangerous operand are made harmless first: a masked NaN would still poison gradients.

    The row ``0`` of ``x / x.norm()`` is the example: 0 / 0 in a padded row, times a zero gradient, is NaN.
    """
    index, value = SINGULAR.get(node.target._schema.name.partition("::")[2], (None, None))
    if index is None or index >= len(node.args) or not isinstance(node.args[index], fx.Node) or _smooth_power(node):
        return
    operand = node.args[index]
    found = operand.meta.get("val")
    if isinstance(found, Tensor) and found.dtype is not torch.bool and any(map(context.known, _padded(found))):
        node.update_arg(index, context.guard(operand, value if found.dtype.is_floating_point else int(value), node))
        context.note("guard")


def _padded(value: Tensor) -> list:
    return list(padded_dims(value).values())


def _smooth_power(node: fx.Node) -> bool:
    """Whether the node is ``x ** p`` with a constant ``p`` of at least 1, or 0."""
    exponent = node.args[1] if "pow" in node.target._schema.name and len(node.args) > 1 else None
    return isinstance(exponent, (int, float)) and (exponent >= 1 or exponent == 0)


def columns_only(context, node: fx.Node) -> None:
    """Safe unless the op works along a padded dimension."""
    if padded_among(node):
        raise context.refuse(
            node, "works along a dimension of padded rows", "Keep nodes and edges in a dimension of their own."
        )


def _similarity(context, node: fx.Node) -> None:
    if node.args[0].meta["val"].dim() != node.args[1].meta["val"].dim():
        raise context.refuse(node, "compares tensors of different rank", "Unsqueeze one of them.")
    columns_only(context, node)


def last_dimension(context, node: fx.Node) -> None:
    """Safe unless the last dimension of an operand is padded: the op sums over it."""
    for operand in node.args[:2]:
        if expression(operand.meta["val"].shape[-1]) is not None:
            raise context.refuse(node, "sums over padded rows in its last dimension", "Keep nodes in dimension 0.")


def batch_only(rank: int):
    """A rule: safe if nothing but the first dimension of a tensor of at least ``rank`` dimensions is padded."""

    def rule(context, node: fx.Node) -> None:
        value = node.args[0].meta["val"]
        if value.dim() < rank or padded_dims(value).keys() - {0}:
            shape = tuple(value.shape)
            raise context.refuse(node, f"works across padded rows (shape {shape})", "Nodes must be dimension 0.")

    return rule


def _normalised_shape(context, node: fx.Node) -> None:
    value = node.args[0].meta["val"]
    if any(dim >= value.dim() - len(node.args[1]) for dim in padded_dims(value)):
        raise context.refuse(
            node, "normalises over padded rows",
            "Normalise columns only, or write (x - x.mean(dims)) / x.std(dims) over nodes.",
        )  # fmt: skip


def _attention(context, node: fx.Node) -> None:
    for operand in node.args[:3]:
        value = operand.meta["val"]
        if any(dim >= value.dim() - 2 for dim in padded_dims(value)):
            raise context.refuse(node, "attends to padded rows", "Write softmax(q @ k.T) @ v, whose padding is known.")


def _recurrence(context, node: fx.Node) -> None:
    value, batch_first = node.args[0].meta["val"], node.args[-1]
    if expression(value.shape[1 if batch_first else 0]) is not None:
        raise context.refuse(node, "runs a recurrence over padded rows", "Use batch_first=True with rows as batch.")


# --- lookups ---


_STRUCTURE = {
    *LOOPED, torch.ops.joestar.edge_dst.default, torch.ops.joestar.sample_eids.default,
    torch.ops.joestar.collective_sample.default,
}  # fmt: skip


def _in_range(index: fx.Node) -> bool:
    """Whether padded entries of an index are certainly valid: ids from sampling, ends of rows of an indptr."""
    if index.op == "placeholder":
        return True
    target = index.target
    if isinstance(target, torch._ops.OpOverload):
        if target in RAGGED or target in _STRUCTURE:
            return True
        if target._schema.name in ("aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous"):
            return _in_range(index.args[0])
        return target is aten.add.Tensor and index.args[1] == 1 and _in_range(index.args[0])
    return index.op == "call_function" and isinstance(index.args[0], fx.Node) and _in_range(index.args[0])


def _valid_index(context, node: fx.Node, index: fx.Node) -> fx.Node:
    """An index whose padded entries are 0 unless they are known to be in range: ``degree - 1`` is -1 there."""
    value = index.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype is torch.bool or not padded_dims(value) or _in_range(index):
        return index
    context.note("guard")
    return context.guard(index, 0, node)


def _lookup(position: int):
    """A rule for reads at the index ``args[position]`` (a tensor, or a list of tensors)."""

    def rule(context, node: fx.Node) -> None:
        index = node.args[position]
        if isinstance(index, (list, tuple)):
            index = [i if i is None else _valid_index(context, node, i) for i in index]
        else:
            index = _valid_index(context, node, index)
        node.update_arg(position, index)

    return rule


def _index(context, node: fx.Node) -> None:
    """``x[i, j]``: as other reads; an index below 0 counts from the last valid row, not from the last row."""
    source, given = node.args[0].meta["val"], node.args[1]
    _lookup(1)(context, node)
    indices = list(node.args[1])
    for dim, index in enumerate(indices):
        size = expression(source.shape[dim])
        if index is None or size is None or _in_range(given[dim]):
            continue
        count = context.entries(size, node)
        from_end = context.call(aten.add.Tensor, index, count, like=index)
        negative = context.call(aten.lt.Scalar, index, 0)
        indices[dim] = context.call(aten.where.self, negative, from_end, index, like=index)
    node.update_arg(1, indices)


def _embedding(context, node: fx.Node) -> None:
    if argument(node, "scale_grad_by_freq") and padded_dims(node.args[1].meta["val"]):
        raise context.refuse(node, "scales gradients by counts of padded rows", "Use scale_grad_by_freq=False.")
    _lookup(1)(context, node)


def _scatter_sum(context, node: fx.Node) -> None:
    """Additive scatters ``(self, dim, index, source)``: padded entries of the source are set to 0."""
    source = node.args[3]
    for dim in padded_dims(source.meta["val"]):
        source = context.mask(source, dim, 0, node)
    node.update_arg(3, source)
    _lookup(2)(context, node)


def _bounded_search(position: int):
    """A rule for lookups of values among sorted ones, ``args[position]``, which may not be padded."""

    def rule(context, node: fx.Node) -> None:
        if padded_dims(node.args[position].meta["val"]):
            raise context.refuse(node, "searches among padded rows", "Search among constants.")

    return rule


_SAFE = (
    "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes",
    "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "type_as",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "zeros",
    "ones", "full", "empty", "eye", "tril", "triu", "outer", "ger", "sym_size", "cumsum", "view_as_real",
    "float", "double", "half", "bfloat16", "bool", "int", "long", "scalar_tensor", "expand_copy",
    "broadcast_tensors", "broadcast_to", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip

RULES = {
    **dict.fromkeys(_SAFE, safe),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), _normalised_shape),
    **dict.fromkeys(("cdist", "bilinear", "pairwise_distance"), last_dimension),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrence),
    **dict.fromkeys(("index_select", "gather"), _lookup(2)),
    "take_along_dim": _lookup(1),
    **dict.fromkeys(("index_add", "scatter_add"), _scatter_sum),
    "cosine_similarity": _similarity,
    "index": _index,
    "one_hot": _lookup(0),
    "embedding": _embedding,
    "group_norm": batch_only(2),
    "conv1d": batch_only(3),
    "conv2d": batch_only(4),
    "scaled_dot_product_attention": _attention,
    "bucketize": _bounded_search(1),
    "searchsorted": _bounded_search(0),
}
