"""Ops that treat every row on its own, and the conditions under which they do."""

import sympy
from torch import fx

from joestar.lowering.sizes import expression, padded_dims

SINGULAR = {
    "div": 1, "reciprocal": 0, "log": 0, "log2": 0, "log10": 0, "log1p": 0, "sqrt": 0, "rsqrt": 0, "pow": 0,
    "acos": 0, "asin": 0, "atanh": 0, "acosh": 0, "logit": 0, "remainder": 1, "fmod": 1, "floor_divide": 1,
    "true_divide": 1, "divide": 1, "xlogy": 1, "digamma": 0, "lgamma": 0,
}  # fmt: skip
"""Pointwise ops that can turn a finite input into NaN or infinity (in value or gradient), and which operand does it."""


def safe(context, node: fx.Node) -> None:
    """Nothing to do."""


def pointwise(context, node: fx.Node) -> None:
    """Safe, but padded rows of a dangerous operand are set to 1 first: a masked NaN would still poison gradients.

    The row ``0`` of ``x / x.norm()`` is the example: 0 / 0 in a padded row, times a zero gradient, is NaN.
    """
    position = SINGULAR.get(node.target._schema.name.partition("::")[2])
    if position is None or position >= len(node.args) or not isinstance(node.args[position], fx.Node):
        return
    operand = node.args[position]
    value = operand.meta.get("val")
    for dim in padded_dims(value):
        if context.known(expression(value.shape[dim])) and value.dtype.is_floating_point:
            node.update_arg(position, context.mask(operand, dim, 1, node))
            context.rewrites["guard"] = context.rewrites.get("guard", 0) + 1
            return


def _dim(node: fx.Node, position: int, default: int = 0) -> int:
    rank = node.args[0].meta["val"].dim()
    dim = node.args[position] if len(node.args) > position else default
    return dim % rank


def _needs_static(position: int, default: int = 0):
    """A rule: safe unless the op works along a padded dimension."""

    def rule(context, node: fx.Node) -> None:
        value = node.args[0].meta["val"]
        if expression(value.shape[_dim(node, position, default)]) is not None:
            raise context.refuse(
                node, "works along a dimension of padded rows", "Keep nodes and edges in a dimension of their own."
            )

    return rule


def _joined(context, node: fx.Node) -> None:
    """``cat`` and ``stack``: along columns they are safe, along rows the padding would end up in the middle."""
    first = node.args[0][0].meta["val"]
    rank = first.dim() + (1 if "stack" in node.target._schema.name else 0)
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    parts = [part.meta["val"] for part in node.args[0]]
    if "stack" not in node.target._schema.name and any(expression(part.shape[dim]) is not None for part in parts):
        raise context.refuse(
            node, "joins sets of padded rows end to end", "Concatenate columns (dim=1), or aggregate each set first."
        )


def _slice(context, node: fx.Node) -> None:
    """A leading part that is itself a known set (``x[:block.num_dst]``) is safe; so is shifting an indptr."""
    source, result = node.args[0].meta["val"], node.meta["val"]
    dim = _dim(node, 1)
    before, after = expression(source.shape[dim]), expression(result.shape[dim])
    if before is None:
        return
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = node.args[4] if len(node.args) > 4 else 1
    is_indptr = start in (0, 1) and after is not None and sympy.simplify(before - after) == 1 and not before.is_Symbol
    whole = start == 0 and before == after
    known_part = start == 0 and after is not None and context.known(after) and after.is_Symbol and before.is_Symbol
    if step == 1 and (whole or is_indptr or known_part):
        return
    raise context.refuse(
        node, "cuts padded rows at a place that is not a set of its own",
        "Only x[:block.num_dst] (the destinations of a block) can be cut off.",
    )  # fmt: skip


def _select(context, node: fx.Node) -> None:
    value = node.args[0].meta["val"]
    if expression(value.shape[_dim(node, 1)]) is not None:
        raise context.refuse(node, "picks a single padded row by position", "Select rows by node id before sampling.")


def _prefixes(shape) -> list[sympy.Expr]:
    prefixes, product = [], sympy.Integer(1)
    for size in shape:
        prefixes.append(product)
        expr = expression(size)
        product = product * (sympy.Integer(int(size)) if expr is None else expr)
    return prefixes


def _view(context, node: fx.Node) -> None:
    """A reshape is safe while padded rows stay a suffix: nothing moves in front of the padded dimension."""
    source, result = node.args[0].meta["val"], node.meta["val"]
    before = {_prefixes(source.shape)[dim] for dim in padded_dims(source)}
    after = {_prefixes(result.shape)[dim] for dim in padded_dims(result)}
    if not after <= before:
        raise context.refuse(
            node, f"reshapes {tuple(source.shape)} to {tuple(result.shape)}, which interleaves padded rows",
            "Keep the node dimension first.",
        )  # fmt: skip


def _scatter_sum(position: int):
    """A rule for additive scatters: padded entries of the source are set to 0."""

    def rule(context, node: fx.Node) -> None:
        source = node.args[position]
        for dim in padded_dims(source.meta["val"]):
            source = context.mask(source, dim, 0, node)
        node.update_arg(position, source)

    return rule


def _repeat(context, node: fx.Node) -> None:
    value, repeats = node.args[0].meta["val"], node.args[1]
    offset = len(repeats) - value.dim()
    if any(repeats[offset + dim] != 1 for dim in padded_dims(value)):
        raise context.refuse(node, "repeats padded rows", "Repeat columns, or use index_select.")


def _lstm(context, node: fx.Node) -> None:
    value, batch_first = node.args[0].meta["val"], node.args[-1]
    if expression(value.shape[1 if batch_first else 0]) is not None:
        raise context.refuse(node, "runs a recurrence over padded rows", "Use batch_first=True with rows as batch.")


_ALWAYS_SAFE = (
    "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes",
    "index_select", "index", "gather", "take_along_dim", "embedding", "one_hot", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy",
    "type_as", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zeros", "ones", "full",
    "arange", "eye", "sym_size", "cumsum", "selu", "relu6", "log_sigmoid", "prelu", "masked_fill", "where", "isnan",
    "hardtanh", "softsign", "tanhshrink", "celu", "silu", "mish", "rsub", "clamp", "nan_to_num", "view_as_real",
    "float", "double", "half", "bfloat16", "bool", "int", "long", "scalar_tensor", "isfinite", "isinf", "expand_copy",
    "broadcast_tensors", "broadcast_to",
)  # fmt: skip

RULES = {
    **dict.fromkeys(_ALWAYS_SAFE, safe),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"), _view),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _needs_static(2)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    "unbind": _needs_static(1),
    "glu": _needs_static(1, -1),
    "flip": lambda context, node: [_needs_static_dim(context, node, dim) for dim in node.args[1]] and None,
    "slice": _slice,
    "narrow": _slice,
    "select": _select,
    "repeat": _repeat,
    "lstm": _lstm,
    "index_add": _scatter_sum(3),
    "scatter_add": _scatter_sum(3),
}


def _needs_static_dim(context, node: fx.Node, dim: int) -> None:
    if expression(node.args[0].meta["val"].shape[dim]) is not None:
        raise context.refuse(node, "reverses padded rows", "Reverse columns only.")
