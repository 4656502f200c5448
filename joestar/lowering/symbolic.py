"""From a symbolic size to its value: arithmetic on device-side counts, or the number it is under given bounds."""

from collections.abc import Callable

import sympy
import torch
from torch import fx

from joestar.errors import PaddingError
from joestar.lowering.origin import node_line

aten = torch.ops.aten


def emit(gm: fx.GraphModule, expr: sympy.Expr, symbol_count: Callable[[sympy.Symbol], fx.Node]) -> fx.Node:
    """Nodes that compute ``expr`` from counts, at the current insertion point; a 0-d tensor (float64 for fractions)."""

    def call(target, *args, **kwargs):
        return gm.graph.call_function(target, args, kwargs)

    def fold(target, parts):
        result = parts[0]
        for part in parts[1:]:
            result = call(target, result, part)
        return result

    def visit(e):
        if e.is_Symbol:
            return symbol_count(e)
        if e.is_number:
            return int(e) if e.is_integer else float(e)
        parts = [visit(arg) for arg in e.args]
        name = type(e).__name__
        if e.is_Add or e.is_Mul:
            parts.sort(key=lambda part: not isinstance(part, fx.Node))  # a tensor first, for the op's schema
            return fold(aten.add.Tensor if e.is_Add else aten.mul.Tensor, parts)
        if name in ("ToFloat", "TruncToInt", "Identity"):
            dtype = torch.int64 if name == "TruncToInt" else torch.float64
            return parts[0] if name == "Identity" else call(aten._to_copy.default, parts[0], dtype=dtype)
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            wide = [call(aten._to_copy.default, p, dtype=torch.float64) if isinstance(p, fx.Node) else p for p in parts]
            if not isinstance(wide[0], fx.Node):
                return call(aten.mul.Tensor, call(aten.reciprocal.default, wide[1]), wide[0])
            return call(aten.div.Tensor, *wide)
        if name in ("FloorDiv", "CleanDiv"):
            return call(aten.div.Tensor_mode, *parts, rounding_mode="floor")
        if name == "OpaqueUnaryFn_sqrt":
            return call(aten.sqrt.default, call(aten._to_copy.default, parts[0], dtype=torch.float64))
        if e.is_Pow or name in ("FloatPow", "PowByNatural"):
            return call(aten.pow.Tensor_Scalar, *parts)
        raise PaddingError(f"arithmetic {name} on the size of a sampled set ({e}) has no padded form.")

    return visit(expr)


def evaluate(expr: sympy.Expr, values: dict[sympy.Symbol, int], node: fx.Node) -> int | float:
    """The number that ``expr`` is under ``values``."""
    result = expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if result.free_symbols:
        raise PaddingError(f"the size {expr} at {node_line(node)} does not come from a sampled set.")
    result = result.doit()
    return int(result) if result.is_integer else float(result)
