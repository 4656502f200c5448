"""Attention over the in-edges of destinations, and its gradients, from the ops that it fuses."""

import torch
from torch import Tensor

from joestar.kernels.layout import shares_rows
from joestar.ops.reference.computation import _wide, edge_softmax, scatter_dst, scatter_src, spmm, spmm_grad_x
from joestar.ops.reference.dropout import dropout_apply
from joestar.ops.reference.structure import edge_dst, valid_edges


def attend(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, slope: float, bits: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Graph attention: ``y[d, h] = sum over e of d of m[e, h] alpha[e, h] x[indices[e], h]``.

    ``alpha`` is the softmax, over the in-edges of a destination, of ``leaky_relu(s_src[indices[e]] + s_dst[d])``.

    Args:
        s_src: ``[N, H]``, s_dst: ``[num_dst, H]``, scores of both ends; slope: of the leaky ReLU.
        x: ``[N, H, F]``, or ``[N, 1, F]``: rows that the heads share. All values have one floating-point dtype.
        bits: if given (``edge_dropout_bits``), the coefficients ``m`` are ``scale`` where their bit is set, else 0.

    Returns:
        ``y`` ``[num_dst, H, F]``; the largest logit and the sum of exponentials per destination and head
        ``[num_dst, H]``, in float32 for 16-bit values: what the gradients need. A row without edges is 0 in all three.
    """
    z, logits = _logits(indptr, indices, _wide(s_src), _wide(s_dst), slope)
    rows = edge_dst(indptr, z.shape[0], indptr)
    top = z.new_full(s_dst.shape, -torch.inf).scatter_reduce(0, rows[:, None].expand_as(z), logits, "amax")
    total = z.new_zeros(s_dst.shape).index_add(0, rows, torch.exp(logits - top[rows]))
    empty = (indptr[1:] == indptr[:-1])[:, None]
    alpha = edge_softmax(indptr, logits)
    alpha = alpha if bits is None else _masked(alpha, bits, scale)
    y = spmm(indptr, indices[: z.shape[0]], _wide(x), alpha, "sum")
    return y.to(x.dtype), torch.where(empty, 0, top), total


def attend_grad(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, top: Tensor, total: Tensor, grad: Tensor,
    slope: float, bits: Tensor | None, scale: float, needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``attend`` for ``s_src``, ``s_dst`` and (empty ``[0]`` unless ``needs_x``) ``x``.

    Coefficients are computed again from ``top`` and ``total``. A logit's gradient is
    ``alpha (m p - sum over the row of alpha m p)`` with ``p = <x[source], grad>``, where ``grad`` ``[num_dst, H, F]``
    is the gradient of the result.
    """
    z, logits = _logits(indptr, indices, _wide(s_src), _wide(s_dst), slope)
    src, rows = valid_edges(indptr, indices)
    wide, own = _wide(x)[src], _wide(grad)[rows]
    alpha = torch.exp(logits - top[rows]) / total[rows]
    applied = alpha if bits is None else _masked(alpha, bits, scale)
    weighted = applied * (wide * own).sum(-1)
    for_logits = weighted - alpha * scatter_dst(indptr, weighted)[rows]
    for_z = torch.where(z > 0, for_logits, slope * for_logits)
    grad_src = scatter_src(indptr, src, for_z, s_src.shape[0]).to(s_src.dtype)
    grad_dst = scatter_dst(indptr, for_z).to(s_dst.dtype)
    if not needs_x:
        return grad_src, grad_dst, x.new_empty(0)
    grad_x = spmm_grad_x(indptr, src, _wide(grad), applied, x.shape[0], "sum", shares_rows(x, s_dst))
    return grad_src, grad_dst, grad_x.to(x.dtype)


def _logits(indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """(sum of both scores, leaky ReLU of it), ``[E, H]`` over the valid edges."""
    src, rows = valid_edges(indptr, indices)
    z = s_src[src] + s_dst[rows]
    return z, torch.where(z > 0, z, slope * z)


def _masked(alpha: Tensor, bits: Tensor, scale: float) -> Tensor:
    return dropout_apply(alpha, bits[: alpha.shape[0]], 0.0, False) * scale
