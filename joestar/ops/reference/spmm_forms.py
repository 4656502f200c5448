"""Sparse-dense products of structures given by source (CSR) or as a sorted list of edges (COO)."""

import torch
from torch import Tensor

from joestar.ops.reference.computation import _like, _messages, extremum_shares
from joestar.ops.reference.structure import valid_edges


def _reduced(message: Tensor, dst: Tensor, num_dst: int, reduce: str, dtype: torch.dtype) -> Tensor:
    """``message`` ``[E, ...]`` reduced per destination; 0 where there is none."""
    out = message.new_zeros((num_dst, *message.shape[1:]))
    if reduce in ("max", "min"):
        how = {"max": "amax", "min": "amin"}[reduce]
        index = _like(dst, message).expand_as(message)
        return out.scatter_reduce(0, index, message, how, include_self=False).to(dtype)
    out = out.index_add(0, dst, message)
    if reduce == "mean":
        degree = torch.zeros(num_dst, dtype=torch.int64, device=dst.device).index_add(0, dst, torch.ones_like(dst))
        out = out / _like(degree.clamp(min=1).to(out.dtype), out)
    return out.to(dtype)


def spmm_csr(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[indices[e]] = reduce over edges e of weight[e] * x[row of e]``, ``indptr`` over the sources."""
    dst, src = valid_edges(indptr, indices)
    return _reduced(_messages(x, weight, src), dst, num_dst, reduce, x.dtype)


def spmm_coo(src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e with dst[e] = d of weight[e] * x[src[e]]``; ``dst`` is ascending."""
    valid = int((dst < num_dst).sum())
    message = _messages(x, weight, src[:valid].to(torch.int64))
    return _reduced(message, dst[:valid].to(torch.int64), num_dst, reduce, x.dtype)


def spmm_csr_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm_csr`` (max or min), shared evenly among ties."""
    dst, src = valid_edges(indptr, indices)
    return extremum_shares(src, dst, x, weight, y, grad)
