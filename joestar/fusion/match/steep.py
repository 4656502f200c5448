"""Functions whose derivative at 0 is infinite, where a pass asks what gradients may reach rows of zeros."""

from numbers import Number

from torch import fx

_STEEP = frozenset({
    "sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "logit", "special_logit", "hypot", "xlogy", "special_xlogy",
    "entr", "special_entr", "digamma", "special_digamma", "lgamma", "special_gammaln",
})  # fmt: skip
"""Of any of their arguments."""
_POWERS = frozenset({"pow", "float_power"})
_POSITIVE = frozenset({"exp", "exp2", "sigmoid", "softmax", "_softmax", "softplus", "cosh"})
"""Never 0."""
_KEEPING = frozenset({
    "sum", "mean", "amax", "amin", "spmm", "index_select", "index", "unsqueeze", "squeeze", "view", "reshape", "expand",
    "sqrt", "slice", "select", "to", "_to_copy", "clone",
})  # fmt: skip
"""Of what is nowhere 0, neither is what they give, but for sums of nothing, which no edge reads."""


def steep_behind(node: fx.Node) -> fx.Node | None:
    """What is computed from a node and has an infinite derivative where that is 0, if anything.

    Roots, logarithms, and what is divided by; but not where ``eps`` is added to their argument, where that is clamped
    above 0, or is an exponential, a sigmoid, a softmax, or a sum of those.
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
    """Whether a reader of a value is infinitely steep where that is 0."""
    name = _name(node)
    if name in _POWERS:
        exponent = node.args[1]
        return not (isinstance(exponent, Number) and exponent >= 1) and not _is_apart(node.args[0])
    if name in ("div", "true_divide", "divide"):
        return len(node.args) > 1 and node.args[1] is value and not _is_apart(value)
    return name in _STEEP and not _is_apart(value)


def _is_apart(value) -> bool:
    """Whether a value is kept away from 0 on purpose, or never is 0."""
    while isinstance(value, fx.Node):
        name, rest = _name(value), value.args[1:]
        if name in _POSITIVE:
            return True
        if name == "add":
            return bool(rest) and isinstance(rest[0], Number) and rest[0] > 0
        if name in ("clamp", "clamp_min"):
            return bool(rest) and isinstance(rest[0], Number) and rest[0] > 0
        if name not in _KEEPING:
            return False
        value = value.args[2] if name == "spmm" else value.args[0]
    return True
