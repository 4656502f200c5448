"""Hooks on gradients of tensors that get none.

Where a function's backward pass returns ``None`` for a parameter, PyTorch calls the parameter's hooks with ``None``,
and those behind its accumulation as if there had been something. In plain PyTorch nothing would come to the parameter.
"""

import functools
import weakref
from collections.abc import Callable

from torch import Tensor


def before(tensor: Tensor) -> None:
    """A backward pass may come to a tensor without a gradient: its hooks are called only if it has one all the same."""
    _quietened(tensor._backward_hooks, _OfGradients)
    came = _Came(tensor.grad)
    for hook in _quietened(tensor._post_accumulate_grad_hooks, _Behind):
        hook.came = came


def _quietened(hooks: dict | None, kind: type) -> list:
    """A tensor's hooks, each behind one of ours."""
    for key, hook in (hooks or {}).items():
        if not isinstance(hook, kind):
            hooks[key] = kind(hook)
    return list((hooks or {}).values())


class _Quiet:
    """Stands in a tensor's list of hooks for one of the user's."""

    def __init__(self, hook: Callable):
        functools.update_wrapper(self, hook)
        self.hook = hook


class _OfGradients(_Quiet):
    """Of ``register_hook``."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


class _Behind(_Quiet):
    """Of ``register_post_accumulate_grad_hook``.

    Attributes:
        came: of the backward pass under way, if nothing may come in it.
    """

    came: "_Came | None" = None

    def __call__(self, tensor: Tensor) -> None:
        came, self.came = self.came, None
        if came is None or came.to(tensor):
            self.hook(tensor)


class _Came:
    """Whether something has been accumulated, which shows in the gradient alone, before the first hook changes it.

    Args:
        grad: of the tensor before.
    """

    def __init__(self, grad: Tensor | None):
        self._before = None if grad is None else (weakref.ref(grad), grad._version)
        self._found: bool | None = None

    def to(self, tensor: Tensor) -> bool:
        """Looked at once, behind the accumulation."""
        if self._found is None:
            before, grad = self._before, tensor.grad
            same = grad is None if before is None else before[0]() is grad and before[1] == grad._version
            self._found = not same
        return self._found
