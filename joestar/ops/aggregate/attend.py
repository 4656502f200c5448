"""``joestar::attend``: attention over the in-edges of destinations, and its gradients, from the ops that it fuses."""

import functools

import torch
from torch import Tensor

from joestar.kernels.layout import shares_rows, wide_dtype
from joestar.ops.aggregate.edge_softmax import edge_softmax
from joestar.ops.aggregate.scatter import scatter_dst, scatter_src
from joestar.ops.aggregate.spmm import spmm, spmm_grad_x
from joestar.ops.aggregate.values import widen
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import edge_dst, valid_edges

ops = torch.ops.joestar
_SCORES = "Tensor s_src, Tensor s_dst, Tensor x"


def attend(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, slope: float, bits: Tensor | None,
    scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Graph attention: ``y[d, h] = sum over e of d of m[e, h] alpha[e, h] x[indices[e], h]``.

    ``alpha`` is the softmax, over the in-edges of a destination, of ``leaky_relu(s_src[indices[e]] + s_dst[d] +
    s_edge[e])``.

    Args:
        s_src: ``[N, H]``, s_dst: ``[num_dst, H]``, scores of both ends; slope: of the leaky ReLU.
        x: ``[N, H, F]``, or ``[N, 1, F]``: rows that the heads share. Scores may be float32 beside 16-bit rows; else
            all values have one floating-point dtype.
        bits: if given (``edge_dropout_bits``), the coefficients ``m`` are ``scale`` where their bit is set, else 0.
        s_edge: if given, scores of the edges ``[E, H]``; what is behind the last edge may be anything.

    Returns:
        ``y`` ``[num_dst, H, F]``; the largest logit and the sum of exponentials per destination and head
        ``[num_dst, H]``, in float32 for 16-bit values: what the gradients need. A row without edges is 0 in all three.
    """
    z, logits = _logits(indptr, indices, s_src, s_dst, s_edge, slope)
    rows = edge_dst(indptr, z.shape[0], indptr)
    top = z.new_full(s_dst.shape, -torch.inf).scatter_reduce(0, rows[:, None].expand_as(z), logits, "amax")
    total = z.new_zeros(s_dst.shape).index_add(0, rows, torch.exp(logits - top[rows]))
    empty = (indptr[1:] == indptr[:-1])[:, None]
    alpha = edge_softmax(indptr, logits)
    alpha = alpha if bits is None else _masked(alpha, bits, scale)
    y = spmm(indptr, indices[: z.shape[0]], widen(x), alpha, "sum")
    return y.to(x.dtype), torch.where(empty, 0, top), total


def attend_grad(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, top: Tensor, total: Tensor, grad: Tensor,
    slope: float, bits: Tensor | None, scale: float, needs_x: bool, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``attend`` for ``s_src``, ``s_dst``, ``x`` and ``s_edge``.

    That of ``x`` is empty ``[0]`` unless ``needs_x``, that of ``s_edge`` where there is none; the latter is 0 behind
    the last edge.

    Coefficients are computed again from ``top`` and ``total``. A logit's gradient is
    ``alpha (m p - sum over the row of alpha m p)`` with ``p = <x[source], grad>``, where ``grad`` ``[num_dst, H, F]``
    is the gradient of the result.
    """
    z, logits = _logits(indptr, indices, s_src, s_dst, s_edge, slope)
    src, rows = valid_edges(indptr, indices)
    wide, own = widen(x)[src], widen(grad)[rows]
    alpha = torch.exp(logits - top[rows]) / total[rows]
    applied = alpha if bits is None else _masked(alpha, bits, scale)
    weighted = applied * (wide * own).sum(-1)
    for_logits = weighted - alpha * scatter_dst(indptr, weighted)[rows]
    for_z = torch.where(z > 0, for_logits, slope * for_logits)
    grad_src = scatter_src(indptr, src, for_z, s_src.shape[0]).to(s_src.dtype)
    grad_dst = scatter_dst(indptr, for_z).to(s_dst.dtype)
    grad_edge = s_src.new_zeros(0 if s_edge is None else s_edge.shape)
    if s_edge is not None:
        grad_edge[: for_z.shape[0]] = for_z
    if not needs_x:
        return grad_src, grad_dst, x.new_empty(0), grad_edge
    grad_x = spmm_grad_x(indptr, src, widen(grad), applied, x.shape[0], "sum", shares_rows(x, s_dst))
    return grad_src, grad_dst, grad_x.to(x.dtype), grad_edge


def _logits(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, s_edge: Tensor | None, slope: float
) -> tuple[Tensor, Tensor]:
    """(sum of the scores, leaky ReLU of it), ``[E, H]`` over the valid edges."""
    src, rows = valid_edges(indptr, indices)
    z = widen(s_src)[src] + widen(s_dst)[rows]
    z = z if s_edge is None else z + widen(s_edge)[: src.shape[0]]
    return z, torch.where(z > 0, z, slope * z)


def _masked(alpha: Tensor, bits: Tensor, scale: float) -> Tensor:
    return dropout_apply(alpha, bits[: alpha.shape[0]], 0.0, False) * scale


def _fake(indptr, indices, s_src, s_dst, x, slope, bits, scale, s_edge=None):
    rows = s_dst.shape
    top, total = (x.new_empty(rows, dtype=wide_dtype(x.dtype)) for _ in range(2))
    return x.new_empty((*rows, x.shape[2])), top, total


def _grad_fake(indptr, indices, s_src, s_dst, x, top, total, grad, slope, bits, scale, needs_x, s_edge=None):
    for_x, for_edge = x.shape if needs_x else (0,), (0,) if s_edge is None else s_edge.shape
    of_ends = s_src.new_empty(s_src.shape), s_dst.new_empty(s_dst.shape)
    return *of_ends, x.new_empty(for_x), s_src.new_empty(for_edge)


def _autocast(device: str):
    """Scores are not rounded to the dtype of shorter rows: PyTorch has them in float32."""

    def run(indptr, indices, s_src, s_dst, x, slope, bits, scale, s_edge=None):
        given = [score for score in (s_src, s_dst, s_edge) if score is not None]
        dtype = functools.reduce(torch.promote_types, (score.dtype for score in given), x.dtype)
        s_src, s_dst, *s_edge = (score.to(dtype) for score in given)
        with torch.autocast(device, enabled=False):
            return ops.attend(indptr, indices, s_src, s_dst, x, slope, bits, scale, *s_edge)

    return run


def _setup(ctx, inputs, output):
    indptr, indices, s_src, s_dst, x, ctx.slope, bits, ctx.scale, s_edge = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(indptr, indices, s_src, s_dst, x, *output[1:], bits, s_edge)


def _backward(ctx, grad, *of_saved):
    *saved, bits, s_edge = ctx.saved_tensors
    needs = ctx.needs_input_grad
    *grads, for_edge = ops.attend_grad(*saved, grad.contiguous(), ctx.slope, bits, ctx.scale, needs[4], s_edge)
    grads = [g if needed else None for g, needed in zip(grads, needs[2:5], strict=True)]
    return None, None, *grads, None, None, None, for_edge if s_edge is not None and needs[8] else None


define(
    f"attend({CSC}, {_SCORES}, float slope, Tensor? bits, float scale, Tensor? s_edge=None)"
    " -> (Tensor, Tensor, Tensor)", attend, fake=_fake, gradient=(_setup, _backward), padding=Padding.SAFE,
    cpu="cpu_attend", cuda="gpu_attend", autocast=_autocast,
)  # fmt: skip
define_gradient(
    f"attend_grad({CSC}, {_SCORES}, Tensor top, Tensor total, Tensor grad, float slope, Tensor? bits,"
    " float scale, bool needs_x, Tensor? s_edge=None) -> (Tensor, Tensor, Tensor, Tensor)", attend_grad,
    fake=_grad_fake, cpu="cpu_attend", cuda="gpu_attend",
)  # fmt: skip
