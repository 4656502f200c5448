"""Losses over padded seeds: padded rows are ignored by index, or left out of the mean."""

import torch
from torch import fx

from joestar.lowering.sizes import expression, padded_dims

aten = torch.ops.aten
joestar = torch.ops.joestar
NONE, MEAN, SUM = 0, 1, 2


def _arguments(node: fx.Node) -> dict:
    """Arguments by name, defaults filled in."""
    values = {}
    for index, argument in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        values[argument.name] = given
    return values


def _position(node: fx.Node, name: str) -> int:
    return [argument.name for argument in node.target._schema.arguments].index(name)


def _set(node: fx.Node, name: str, value) -> None:
    """Sets an argument by name, filling positions up to it."""
    values, position = _arguments(node), _position(node, name)
    names = [argument.name for argument in node.target._schema.arguments]
    node.args = tuple(value if n == name else values[n] for n in names[: max(position + 1, len(node.args))])


def _by_index(context, node: fx.Node) -> None:
    """Cross entropy and NLL: padded targets become ``ignore_index``; weights and smoothing see them as absent."""
    values = _arguments(node)
    target = values["target"]
    if target.meta["val"].dtype.is_floating_point:
        _elementwise(context, node)
        return
    _set(node, "target", context.mask(target, 0, values["ignore_index"], node))
    context.rewrites["masked loss"] = context.rewrites.get("masked loss", 0) + 1


def _elementwise(context, node: fx.Node) -> None:
    """Any loss with ``reduction``: computed per entry, then reduced over the valid rows."""
    reduction = _arguments(node)["reduction"]
    if reduction == NONE:
        return
    x = node.args[0]
    (dim,) = padded_dims(x.meta["val"])
    count = context.count(expression(x.meta["val"].shape[dim]), node)
    _set(node, "reduction", NONE)
    by_index = node.target is aten.cross_entropy_loss.default
    rank = x.meta["val"].dim() - (1 if by_index else 0)
    new = context.gm.graph.call_function(node.target, node.args, node.kwargs)
    new.meta = dict(node.meta) if by_index else {**node.meta, "val": x.meta["val"]}
    dims = list(range(rank))
    if reduction == MEAN:
        result = context.call(joestar.masked_mean.default, new, count, dim, dims, False, like=node)
    else:
        masked = context.call(joestar.mask_rows.default, new, count, dim, 0)
        result = context.call(aten.sum.dim_IntList, masked, dims, like=node)
    node.replace_all_uses_with(result)
    context.gm.graph.erase_node(node)
    context.rewrites["masked loss"] = context.rewrites.get("masked loss", 0) + 1


_ELEMENTWISE = (
    "binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "soft_margin_loss", "poisson_nll_loss", "kl_div",
)  # fmt: skip

RULES = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), _by_index),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
}
