"""Sparse-dense products of structures other than CSC on the CPU: checks, allocation, and one call into the C++ kernels.

No form is converted into another. Every function has the signature and the result of its namesake in
``joestar.ops.reference``; sums run in edge order and have the same bits for any number of threads.
"""

from torch import Tensor

from joestar import _native
from joestar.kernels.checks import (
    check_ids,
    check_offsets,
    check_rows,
    check_values,
    common_values,
    heads_and_width,
    require,
)
from joestar.kernels.cpu_spmm import REDUCE


def spmm_csr(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[indices[e]] = reduce over edges e of weight[e] * x[row of e]``: ``[num_dst, ...]``, 0 where no edge ends.

    ``indptr`` is over the sources, ``indices`` are destinations below ``num_dst`` (not checked); ``x`` ``[num_src]``,
    ``[num_src, D]`` or ``[num_src, H, D]``; ``weight`` ``[E]`` or ``[E, H]``; ``reduce`` sum, mean, max or min.
    """
    dtype = x.dtype
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    check_rows(x, indptr.numel() - 1, "x")
    if weight is not None:
        check_rows(weight, indices.numel(), "weight")
    x, weight = common_values(x, weight)
    heads, width = heads_and_width(x, weight)
    y = x.new_empty((num_dst, *x.shape[1:]))
    _native.spmm_csr(indptr, indices, x, weight, heads, width, num_dst, REDUCE[reduce], y)
    return y.to(dtype)


def spmm_coo(src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e with dst[e] = d of weight[e] * x[src[e]]``: ``[num_dst, ...]``, 0 without edges.

    ``dst`` must be ascending, which is checked; entries of ``num_dst`` and above are padding. ``x``, ``weight`` and
    ``reduce`` as in ``spmm_csr``; sources below ``len(x)`` are not checked.
    """
    dtype = x.dtype
    src, dst = check_ids(src, "src"), check_ids(dst, "dst")
    require(src.dtype == dst.dtype, "ids of one dtype", f"{src.dtype} and {dst.dtype}")
    require(src.numel() == dst.numel(), f"a destination for every source, {src.numel()}", f"{dst.numel()}")
    if weight is not None:
        check_rows(weight, src.numel(), "weight")
    x, weight = common_values(x, weight)
    heads, width = heads_and_width(x, weight)
    y = x.new_empty((num_dst, *x.shape[1:]))
    _native.spmm_coo(src, dst, x, weight, heads, width, num_dst, REDUCE[reduce], y)
    return y.to(dtype)


def spmm_csr_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm_csr`` (max or min) for ``x`` and ``weight``, shared evenly among ties."""
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    dtypes = x.dtype, x.dtype if weight is None else weight.dtype
    check_rows(x, indptr.numel() - 1, "x")
    check_rows(grad, y.shape[0], "grad")
    x, weight = common_values(x, weight)
    require(x.dtype == dtypes[0], f"weights no wider than x, {dtypes[0]}, whose ties count", f"{dtypes[1]}")
    y, grad = check_values(y.to(x.dtype), "y"), check_values(grad.to(x.dtype), "grad")
    heads, width = heads_and_width(x, weight)
    grad_x, grad_weight = x.new_empty(x.shape), None if weight is None else weight.new_empty(weight.shape)
    _native.spmm_csr_extremum_grad(indptr, indices, x, weight, heads, width, y, grad, y.shape[0], grad_x, grad_weight)
    return grad_x, None if weight is None else grad_weight.to(dtypes[1])
