"""From a symbolic size to its value: arithmetic on device-side counts, or the number it is under given bounds."""

from collections.abc import Callable
from functools import reduce

import sympy
import torch
from torch import fx

from joestar.errors import PaddingError
from joestar.lowering.origin import node_line

aten = torch.ops.aten

_UNARY = {name: getattr(aten, name).default for name in ("sqrt", "cos", "sin", "tanh", "exp", "log2")}
"""What SymPy calls ``OpaqueUnaryFn_sqrt`` and so on: functions of ``math`` on a size."""

_TO_INTEGER = {"FloorToInt": "floor", "CeilToInt": "ceil", "TruncToInt": "trunc", "RoundToInt": "round"}


def emit(gm: fx.GraphModule, expr: sympy.Expr, symbol_count: Callable[[sympy.Symbol], fx.Node], node: fx.Node):
    """Nodes that compute ``expr`` from counts, at the current insertion point; a 0-d tensor (float64 for fractions).

    Raises:
        PaddingError: naming ``node``, for arithmetic that has no form on tensors.
    """

    def call(target, *args, **kwargs):
        return gm.graph.call_function(target, args, kwargs)

    def wide(part):
        return call(aten._to_copy.default, part, dtype=torch.float64) if isinstance(part, fx.Node) else float(part)

    def fold(target, parts):
        parts = sorted(parts, key=lambda part: not isinstance(part, fx.Node))  # a tensor first, for the op's schema
        return reduce(lambda a, b: call(target, a, b), parts)

    def divide(top, bottom):
        if not isinstance(bottom, fx.Node):
            return call(aten.div.Tensor, wide(top), float(bottom))
        if not isinstance(top, fx.Node):
            return call(aten.mul.Tensor, call(aten.reciprocal.default, wide(bottom)), float(top))
        return call(aten.div.Tensor, wide(top), wide(bottom))

    def both(one, other):
        """The two as tensors, a constant on the device of the other."""
        if not isinstance(one, fx.Node):
            one = call(aten.add.Tensor, call(aten.mul.Tensor, other, 0), one)
        if not isinstance(other, fx.Node):
            other = call(aten.add.Tensor, call(aten.mul.Tensor, one, 0), other)
        return one, other

    def power(base, exponent):
        if not isinstance(base, fx.Node):
            return call(aten.pow.Scalar, base, exponent)
        return call(aten.pow.Tensor_Tensor if isinstance(exponent, fx.Node) else aten.pow.Tensor_Scalar, base, exponent)

    def extremum(name, parts):
        target, clamp = {"Max": (aten.maximum, aten.clamp_min), "Min": (aten.minimum, aten.clamp_max)}[name]
        result = fold(target.default, [part for part in parts if isinstance(part, fx.Node)])
        for bound in (part for part in parts if not isinstance(part, fx.Node)):
            result = call(clamp.default, result, bound)
        return result

    def visit(e):
        if e.is_Symbol:
            return symbol_count(e)
        if e.is_number:
            return int(e) if e.is_integer else float(e)
        parts = [visit(arg) for arg in e.args]
        name = type(e).__name__
        if e.is_Add or e.is_Mul:
            return fold(aten.add.Tensor if e.is_Add else aten.mul.Tensor, parts)
        if name == "Identity":
            return parts[0]
        if name == "ToFloat":
            return wide(parts[0])
        if name in _TO_INTEGER:
            whole = call(getattr(aten, _TO_INTEGER[name]).default, wide(parts[0]))
            return call(aten._to_copy.default, whole, dtype=torch.int64)
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            return divide(*parts)
        if name in ("FloorDiv", "CleanDiv"):
            return call(aten.div.Tensor_mode, *both(*parts), rounding_mode="floor")
        if name in ("Mod", "PythonMod"):
            return call(aten.remainder.Tensor, *both(*parts))
        if e.is_Pow or name in ("FloatPow", "PowByNatural"):
            return power(*parts)
        if name in ("Max", "Min"):
            return extremum(name, parts)
        if name == "Abs":
            return call(aten.abs.default, parts[0])
        unary = _UNARY.get(name.removeprefix("OpaqueUnaryFn_"))
        if unary is not None:
            return call(unary, wide(parts[0]))
        raise PaddingError(
            f"{node.target} at {node_line(node)}: the arithmetic {expr} on the size of a sampled set ({name}) has no "
            "padded form. Use + - * / // % **, max, min, abs, round or math.sqrt, or compute with tensors."
        )

    return visit(expr)


def evaluate(expr: sympy.Expr, values: dict[sympy.Symbol, int], node: fx.Node) -> int | float:
    """The number that ``expr`` is under ``values``."""
    result = expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if result.free_symbols:
        raise PaddingError(f"the size {expr} at {node_line(node)} does not come from a sampled set.")
    result = result.doit()
    return int(result) if result.is_integer else float(result)
