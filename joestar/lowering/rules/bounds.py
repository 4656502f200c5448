"""How large padded slots can be: what is known to be small there needs no guard against overflow."""

import math

import torch
from torch import Tensor, fx

from joestar.lowering.rules.pointwise_ops import SINGULAR
from joestar.lowering.sizes import padded_dims

GAIN = 4.0
"""A factor of this magnitude is no larger than what products with weights do to padded rows anyway."""

_LARGEST = 700.0
"""About the logarithm of the largest number in float64."""

_LIMITS = {
    **dict.fromkeys(("sigmoid", "tanh", "softmax", "_softmax", "sin", "cos", "erf", "hardsigmoid"), 1.0),
    **dict.fromkeys(("sddmm", "spmm", "edge_softmax"), 0.0),
    **dict.fromkeys(("sign", "sgn", "hardtanh", "special_expit", "special_erf", "special_ndtr", "erfc"), 2.0),
}
"""Ops whose results are small whatever they are given (``hardtanh``: by default); our own leave padding at 0."""

_KEEPING = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as",
    "permute", "transpose", "t", "numpy_T", "mT", "movedim", "clone", "contiguous", "to", "_to_copy", "detach",
    "alias", "type_as", "slice", "relu", "abs", "neg", "cat", "stack", "maximum", "minimum",
    "widened", "narrowed",
}  # fmt: skip
"""Ops whose results are no larger than their operands."""


def bound(context, node) -> float:
    """An upper bound of the magnitude of a value's padded slots; infinity stands for any finite number."""
    if not isinstance(node, fx.Node):
        return abs(node) if isinstance(node, (int, float)) else 0.0
    if node not in context.bounds:
        context.bounds[node] = _bound(context, node)
    return context.bounds[node]


def _bound(context, node: fx.Node) -> float:
    value = _value(node)
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return 1.0 if isinstance(value, Tensor) and value.dtype is torch.bool else math.inf
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return math.inf
    name = node.target._schema.name.partition("::")[2]
    if name in _LIMITS:
        return _LIMITS[name] if name != "hardtanh" or len(node.args) == 1 else math.inf
    if name in ("pow", "float_power"):
        return _power(context, node)
    if name == "leaky_relu":
        slope = node.args[1] if len(node.args) > 1 else 0.01
        return bound(context, node.args[0]) * max(1.0, bound(context, slope))
    if 0 in dict(SINGULAR.get(name, ())) and bound(context, node.args[0]) <= 2:
        return 2.0  # of the harmless value, which its operand has by now
    if name in ("mul", "multiply"):
        factors = [bound(context, arg) for arg in node.args[:2]]
        return 0.0 if 0 in factors else math.prod(factors)
    if name in ("div", "divide", "true_divide") and padded_dims(_value(node.args[1])):
        return bound(context, node.args[0])  # their padding is divided by 1
    if name == "masked_fill":
        return max(bound(context, node.args[0]), bound(context, node.args[2]))
    if name == "where" and len(node.args) == 3:
        return max(bound(context, arg) for arg in node.args[1:])
    if name in _KEEPING:
        operands = [arg for arg in node.all_input_nodes if isinstance(_value(arg), Tensor)]
        return max((bound(context, arg) for arg in operands), default=0.0)
    return math.inf


def _power(context, node: fx.Node) -> float:
    """Of a power: bases of padded slots are 1 by now, but for exponents of which nothing becomes infinite."""
    base, exponent = bound(context, node.args[0]), node.args[1]
    if base == 1:
        return 1.0
    if not isinstance(exponent, (int, float)) or exponent < 0 or base == math.inf:
        return math.inf
    power = exponent * math.log(max(1.0, base))
    return math.exp(power) if power < _LARGEST else math.inf


def _value(node):
    return node.meta.get("val") if isinstance(node, fx.Node) else None
