"""Reductions: over columns they are safe; over padded rows the padding is left out."""

import math

import torch
from torch import fx

from joestar.lowering.rules.arguments import argument, dims, padded_among
from joestar.lowering.rules.pointwise import guard_operand
from joestar.lowering.sizes import expression, padded_dims

joestar = torch.ops.joestar
aten = torch.ops.aten


def _lowest(dtype: torch.dtype):
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype):
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _masking(value_of, harmless=None, of_some=False):
    """A rule that fills padding with the reduction's neutral element.

    Args:
        harmless: what padded rows are filled with if the reduction is over columns, and might overflow.
        of_some: of no rows PyTorch raises.
    """

    def rule(context, node: fx.Node) -> None:
        padded = padded_among(node)
        if not padded:
            if harmless is not None:
                guard_operand(context, node, 0, harmless, always=False)
            return
        x = node.args[0]
        if of_some:
            for dim in padded:
                context.want_rows(expression(x.meta["val"].shape[dim]), node)
        neutral = value_of(x.meta["val"].dtype)
        for dim in padded:
            x = context.mask(x, dim, neutral, node)
        node.update_arg(0, x)
        context.note("masked reduction")

    return rule


def _replaced(build, harmless=None):
    """A rule that replaces the reduction by a masked op: ``build(context, node, x, count, dim, dims, keepdim)``."""

    def rule(context, node: fx.Node) -> None:
        padded = padded_among(node)
        if not padded:
            if harmless is not None:
                guard_operand(context, node, 0, harmless, always=False)
            return
        if len(padded) > 1:
            raise context.refuse(node, "reduces over two padded dimensions at once", "Reduce one after the other.")
        x = node.args[0]
        value = x.meta["val"]
        count = context.entries(expression(value.shape[padded[0]]), node)
        dtype = argument(node, "dtype")
        if dtype is not None:
            x = context.call(aten._to_copy.default, x, like=x, dtype=dtype)
        keepdim = bool(argument(node, "keepdim"))
        node.replace_all_uses_with(build(context, node, x, count, padded[0], dims(node, value.dim()), keepdim))
        context.gm.graph.erase_node(node)
        context.note("masked reduction")

    return rule


def _mean(context, node, x, count, dim, over, keepdim):
    return context.call(joestar.masked_mean.default, x, count, dim, over, keepdim, like=node)


def _deviation(op):
    """``build`` of ``_replaced`` for the variance and its square root."""

    def build(context, node, x, count, dim, over, keepdim):
        correction = argument(node, "correction")
        if correction is None:
            correction = 0.0 if argument(node, "unbiased") is False else 1.0
        return context.call(op, x, count, dim, over, float(correction), keepdim, like=node)

    return build


def _softmax(context, node: fx.Node) -> None:
    """Over rows padding counts as minus infinity; a padded row of minus infinities may not become NaN, nor no rows."""
    over = padded_among(node)
    if len(over) < len(padded_dims(node.args[0].meta["val"])):
        node.update_arg(0, context.guard(node.args[0], 0, node))
    if over:
        x, dtype = node.args[0], node.meta["val"].dtype
        if not x.meta["val"].dtype.is_floating_point:  # computed in floating point, where 0 is not the least
            node.update_arg(0, context.call(aten._to_copy.default, x, like=x, dtype=dtype))
            node.args[0].meta["val"] = x.meta["val"].to(dtype)
        _masking(_lowest)(context, node)
        if "softmax" in node.target._schema.name:  # of no rows it is NaN in all slots
            context.guard_result(node, 0)


def _log_softmax(context, node: fx.Node) -> None:
    if padded_among(node):
        raise context.refuse(node, "works across padded rows", "Write x - x.logsumexp(dim, keepdim=True).")
    _softmax(context, node)


def _place(of):
    """A rule for ``argmax`` and ``argmin``: without a dimension they count entries, in rows as long as they are."""

    def rule(context, node: fx.Node) -> None:
        value = node.args[0].meta["val"]
        if argument(node, "dim") is None and padded_dims(value).keys() - {0}:
            raise context.refuse(
                node, "counts entries of rows that are padded", "Name the dimension: argmax(dim=1), or flatten indices."
            )
        _masking(of, of_some=True)(context, node)

    return rule


def _static_only(context, node: fx.Node) -> None:
    if padded_among(node):
        raise context.refuse(
            node, "works across padded rows", "Across nodes use sum, mean, max, min, var, std or softmax."
        )


def _norm(context, node: fx.Node) -> None:
    order = argument(node, "ord")
    order = argument(node, "p") if order is None else order
    if padded_among(node) and isinstance(order, (int, float)) and order <= 0:
        raise context.refuse(node, f"takes a norm of order {order} across padded rows", "Use a positive order.")
    _masking(lambda dtype: 0, harmless=1, of_some=order == math.inf)(context, node)


def _columns(harmless: float):
    """A rule: only over columns, where padded rows become harmless first."""

    def rule(context, node: fx.Node) -> None:
        _static_only(context, node)
        guard_operand(context, node, 0, harmless, always=False)

    return rule


RULES = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), _masking(lambda dtype: 0)),
    **dict.fromkeys(("amax", "max"), _masking(_lowest, of_some=True)),
    **dict.fromkeys(("amin", "min"), _masking(_highest, of_some=True)),
    "argmax": _place(_lowest),
    "argmin": _place(_highest),
    **dict.fromkeys(("softmax", "_softmax", "logsumexp"), _softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _log_softmax),
    **dict.fromkeys(("linalg_vector_norm", "norm", "linalg_norm", "linalg_matrix_norm"), _norm),
    "prod": _masking(lambda dtype: 1, harmless=1),
    "any": _masking(lambda dtype: 0),
    "all": _masking(lambda dtype: 1),
    "mean": _replaced(_mean),
    "var": _replaced(_deviation(joestar.masked_var.default), harmless=0),
    "std": _replaced(_deviation(joestar.masked_std.default), harmless=0),
    **dict.fromkeys(
        ("sort", "topk", "argsort", "median", "mode", "kthvalue", "cummax", "cummin", "aminmax", "nanmedian",
         "nanmean", "diff", "quantile", "nanquantile"), _static_only),
    **dict.fromkeys(("cumprod", "logcumsumexp", "var_mean", "std_mean"), _columns(1)),
}  # fmt: skip
"""``max`` and ``min`` with a tensor as second operand are pointwise and never get here as reductions over rows."""
