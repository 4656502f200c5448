"""Products of structures given by source (CSR) or as a sorted list of edges (COO) on the GPU, without synchronisation.

Sums and means over CSR link every edge into a list of its destination, like the gradient of the CSC form. Extrema over
CSR order the edges by destination first. COO finds the offsets of its rows by bisection and then gathers.
"""

import torch
from torch import Tensor

from joestar.kernels.gpu_grad import spmm_extremum_grad, spmm_grad_x
from joestar.kernels.gpu_launch import check_ids, check_offsets, op
from joestar.kernels.gpu_spmm import aggregate, transposed
from joestar.kernels.gpu_structure import edge_dst, out_degrees
from joestar.kernels.gpu_tiles import check_values


def _check_rows(values: Tensor | None, rows: int, name: str) -> None:
    if values is not None and values.shape[0] != rows:
        raise ValueError(f"GPU kernel: expected {name} with one row for each of {rows}, got {list(values.shape)}")


@op
def spmm_csr(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[indices[e]] = reduce over edges e of weight[e] * x[row of e]``, ``indptr`` over the sources."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight)
    _check_rows(x, indptr.numel() - 1, "x")
    _check_rows(weight, indices.numel(), "weight")
    if reduce in ("max", "min"):
        offsets, rows, order = _by_destination(indptr, indices, num_dst)
        out = x.new_empty((num_dst, *x.shape[1:]))
        aggregate(offsets, rows, x, None if weight is None else weight[order], reduce, out)
        return out
    half = x.dtype in (torch.bfloat16, torch.float16)
    total = spmm_grad_x(indptr, indices, x.float() if half else x, weight, num_dst, "sum")
    if reduce == "mean":
        degree = out_degrees(indptr, indices, num_dst).clamp(min=1).to(total.dtype)
        total = total / degree.reshape(-1, *[1] * (total.dim() - 1))
    return total.to(x.dtype)


def _by_destination(indptr: Tensor, indices: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """CSR as CSC: (offsets over destinations, sources, edge numbers)."""
    return transposed(indptr, indices, edge_dst(indptr, indices.numel(), indices), num_dst)


@op
def spmm_csr_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm_csr`` (max or min), shared evenly among ties."""
    offsets, rows, order = _by_destination(indptr, indices, y.shape[0])
    grad_x, grad_ordered = spmm_extremum_grad(offsets, rows, x, None if weight is None else weight[order], y, grad)
    if weight is None:
        return grad_x, None
    return grad_x, torch.zeros_like(weight).index_copy(0, order, grad_ordered)


@op
def spmm_coo(src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e with dst[e] = d of weight[e] * x[src[e]]``; ``dst`` is ascending (not checked)."""
    check_ids(src, dst)
    check_values(x=x, weight=weight)
    _check_rows(dst, src.numel(), "destinations")
    _check_rows(weight, src.numel(), "weight")
    offsets = torch.searchsorted(dst, torch.arange(num_dst + 1, dtype=dst.dtype, device=dst.device))
    out = x.new_empty((num_dst, *x.shape[1:]))
    aggregate(offsets, src, x, weight, reduce, out)
    return out
