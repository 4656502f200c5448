"""``joestar::aggregate_rows``: weighted sums plus the destinations' own rows; with the mask kept, too."""

import torch
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.ops import shapes
from joestar.ops.aggregate.aggregate_cat import activated, with_sum
from joestar.ops.aggregate.spmm import spmm, spmm_grad_x
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import CSC, Padding, define, define_gradient, rows_dtype

ops = torch.ops.joestar


def aggregate_rows(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Sum or mean of ``weight[e] * z`` over in-edges, plus ``own * z[i]``, for every destination ``i``.

    Args:
        x: ``[num_src, D]``, destinations first; weight: ``[num_edges]``; own: one entry, ``[1]``; reduce: ``"sum"`` or
            ``"mean"``. bits, scale: what ``z`` is, as in ``aggregate_cat``.
    """
    z = x if bits is None else activated(x, bits, x, scale)
    y = spmm(indptr, indices, z, weight, reduce)
    return y if own is None else (y + own * z[: indptr.numel() - 1]).to(x.dtype)


def aggregate_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``aggregate_rows`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, x.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]] += (own * grad).to(total.dtype)
    return total if bits is None else activated(total, bits, x, scale)


def aggregate_rows_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor, scale: float,
    reduce: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``aggregate_rows`` of ``x + bias``, and which entries its gradient flows to: (``[num_dst, D]``, kept)."""
    x = x if bias is None else x + bias
    return aggregate_rows(indptr, indices, x, weight, own, bits, scale, reduce), positive_bits(x, bits)


def aggregate_rows_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, own: Tensor | None, kept: Tensor,
    scale: float, reduce: str, biased: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_rows_kept`` for ``x`` and the bias, as in the other; ``grad`` ``[num_dst, D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, kept.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]] += (own * grad).to(total.dtype)
    return with_sum(dropout_apply(total, kept, 0.0, False) * scale, biased)


def _kept_fake(indptr, indices, x, weight, own, bits, scale, reduce, bias=None):
    return x.new_empty((indptr.shape[0] - 1, x.shape[1])), shapes.words(x)


def _kept_grad_fake(indptr, indices, grad, weight, own, kept, scale, reduce, biased=False):
    return grad.new_empty((kept.shape[0], grad.shape[1])), grad.new_empty((grad.shape[1] if biased else 0,))


def check_constant(ctx, inputs):
    for name, position in (("weight", 3), ("own", 4)):
        if inputs[position] is not None and ctx.needs_input_grad[position]:
            raise RuntimeError(f"aggregate_rows has no gradient for {name}; use spmm, whose weights may be trained")


def _setup(ctx, inputs, output):
    check_constant(ctx, inputs)
    indptr, indices, x, weight, own, bits, ctx.scale, ctx.reduce = inputs
    ctx.save_for_backward(indptr, indices, x, weight, own, bits)


def _backward(ctx, grad):
    indptr, indices, x, weight, own, bits = ctx.saved_tensors
    grad_x = ops.aggregate_rows_grad(indptr, indices, grad.contiguous(), x, weight, own, bits, ctx.scale, ctx.reduce)
    return None, None, grad_x, None, None, None, None, None


def _kept_setup(ctx, inputs, output):
    check_constant(ctx, inputs)
    indptr, indices, _, weight, own, _, ctx.scale, ctx.reduce, bias = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(indptr, indices, weight, own, output[1])


def _kept_backward(ctx, grad, of_kept):
    indptr, indices, weight, own, kept = ctx.saved_tensors
    grad_x, grad_bias = ops.aggregate_rows_kept_grad(
        indptr, indices, grad.contiguous(), weight, own, kept, ctx.scale, ctx.reduce, ctx.biased
    )
    return None, None, grad_x, None, None, None, None, None, grad_bias if ctx.biased else None


define(
    f"aggregate_rows({CSC}, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale, str reduce) -> Tensor",
    aggregate_rows,
    fake=lambda indptr, indices, x, weight, own, bits, scale, reduce: x.new_empty((indptr.shape[0] - 1, x.shape[1])),
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_fused", cuda="gpu_cat",
)  # fmt: skip
define_gradient(
    f"aggregate_rows_grad({CSC}, Tensor grad, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale,"
    " str reduce) -> Tensor", aggregate_rows_grad,
    fake=lambda indptr, indices, grad, x, weight, own, bits, scale, reduce: x.new_empty(x.shape), cpu="cpu_fused",
    cuda="gpu_cat",
)  # fmt: skip
define(
    f"aggregate_rows_kept({CSC}, Tensor x, Tensor? weight, Tensor? own, Tensor bits, float scale, str reduce,"
    " Tensor? bias=None) -> (Tensor, Tensor)", aggregate_rows_kept, fake=_kept_fake,
    gradient=(_kept_setup, _kept_backward), padding=Padding.SAFE, cpu="cpu_fused", cuda="gpu_cat",
    autocast=rows_dtype("aggregate_rows_kept", "x", "bias"),
)  # fmt: skip
define_gradient(
    f"aggregate_rows_kept_grad({CSC}, Tensor grad, Tensor? weight, Tensor? own, Tensor kept, float scale,"
    " str reduce, bool biased=False) -> (Tensor, Tensor)", aggregate_rows_kept_grad, fake=_kept_grad_fake,
    cpu="cpu_fused", cuda="gpu_cat",
)  # fmt: skip
