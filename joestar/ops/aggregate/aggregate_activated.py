"""``joestar::aggregate_activated``: sums of rows behind any activation, perhaps a norm, whose result is not stored.

ReLU alone has ``aggregate_cat`` and ``aggregate_rows``: its gradient needs a bit per entry, not the rows.
"""

import torch
from torch import Tensor

from joestar.kernels.activations import Before
from joestar.ops.aggregate.aggregate_rows import check_constant
from joestar.ops.aggregate.spmm import spmm, spmm_grad_x
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import CSC, Padding, define, define_gradient

ops = torch.ops.joestar


def aggregate_activated(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None = None, shift: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum or mean of ``weight[e] * z`` over in-edges; ``z = dropout(act(norm(x + bias)))`` is never stored.

    Args:
        x: ``[num_src, D]``, destinations first; weight: ``[num_edges]``; reduce: ``"sum"`` or ``"mean"``.
        own: one entry, ``[1]``: ``own * z[i]`` is added. cat: ``z[i]`` stands beside the sum instead.
        bits: what dropout keeps (``dropout_bits``), or none; scale: of what is kept.
        act: an activation and its numbers, as ``joestar.kernels.activations.spelt`` writes them.
        gain, shift, eps: of a layer norm over the columns, which there is if ``eps`` > 0; on a GPU of at most 256.
            bias: ``[D]``, as gain and shift, or none.

    Returns:
        ``[num_dst, D]``, or ``[num_dst, 2 D]`` with ``cat``, in the dtype of ``x``.
    """
    z = Before(act, gain, shift, eps, bias)(x)
    z = z if bits is None else dropout_apply(z, bits, 0.0, False) * scale
    y = spmm(indptr, indices, z, None if weight is None else weight.to(z.dtype), reduce)
    rows = indptr.numel() - 1
    if cat:
        return torch.cat([y, z[:rows]], 1).to(x.dtype)
    return (y if own is None else y + own * z[:rows]).to(x.dtype)


def aggregate_activated_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None, shift: Tensor | None,
    eps: float, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_activated`` for ``x``, ``gain``, ``shift`` and ``bias``, ``[0]`` where there is none."""
    width, rows = x.shape[1], grad.shape[0]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), weight, x.shape[0], reduce)
    if cat:
        total[:rows] += grad[:, width:]
    elif own is not None:
        total[:rows] += (own * grad).to(total.dtype)
    total = total if bits is None else dropout_apply(total, bits, 0.0, False) * scale
    by_x, *others = Before(act, gain, shift, eps, bias).gradients(total, x)
    return by_x.to(x.dtype).contiguous(), *others


def _fake(indptr, indices, x, weight, own, bits, scale, reduce, cat, act, gain=None, shift=None, eps=0.0, bias=None):
    return x.new_empty((indptr.shape[0] - 1, (2 if cat else 1) * x.shape[1]))


def _grad_fake(indptr, indices, grad, x, weight, own, bits, scale, reduce, cat, act, gain, shift, eps, bias):
    vectors = (x.new_empty(0) if v is None else v.new_empty(v.shape) for v in (gain, shift, bias))
    return x.new_empty(x.shape), *vectors


def _setup(ctx, inputs, output):
    check_constant(ctx, inputs)
    indptr, indices, x, weight, own, bits, *ctx.rest, gain, shift, ctx.eps, bias = inputs
    ctx.save_for_backward(indptr, indices, x, weight, own, bits, gain, shift, bias)


def _backward(ctx, grad):
    *structure, x, weight, own, bits, gain, shift, bias = ctx.saved_tensors
    vectors = gain, shift, bias
    by_x, *sums = ops.aggregate_activated_grad(
        *structure, grad.contiguous(), x, weight, own, bits, *ctx.rest, gain, shift, ctx.eps, bias
    )
    by_gain, by_shift, by_bias = (None if v is None else s for v, s in zip(vectors, sums, strict=True))
    return None, None, by_x, *[None] * 7, by_gain, by_shift, None, by_bias


define(
    f"aggregate_activated({CSC}, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale, str reduce,"
    " bool cat, str act, Tensor? gain=None, Tensor? shift=None, float eps=0.0, Tensor? bias=None) -> Tensor",
    aggregate_activated, fake=_fake, gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_activated",
    cuda="gpu_cat",
)  # fmt: skip
define_gradient(
    f"aggregate_activated_grad({CSC}, Tensor grad, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale,"
    " str reduce, bool cat, str act, Tensor? gain, Tensor? shift, float eps, Tensor? bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)", aggregate_activated_grad, fake=_grad_fake, cpu="cpu_activated",
    cuda="gpu_cat",
)  # fmt: skip
