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
    for hooks, kind in ((tensor._backward_hooks, _OfGradients), (tensor._post_accumulate_grad_hooks, _Behind)):
        for key, hook in (hooks or {}).items():
            if not isinstance(hook, kind):
                hooks[key] = hook = kind(hook)
            hook.expect(tensor)


class _Quiet:
    """Stands in a tensor's list of hooks for one of the user's."""

    def __init__(self, hook: Callable):
        functools.update_wrapper(self, hook)
        self.hook = hook

    def expect(self, tensor: Tensor) -> None:
        """A backward pass begins."""


class _OfGradients(_Quiet):
    """Of ``register_hook``."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


class _Behind(_Quiet):
    """Of ``register_post_accumulate_grad_hook``: whether something was accumulated shows in the gradient alone."""

    _known: tuple | None = None

    def expect(self, tensor: Tensor) -> None:
        self._known = _seen(tensor.grad)

    def __call__(self, tensor: Tensor) -> None:
        known, self._known = self._known, None
        grad = tensor.grad
        same = known is not None and (grad is None) == (known[0] is None)
        if not same or (grad is not None and (known[0]() is not grad or known[1] != grad._version)):
            self.hook(tensor)


def _seen(grad: Tensor | None) -> tuple:
    return (None, 0) if grad is None else (weakref.ref(grad), grad._version)
