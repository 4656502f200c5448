"""``joestar::aggregate_cat``: sums beside the destinations' own rows, for one product; with the mask kept, too.

``z``, which is summed, may be ReLU and dropout of the rows, never stored.
"""

import torch
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.ops import shapes
from joestar.ops.aggregate.spmm import spmm, spmm_grad_x
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import CSC, Padding, define, define_gradient, rows_dtype

ops = torch.ops.joestar


def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str) -> Tensor:
    """``[sum or mean of z over in-edges, z[i]]`` for every destination ``i``: ``[num_dst, 2 D]``.

    Args:
        x: ``[num_src, D]``, destinations first; reduce: ``"sum"`` or ``"mean"``.
        bits: if given (``dropout_bits``), ``z`` is ``x * scale`` where ``x`` is positive and its bit is set, else 0:
            ReLU and dropout, whose result is never stored. Without, ``z`` is ``x``.
    """
    z = x if bits is None else activated(x, bits, x, scale)
    return torch.cat([spmm(indptr, indices, z, None, reduce), z[: indptr.numel() - 1]], 1)


def activated(value: Tensor, bits: Tensor, x: Tensor, scale: float) -> Tensor:
    return torch.where(~(x <= 0), dropout_apply(value, bits, 0.0, False) * scale, torch.zeros_like(value)).contiguous()


def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, 2 D]``."""
    width = x.shape[1]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, x.shape[0], reduce)
    total[: grad.shape[0]] += grad[:, width:]
    return total if bits is None else activated(total, bits, x, scale)


def aggregate_cat_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor, scale: float, reduce: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``aggregate_cat`` of ``x + bias``, and which entries its gradient flows to: (``[num_dst, 2 D]``, kept).

    Args:
        bias: ``[D]`` in the dtype of ``x``, or none.

    Returns:
        kept: int32 ``[num_src, ceil(D / 32)]``, the ``bits`` of positive entries; anything in rows that nobody reads.
    """
    x = x if bias is None else x + bias
    return aggregate_cat(indptr, indices, x, bits, scale, reduce), positive_bits(x, bits)


def aggregate_cat_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, kept: Tensor, scale: float, reduce: str, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of ``aggregate_cat_kept`` for ``x`` ``[num_src, D]`` and for the bias, the sum of the rows, ``[D]``.

    ``grad`` is ``[num_dst, 2 D]``. Unless ``biased`` the second one is ``[0]``.
    """
    width, rows = grad.shape[1] // 2, kept.shape[0]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, rows, reduce)
    total[: grad.shape[0]] += grad[:, width:]
    return with_sum(dropout_apply(total, kept, 0.0, False) * scale, biased)


def with_sum(rows: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    return rows, rows.sum(0) if biased else rows.new_empty(0)


def _kept_fake(indptr, indices, x, bits, scale, reduce, bias=None):
    return x.new_empty((indptr.shape[0] - 1, 2 * x.shape[1])), shapes.words(x)


def _kept_grad_fake(indptr, indices, grad, kept, scale, reduce, biased=False):
    width = grad.shape[1] // 2
    return grad.new_empty((kept.shape[0], width)), grad.new_empty((width if biased else 0,))


def _setup(ctx, inputs, output):
    indptr, indices, x, bits, ctx.scale, ctx.reduce = inputs
    ctx.save_for_backward(indptr, indices, x, bits)


def _backward(ctx, grad):
    indptr, indices, x, bits = ctx.saved_tensors
    grad_x = ops.aggregate_cat_grad(indptr, indices, grad, x, bits, ctx.scale, ctx.reduce)
    return None, None, grad_x, None, None, None


def _kept_setup(ctx, inputs, output):
    indptr, indices, _, _, ctx.scale, ctx.reduce, bias = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(indptr, indices, output[1])


def _kept_backward(ctx, grad, of_kept):
    indptr, indices, kept = ctx.saved_tensors
    grad_x, grad_bias = ops.aggregate_cat_kept_grad(indptr, indices, grad, kept, ctx.scale, ctx.reduce, ctx.biased)
    return None, None, grad_x, None, None, None, grad_bias if ctx.biased else None


define(
    f"aggregate_cat({CSC}, Tensor x, Tensor? bits, float scale, str reduce) -> Tensor", aggregate_cat,
    fake=lambda indptr, indices, x, bits, scale, reduce: x.new_empty((indptr.shape[0] - 1, 2 * x.shape[1])),
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_fused", cuda="gpu_cat",
)  # fmt: skip
define_gradient(
    f"aggregate_cat_grad({CSC}, Tensor grad, Tensor x, Tensor? bits, float scale, str reduce) -> Tensor",
    aggregate_cat_grad, fake=lambda indptr, indices, grad, x, bits, scale, reduce: x.new_empty(x.shape),
    cpu="cpu_fused", cuda="gpu_cat",
)  # fmt: skip
define(
    f"aggregate_cat_kept({CSC}, Tensor x, Tensor bits, float scale, str reduce, Tensor? bias=None)"
    " -> (Tensor, Tensor)", aggregate_cat_kept, fake=_kept_fake, gradient=(_kept_setup, _kept_backward),
    padding=Padding.SAFE, cpu="cpu_fused", cuda="gpu_cat", autocast=rows_dtype("aggregate_cat_kept", "x", "bias"),
)  # fmt: skip
define_gradient(
    f"aggregate_cat_kept_grad({CSC}, Tensor grad, Tensor kept, float scale, str reduce, bool biased=False)"
    " -> (Tensor, Tensor)", aggregate_cat_kept_grad, fake=_kept_grad_fake, cpu="cpu_fused", cuda="gpu_cat",
)  # fmt: skip
