"""Functions whose derivative at 0 is infinite, where a pass asks what gradients may reach rows of zeros."""

from numbers import Number

from torch import fx

_STEEP = frozenset({
    "sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "logit", "special_logit", "hypot", "xlogy", "special_xlogy",
    "entr", "special_entr", "digamma", "special_digamma", "lgamma", "special_gammaln", "atan2", "arctan2",
})  # fmt: skip
"""Of any of their arguments."""
_ELSEWHERE = frozenset({
    "acos", "acosh", "asin", "atanh", "arccos", "arccosh", "arcsin", "arctanh", "erfinv", "special_erfinv", "log1p",
    "special_log1p", "special_ndtri", "remainder", "fmod",
})  # fmt: skip
"""Steep at other places, which what is computed from 0 may be."""
_QUOTIENTS = {"div": (0, 1), "true_divide": (0, 1), "divide": (0, 1), "addcdiv": (1, 2)}
"""Where numerator and divisor are."""
_POWERS = frozenset({"pow", "float_power"})
_POSITIVE = frozenset({"exp", "exp2", "sigmoid", "softmax", "_softmax", "softplus", "cosh"})
"""Never 0."""
_KEEPING = frozenset({
    "sum", "mean", "amax", "amin", "spmm", "index_select", "index", "unsqueeze", "squeeze", "view", "reshape", "expand",
    "sqrt", "slice", "select", "to", "_to_copy", "clone", "expand_as", "view_as", "detach",
})  # fmt: skip
"""Of what is nowhere 0, neither is what they give, but for sums of nothing, which no edge reads."""
_PER_EDGE = frozenset({"index_select", "index"})
_PASSING = frozenset({
    "mul", "neg", "unsqueeze", "squeeze", "view", "reshape", "expand", "slice", "select", "to", "_to_copy", "clone",
    "index_select", "index", "expand_as", "view_as", "detach",
})  # fmt: skip
"""Of what is infinite, so may be what they give."""


def steep_behind(node: fx.Node) -> fx.Node | None:
    """What is computed from a node and may give it an infinite gradient, or none at all, where that is 0, if anything.

    Roots, logarithms, and quotients of which either part may be 0 there, as ``sum / degree`` is; but not where ``eps``
    is added to the argument or divisor, where that is clamped above 0, or is an exponential, a sigmoid, a softmax, or a
    sum of those. Masks behind them (``where(degree > 0, sum / degree, 0)``) keep infinities from losses, and give
    gradients of 0, which an infinite derivative makes NaN.
    """
    seen, stack = {node}, [node]
    while stack:
        value = stack.pop()
        for user in value.users:
            if _is_steep(user, value):
                return user
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return None


def _name(node: fx.Node) -> str:
    """``aten.sqrt_.default`` -> ``sqrt``."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name.partition("::")[2]
    return name if name.startswith("_") else name.removesuffix("_")


def _is_steep(node: fx.Node, value: fx.Node) -> bool:
    """Whether a reader of a value may be infinitely steep where that is 0."""
    name = _name(node)
    if name in _POWERS:
        exponent = node.args[1]
        return not (isinstance(exponent, Number) and exponent >= 1) and not _is_apart(node.args[0])
    if name in _QUOTIENTS:
        numerator, divisor = (node.args[place] for place in _QUOTIENTS[name])
        if divisor is value:
            return not _is_apart(value)
        return numerator is value and _of_rows(divisor, value) and not _is_apart(divisor)
    if name == "mul":
        factors = [factor for factor in node.args[:2] if factor is not value]
        return any(_of_rows(factor, value) and _may_be_infinite(factor) for factor in factors)
    return name in _ELSEWHERE or (name in _STEEP and not _is_apart(value))


def _of_rows(other, value: fx.Node) -> bool:
    """Whether an operand has entries for every row: what all share is 0 for none or all of them."""
    if not isinstance(other, fx.Node):
        return False
    mine, theirs = (getattr(node.meta.get("val"), "shape", None) for node in (value, other))
    if mine is None or theirs is None:
        return True
    return len(theirs) >= len(mine) > 0 and not (isinstance(theirs[0], int) and theirs[0] == 1)


def _may_be_infinite(value) -> bool:
    """Whether a factor is computed by what is infinite at 0, of what may be 0."""
    seen, stack = set(), [value]
    while stack:
        value = stack.pop()
        if not isinstance(value, fx.Node) or value in seen:
            continue
        seen.add(value)
        name = _name(value)
        if name in ("rsqrt", "reciprocal", "log", "log2", "log10"):
            infinite = not _is_apart(value.args[0])
        elif name in _POWERS:
            exponent = value.args[1]
            infinite = not (isinstance(exponent, Number) and exponent >= 0) and not _is_apart(value.args[0])
        elif name in _QUOTIENTS:
            infinite = not _is_apart(value.args[_QUOTIENTS[name][1]])
        else:
            infinite = False
            stack += value.args[:2] if name == "mul" else value.args[:1] if name in _PASSING else ()
        if infinite:
            return True
    return False


def _is_apart(value) -> bool:
    """Whether a value is kept away from 0 on purpose, or never is 0."""
    per_edge = False
    while isinstance(value, fx.Node):
        name, rest = _name(value), value.args[1:]
        if name in _POSITIVE:
            return True
        if name == "add":
            return bool(rest) and isinstance(rest[0], Number) and rest[0] > 0
        if name in ("clamp", "clamp_min"):
            return bool(rest) and isinstance(rest[0], Number) and rest[0] > 0
        if name not in _KEEPING or (name == "spmm" and not per_edge):
            return False
        per_edge = per_edge or name in _PER_EDGE
        value = value.args[2] if name == "spmm" else value.args[0]
    return True
