"""Ops that treat every row on its own, and the conditions under which they do."""

import torch
from torch import fx

from joestar.lowering.rules.arguments import argument, dims, padded_among
from joestar.lowering.rules.pointwise import filled, guard_operand, guard_product
from joestar.lowering.sizes import expression, padded_dims


def safe(context, node: fx.Node) -> None:
    """Nothing to do."""


def only_valid(context, node: fx.Node) -> None:
    """Padded entries of the result are 0."""
    for expr in padded_dims(node.meta["val"]).values():
        context.entries(expr, node)  # an error where it is not known which entries are padding
    context.guard_result(node, 0)


def expected(context, node: fx.Node) -> None:
    """Nothing is asked of padded entries."""
    guard_operand(context, node, 1, 0)


def tamed(values: dict[int, float], rule=safe):
    """A rule: as ``rule``, and the padding of operands that might be large becomes a harmless value first.

    Args:
        values: position of an operand -> a value at which the op and its derivative are finite.
    """

    def tamed_rule(context, node: fx.Node) -> None:
        rule(context, node)
        for index, value in values.items():
            guard_operand(context, node, index, value, always=False)

    return tamed_rule


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
    (dim,) = dims(node, node.args[0].meta["val"].dim())
    if dim in padded_dims(node.args[1].meta["val"]):  # where the first operand has one row
        raise context.refuse(
            node, "works along a dimension of padded rows", "Keep nodes and edges in a dimension of their own."
        )


def _cross(context, node: fx.Node) -> None:
    """Without a dimension, that is the first one of three entries, which rows may happen to be."""
    if argument(node, "dim") is None:
        raise context.refuse(node, "looks for a dimension of three entries", "Name it: torch.cross(a, b, dim=1).")
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


def normalising(dims, rule):
    """A rule for norms of rows: as ``rule``, and padded rows are such that the norm and its derivative are finite.

    An ``eps`` keeps rows of equal entries finite, where there is one. Else these rows are 2, 3, 4 and so on.

    Args:
        dims: node -> the dimensions, counted from the front, along which the rows shall differ.
    """

    def norm_rule(context, node: fx.Node) -> None:
        rule(context, node)
        eps, before = argument(node, "eps"), node.args[0]
        tiny = eps is not None and eps < LEAST_EPS
        guard_operand(context, node, 0, 1, always=tiny)
        if tiny and node.args[0] is not before:
            node.update_arg(0, _uneven(context, node, next(iter(dims(node)), None)))

    return norm_rule


def _uneven(context, node: fx.Node, dim: int | None) -> fx.Node:
    """The operand of a norm, to whose padded rows of ones 1, 2, 3 and so on are added along a dimension."""
    rows, aten = node.args[0], torch.ops.aten
    if dim is None:
        return rows
    ones = context.guard(context.call(aten.zeros_like.default, rows, like=rows), 1, node)
    return context.call(aten.add.Tensor, rows, context.call(aten.cumsum.default, ones, dim, like=rows), like=rows)


def _normalised_dims(node: fx.Node) -> list[int]:
    shape = node.args[0].meta["val"].shape
    return [dim for dim in range(len(shape) - len(node.args[1]), len(shape)) if shape[dim] != 1]


def _group_dims(node: fx.Node) -> list[int]:
    """Channels, if a group has several; else what follows them."""
    shape, groups = node.args[0].meta["val"].shape, node.args[1]
    return [1] if shape[1] != groups else [dim for dim in range(2, len(shape)) if shape[dim] != 1]


def _attention(context, node: fx.Node) -> None:
    for operand in node.args[:3]:
        value = operand.meta["val"]
        if any(dim >= value.dim() - 2 for dim in padded_dims(value)):
            raise context.refuse(node, "attends to padded rows", "Write softmax(q @ k.T) @ v, whose padding is known.")


def window(last: int):
    """A rule: safe if none of the ``last`` dimensions, along which windows move, is padded."""

    def rule(context, node: fx.Node) -> None:
        value = node.args[0].meta["val"]
        if any(dim >= value.dim() - last for dim in padded_dims(value)):
            raise context.refuse(
                node, "moves a window over padded rows", "Pool columns only: rows in a dimension before the windows'."
            )

    return rule


def _recurrence(context, node: fx.Node) -> None:
    value, batch_first = node.args[0].meta["val"], node.args[-1]
    if expression(value.shape[1 if batch_first else 0]) is not None:
        raise context.refuse(node, "runs a recurrence over padded rows", "Use batch_first=True with rows as batch.")


LEAST_EPS = 1e-12
"""Norms of equal or zero entries divide by its root, and by its third power in derivatives: finite in float32."""

_SAFE = (
    "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes",
    "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "type_as",
    "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty", "zeros", "ones", "empty", "eye",
    "tril", "triu", "sym_size", "sym_numel", "cumsum", "view_as_real", "scalar_tensor",
    "expand_copy", "broadcast_tensors", "broadcast_to", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip

RULES = {
    **dict.fromkeys(_SAFE, safe),
    **dict.fromkeys(("full", "full_like", "new_full"), filled),
    **dict.fromkeys(("outer", "ger"), lambda context, node: guard_product(context, node, (0, 1))),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), normalising(_normalised_dims, _normalised_shape)),
    **dict.fromkeys(("cdist", "pairwise_distance"), tamed({0: 1, 1: 0}, last_dimension)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrence),
    "only_valid": only_valid,
    "expect": expected,
    "bilinear": tamed({0: 0}, last_dimension),
    **dict.fromkeys(("cross", "linalg_cross"), tamed({0: 0, 1: 0}, _cross)),
    "cosine_similarity": tamed({0: 1, 1: 1}, _similarity),
    "group_norm": normalising(_group_dims, batch_only(2)),
    **dict.fromkeys(("conv1d", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"), batch_only(3)),
    "conv2d": batch_only(4),
    **dict.fromkeys(
        ("avg_pool1d", "max_pool1d", "max_pool1d_with_indices", "adaptive_avg_pool1d", "adaptive_max_pool1d"), window(1)
    ),
    "scaled_dot_product_attention": tamed({0: 0, 3: 0}, _attention),
}
