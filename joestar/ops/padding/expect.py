"""``joestar::expect``: values of a model that a loss or a distribution cannot take are an error, or not a number."""

import torch
from torch import Tensor

from joestar.errors import DomainError
from joestar.ops.registry import Padding, define


def expect(x: Tensor, wrong: Tensor, what: str) -> Tensor:
    """``x``, in which entries that are ``wrong`` (bool, of a shape that broadcasts to that of ``x``) are NaN.

    On a CPU, where looking costs no waiting, they are an error instead: see ``_refuse``. Integers stay as they are.
    """
    if not x.dtype.is_floating_point:
        return x.clone()
    return torch.where(wrong, torch.full((), torch.nan, dtype=x.dtype, device=x.device), x)


def _refuse(x: Tensor, wrong: Tensor, what: str) -> Tensor:
    """Raises ``DomainError`` with ``what`` (its ``{}`` is the first such value) if anything is wrong."""
    if bool(wrong.any()):
        raise DomainError(what.replace("{}", f"{float(x.detach()[wrong.expand(x.shape)][0]):g}"))
    return x.clone(memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    pass


def _backward(ctx, grad):
    return grad, None, None


define(
    "expect(Tensor x, Tensor wrong, str what) -> Tensor", expect,
    fake=lambda x, wrong, what: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradient=(_setup, _backward), padding=Padding.RULE, twice=True, cpu=_refuse, dissolved=("cuda",),
)  # fmt: skip
