"""``joestar::batch_norm_rows``: training-mode batch norm of the valid rows of a padded set, as one op with a gradient.

The same as ``masked_batch_norm``, a composition, which a backend computes in twice as many passes over the rows.
"""

import torch
from torch import Tensor

from joestar.ops.padding.batch_norm import masked_batch_norm
from joestar.ops.padding.mask_rows import mask_rows
from joestar.ops.registry import Padding, define, define_gradient
from joestar.ops.shapes import wide_dtype

ops = torch.ops.joestar


def batch_norm_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``masked_batch_norm``, and what rows were multiplied by; gradients reach the valid rows alone.

    Args:
        x: ``[n, D]``; weight, bias: ``[D]`` or none; count: int64 ``[]``, how many rows are valid.

    Returns:
        (y, batch mean, unbiased batch variance, 1 over the root of the biased one plus ``eps``); all but y ``[D]``, at
        least float32.
    """
    y, mean, var = masked_batch_norm(x, weight, bias, count, eps)
    centred = mask_rows(x - mean, count, 0, 0)
    total = count.to(wide_dtype(x.dtype)).clamp(min=1)
    return y, mean, var, torch.rsqrt((centred * centred).sum(0) / total + eps)


def batch_norm_rows_grad(
    grad: Tensor, x: Tensor, weight: Tensor | None, count: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``batch_norm_rows`` for ``x``, ``weight`` and ``bias``, these in the dtype of ``weight``.

    Args:
        grad: as ``x``, not read behind the valid rows; mean, scale: what ``batch_norm_rows`` returned.
    """
    wide = wide_dtype(x.dtype)
    by, unit = (mask_rows(rows.to(wide), count, 0, 0) for rows in (grad, (x.to(wide) - mean) * scale))
    of_bias, of_weight = by.sum(0), (by * unit).sum(0)
    total = count.to(wide).clamp(min=1)
    rows = (by - of_bias / total - unit * (of_weight / total)) * scale
    rows = mask_rows(rows if weight is None else rows * weight.to(wide), count, 0, 0)
    vector = wide if weight is None else weight.dtype
    return rows.to(x.dtype), of_weight.to(vector), of_bias.to(vector)


def _fake(x, weight, bias, count, eps):
    return x.new_empty(x.shape), *(x.new_empty(x.shape[1], dtype=wide_dtype(x.dtype)) for _ in range(3))


def _grad_fake(grad, x, weight, count, mean, scale):
    vector = wide_dtype(x.dtype) if weight is None else weight.dtype
    return x.new_empty(x.shape), *(x.new_empty(x.shape[1], dtype=vector) for _ in range(2))


def _setup(ctx, inputs, output):
    x, weight, _, count, _ = inputs
    _, *statistics = output
    mean, _, scale = statistics
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(x, weight, count, mean, scale)


def _backward(ctx, grad, *of_statistics):
    x, weight, count, mean, scale = ctx.saved_tensors
    by_x, by_weight, by_bias = ops.batch_norm_rows_grad(grad.contiguous(), x, weight, count, mean, scale)
    wanted = ctx.needs_input_grad
    return by_x, by_weight if wanted[1] else None, by_bias if wanted[2] else None, None, None


define(
    "batch_norm_rows(Tensor x, Tensor? weight, Tensor? bias, Tensor count, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    batch_norm_rows,
    fake=_fake, gradient=(_setup, _backward), padding=Padding.RULE, cuda="gpu_batch_norm", dissolved=("cpu",),
)  # fmt: skip
define_gradient(
    "batch_norm_rows_grad(Tensor grad, Tensor x, Tensor? weight, Tensor count, Tensor mean, Tensor scale)"
    " -> (Tensor, Tensor, Tensor)",
    batch_norm_rows_grad,
    fake=_grad_fake, cuda="gpu_batch_norm", dissolved=("cpu",),
)  # fmt: skip
