"""``joestar::batch_norm_rows``: training-mode batch norm of the valid rows of a padded set, as one op with a gradient.

The same as ``masked_batch_norm``, a composition, which a backend computes in seven passes over the rows, forward and
backward, where this takes four.
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


def batch_norm_rows_sums(grad: Tensor, x: Tensor, count: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Over the valid rows, the sums of ``grad`` and of its products with the normalised rows: ``[2, D]``.

    These are the gradients of ``bias`` and ``weight``, and all that the gradient of ``x`` needs of other rows: the rest
    is a loop over the rows, which the backend writes, into the memory of ``grad`` where nobody reads that again.

    Args:
        grad: as ``x``, not read behind the valid rows; mean, scale: what ``batch_norm_rows`` returned.
    """
    wide = mean.dtype
    by, unit = (mask_rows(rows.to(wide), count, 0, 0) for rows in (grad, (x.to(wide) - mean) * scale))
    return torch.stack([by.sum(0), (by * unit).sum(0)])


def _fake(x, weight, bias, count, eps):
    return x.new_empty(x.shape), *(x.new_empty(x.shape[1], dtype=wide_dtype(x.dtype)) for _ in range(3))


def _setup(ctx, inputs, output):
    x, weight, bias, count, _ = inputs
    ctx.vector = None if bias is None else bias.dtype
    _, *statistics = output
    mean, _, scale = statistics
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(x, weight, count, mean, scale)


def _backward(ctx, grad, *of_statistics):
    x, weight, count, mean, scale = ctx.saved_tensors
    of_bias, of_weight = ops.batch_norm_rows_sums(grad.contiguous(), x, count, mean, scale).unbind()
    total = count.to(mean.dtype).clamp(min=1)
    rows = grad - of_bias / total - (x - mean) * (scale * of_weight / total)
    rows = mask_rows(rows * (scale if weight is None else scale * weight), count, 0, 0).to(x.dtype)
    _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    of_weight = of_weight.to(weight.dtype) if wants_weight else None
    return rows, of_weight, of_bias.to(ctx.vector) if wants_bias else None, None, None


define(
    "batch_norm_rows(Tensor x, Tensor? weight, Tensor? bias, Tensor count, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    batch_norm_rows,
    fake=_fake, gradient=(_setup, _backward), padding=Padding.RULE, cuda="gpu_batch_norm", dissolved=("cpu",),
)  # fmt: skip
define_gradient(
    "batch_norm_rows_sums(Tensor grad, Tensor x, Tensor count, Tensor mean, Tensor scale) -> Tensor",
    batch_norm_rows_sums,
    fake=lambda grad, x, count, mean, scale: mean.new_empty((2, x.shape[1])),
    cuda="gpu_batch_norm", dissolved=("cpu",),
)  # fmt: skip
