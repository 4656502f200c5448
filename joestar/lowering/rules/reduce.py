"""Reductions: over columns they are safe; over padded rows the padding is left out."""

import math

import torch
from torch import fx

from joestar.lowering.sizes import expression, padded_dims

joestar = torch.ops.joestar
aten = torch.ops.aten


def _argument(node: fx.Node, name: str, default=None):
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)
    return default


def _dims(node: fx.Node) -> list[int]:
    """Reduced dimensions, counted from the front; every dimension if the op names none."""
    rank = node.args[0].meta["val"].dim()
    dims = _argument(node, "dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _padded(node: fx.Node) -> list[int]:
    value = node.args[0].meta["val"]
    return [dim for dim in _dims(node) if expression(value.shape[dim]) is not None]


def _lowest(dtype: torch.dtype):
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype):
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _masking(value_of):
    """A rule that fills padding with the reduction's neutral element."""

    def rule(context, node: fx.Node) -> None:
        dims = _padded(node)
        if not dims:
            return
        x = node.args[0]
        neutral = value_of(x.meta["val"].dtype)
        for dim in dims:
            x = context.mask(x, dim, neutral, node)
        node.update_arg(0, x)
        context.rewrites["masked reduction"] = context.rewrites.get("masked reduction", 0) + 1

    return rule


def _replaced(build):
    """A rule that replaces the reduction by a masked op: ``build(context, node, x, count, dim, dims, keepdim)``."""

    def rule(context, node: fx.Node) -> None:
        dims = _padded(node)
        if not dims:
            return
        if len(dims) > 1:
            raise context.refuse(node, "reduces over two padded dimensions at once", "Reduce one after the other.")
        x = node.args[0]
        if expression(x.meta["val"].shape[dims[0]]) in context.table.edges:
            context.mask(x, dims[0], 0, node)  # refuses sets whose count is not known
        count = context.count(expression(x.meta["val"].shape[dims[0]]), node)
        dtype = _argument(node, "dtype")
        if dtype is not None:
            x = context.call(aten._to_copy.default, x, like=x, dtype=dtype)
        keepdim = bool(_argument(node, "keepdim", False))
        node.replace_all_uses_with(build(context, node, x, count, dims[0], _dims(node), keepdim))
        context.gm.graph.erase_node(node)
        context.rewrites["masked reduction"] = context.rewrites.get("masked reduction", 0) + 1

    return rule


def _mean(context, node, x, count, dim, dims, keepdim):
    return context.call(joestar.masked_mean.default, x, count, dim, dims, keepdim, like=node)


def _var(context, node, x, count, dim, dims, keepdim):
    correction = _argument(node, "correction")
    if correction is None:
        correction = 1.0 if _argument(node, "unbiased", True) else 0.0
    return context.call(joestar.masked_var.default, x, count, dim, dims, float(correction), keepdim, like=node)


def _std(context, node, x, count, dim, dims, keepdim):
    return context.call(aten.sqrt.default, _var(context, node, x, count, dim, dims, keepdim), like=node)


def _static_only(context, node: fx.Node) -> None:
    if _padded(node):
        raise context.refuse(
            node, "works across padded rows", "Across nodes use sum, mean, max, min, var, std or softmax."
        )


def _norm(context, node: fx.Node) -> None:
    order = node.args[1] if len(node.args) > 1 else 2
    if _padded(node) and (order is None or isinstance(order, str) or order <= 0):
        raise context.refuse(node, f"takes a norm of order {order} across padded rows", "Use a positive order.")
    _masking(lambda dtype: 0)(context, node)


def _no_padding(context, node: fx.Node) -> None:
    if padded_dims(node.args[0].meta["val"]):
        raise context.refuse(node, "cannot leave padded rows out", "Reduce rows with sum, mean, max or min.")


RULES = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), _masking(lambda dtype: 0)),
    **dict.fromkeys(("amax", "max", "argmax"), _masking(_lowest)),
    **dict.fromkeys(("amin", "min", "argmin"), _masking(_highest)),
    **dict.fromkeys(("logsumexp", "softmax", "_softmax"), _masking(_lowest)),
    **dict.fromkeys(("linalg_vector_norm", "norm", "linalg_norm"), _norm),
    "prod": _masking(lambda dtype: 1),
    "any": _masking(lambda dtype: 0),
    "all": _masking(lambda dtype: 1),
    "mean": _replaced(_mean),
    "var": _replaced(_var),
    "std": _replaced(_std),
    **dict.fromkeys(
        ("log_softmax", "_log_softmax", "sort", "topk", "argsort", "median", "mode", "kthvalue", "logcumsumexp",
         "cumprod", "cummax", "cummin"), _static_only),
    **dict.fromkeys(("var_mean", "std_mean", "aminmax", "unique_dim"), _no_padding),
}  # fmt: skip
"""``max`` and ``min`` with a tensor as second operand are pointwise and never get here as reductions over rows."""
