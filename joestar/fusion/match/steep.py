"""Functions whose derivative at 0 is infinite, where a pass asks what gradients may reach rows of zeros."""

from numbers import Number

import torch
from torch import fx

_ATEN = torch.ops.aten
_ROOTS = {_ATEN.sqrt.default, _ATEN.hypot.default, _ATEN.special_entr.default, _ATEN.xlogy.Tensor}
_POWERS = {_ATEN.pow.Tensor_Scalar, _ATEN.pow.Tensor_Tensor}
_CLAMPS = {_ATEN.clamp.default, _ATEN.clamp_min.default}


def steep_behind(node: fx.Node) -> fx.Node | None:
    """What is computed from a node, has a finite value at 0 and an infinite derivative there, if anything.

    Roots of ``x + eps`` and of ``x.clamp(min=eps)`` are none. Functions that are infinite at 0 themselves make the loss
    infinite as well, which no order of operations mends.
    """
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            if _is_steep(user):
                return user
            seen.add(user)
            stack.append(user)
    return None


def _is_steep(node: fx.Node) -> bool:
    if node.target in _POWERS:
        exponent = node.args[1]
        return not (isinstance(exponent, Number) and exponent >= 1) and not _is_apart(node.args[0])
    return node.target in _ROOTS and not _is_apart(node.args[0])


def _is_apart(value) -> bool:
    """Whether a value is kept away from 0 on purpose."""
    if not isinstance(value, fx.Node):
        return True
    if value.target is _ATEN.add.Tensor:
        return isinstance(value.args[1], Number) and value.args[1] > 0
    if value.target in _CLAMPS:
        return len(value.args) > 1 and isinstance(value.args[1], Number) and value.args[1] > 0
    return False
