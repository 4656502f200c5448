"""Aggregation of rows behind any activation and a layer norm on the CPU."""

import torch
from torch import Tensor

from joestar.kernels.activations import Before
from joestar.kernels.checks import check_values
from joestar.kernels.cpu_dropout import gated_dropout
from joestar.kernels.cpu_spmm import spmm, spmm_grad_x


def aggregate_activated(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None = None, shift: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``aggregate_cat`` or ``aggregate_rows`` of any activation, behind a layer norm; see ``joestar.ops.reference``."""
    z = _before(x, act, gain, shift, eps, bias)(check_values(x, "x"))
    z = z if bits is None else gated_dropout(z, bits, None, scale)
    y = spmm(indptr, indices, z, None if weight is None else weight.to(z.dtype), reduce)
    rows = indptr.numel() - 1
    if cat:
        return torch.cat([y, z[:rows]], 1).to(x.dtype)
    return (y if own is None else y.addcmul_(z[:rows], own.to(y.dtype))).to(x.dtype)


def aggregate_activated_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None, shift: Tensor | None,
    eps: float, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_activated`` for ``x``, ``gain``, ``shift`` and ``bias``, ``[0]`` where there is none."""
    width, rows = x.shape[1], grad.shape[0]
    before, grad = _before(x, act, gain, shift, eps, bias), check_values(grad, "grad")
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), weight, x.shape[0], reduce)
    if cat:
        total[:rows].add_(grad[:, width:])
    elif own is not None:
        total[:rows].addcmul_(grad, own.to(total.dtype))
    total = total if bits is None else gated_dropout(total, bits, None, scale)
    by_x, *others = before.gradients(total, check_values(x, "x"))
    return by_x.to(x.dtype), *others


def _before(x: Tensor, *how) -> Before:
    before = Before(*how)
    before.check(x)
    return before
