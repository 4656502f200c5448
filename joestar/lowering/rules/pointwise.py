"""Pointwise ops: every entry on its own, so padding needs no more than to stay finite."""

import math

from torch import Tensor, fx

from joestar.lowering.rules.bounds import GAIN, bound
from joestar.lowering.rules.pointwise_ops import POINTWISE, PRODUCTS, SINGULAR
from joestar.lowering.sizes import padded_dims

_ANYWHERE = 0.5
"""A number at which hardly any function is singular: what padded operands of an op of which nothing is known become."""


_CHOSEN = {"where": (1, 2), "masked_fill": (0, 2)}
"""Ops whose padding may take what real entries do not: the operands they choose among."""


def pointwise(context, node: fx.Node) -> None:
    """Padded slots that the op could make infinite are made harmless: a masked infinity would still poison gradients.

    The row ``0`` of ``x / x.norm()`` is the example: 0 / 0 in a padded row, times a zero gradient, is NaN.
    """
    name = node.target._schema.name.partition("::")[2]
    if name in PRODUCTS or _is_square(name, node):
        guard_product(context, node, PRODUCTS.get(name, (0, 0)))
    elif name in SINGULAR:
        if not _linear_power(name, node):
            for index, value in SINGULAR[name]:
                guard_operand(context, node, index, value)
    elif name not in POINTWISE:
        for index in range(len(node.args)):
            guard_operand(context, node, index, _ANYWHERE)
    if any(_may_be_infinite(node.args[index]) for index in _CHOSEN.get(name, ()) if index < len(node.args)):
        context.guard_result(node, 0)


def filled(context, node: fx.Node) -> None:
    """What is filled with infinity, to be read where something else is not to count, is not where there is padding."""
    if any(_is_infinite(arg) for arg in (*node.args, *node.kwargs.values())):
        context.guard_result(node, 0)


def guard_operand(context, node: fx.Node, index: int, value, always: bool = True) -> None:
    """Replaces the padding of an operand, if it has any, by ``value``.

    Args:
        always: also if the padded slots are known to be small.
    """
    operand = node.args[index] if index < len(node.args) else None
    found = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(found, Tensor) or not any(map(context.known, padded_dims(found).values())):
        return
    if not always and bound(context, operand) <= GAIN:
        return
    node.update_arg(index, context.guard(operand, value if found.dtype.is_floating_point else int(value), node))
    context.note("guard")


def guard_product(context, node: fx.Node, factors: tuple[int, int]) -> None:
    """Sets the padding of one factor to 0 if two are padded, and may be large there: the smaller tensor.

    Args:
        factors: their positions, twice the same for a square.
    """
    large = [index for index in factors if is_large(context, node.args[index] if index < len(node.args) else None)]
    if len(large) == 2:
        guard_operand(context, node, min(large, key=lambda index: _extent(node.args[index].meta["val"])), 0)


def is_large(context, factor) -> bool:
    """Whether padded slots of a floating-point or complex value may hold large numbers."""
    value = factor.meta.get("val") if isinstance(factor, fx.Node) else None
    return (
        bool(padded_dims(value)) and (value.is_floating_point() or value.is_complex()) and bound(context, factor) > GAIN
    )


def _is_infinite(arg) -> bool:
    return isinstance(arg, float) and not math.isfinite(arg)


def _may_be_infinite(arg) -> bool:
    """Whether a number, or a tensor without padding, is not known to be finite; padding is."""
    if not isinstance(arg, fx.Node):
        return _is_infinite(arg)
    value = arg.meta.get("val")
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or padded_dims(value):
        return False
    made_of = [*arg.args, *arg.kwargs.values()]
    number = arg.op == "call_function" and not arg.all_input_nodes and any(isinstance(x, (int, float)) for x in made_of)
    return not number or any(map(_is_infinite, made_of))


def _extent(value: Tensor) -> tuple[int, int]:
    """Orders tensors by size: by their padded dimensions, then by the others."""
    return len(padded_dims(value)), math.prod(size for size in value.shape if isinstance(size, int))


def _is_square(name: str, node: fx.Node) -> bool:
    return name == "pow" and node.args[1:2] == (2,)


def _linear_power(name: str, node: fx.Node) -> bool:
    return name in ("pow", "float_power") and isinstance(node.args[1], (int, float)) and node.args[1] in (0, 1)
