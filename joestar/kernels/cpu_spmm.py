"""Aggregation and its gradients on the CPU: checks, allocation, and one call into the C++ kernels.

Every function has the signature and the result of its namesake in ``joestar.ops.reference``. Sums run in edge order,
in float32 for 16-bit values, and have the same bits for any number of threads. Shapes and dtypes are checked; that ids
are below the number of rows is not, ``Graph`` sees to it.
"""

from torch import Tensor

from joestar import _native
from joestar.kernels.checks import (
    check_covers,
    check_ids,
    check_offsets,
    check_rows,
    check_values,
    common_values,
    heads_and_width,
    require,
    row_size,
)
from joestar.kernels.layout import message_shape, shares_rows

REDUCE = {"sum": 0, "mean": 1, "max": 2, "min": 3}


def spmm(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e of d of weight[e] * x[indices[e]]``; an empty row gives 0.

    ``x`` ``[N]``, ``[N, D]`` or ``[N, H, D]``; ``weight`` ``[E]`` or, with three dimensions, ``[E, H]``;
    ``reduce`` is "sum", "mean", "max" or "min". A sum or mean of ``x`` ``[N, 1, D]`` with ``weight`` ``[E, H]`` reads
    a row once for all heads: ``[num_dst, H, D]``.
    """
    dtype = x.dtype
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    if weight is not None:
        check_rows(weight, indices.numel(), "weight")
    x, weight = common_values(x, weight)
    y = x.new_empty((indptr.numel() - 1, *message_shape(x, weight)))
    if shares_rows(x, weight):
        require(reduce in ("sum", "mean"), "sum or mean of rows shared by heads (x.expand them for others)", reduce)
        heads, width = heads_and_width(y, weight)
        _native.spmm_shared(indptr, indices, x, weight, heads, width, reduce == "mean", y)
        return y.to(dtype)
    heads, width = heads_and_width(x, weight)
    _native.spmm(indptr, indices, x, weight, heads, width, REDUCE[reduce], y)
    return y.to(dtype)


def spmm_into(y: Tensor, indptr: Tensor, indices: Tensor, x: Tensor, reduce: str) -> None:
    """``spmm`` of ``x`` ``[N, D]`` without weights, into the first ``D`` columns of ``y`` ``[num_dst, stride]``."""
    indptr, indices, x = check_offsets(indptr), check_ids(indices, "indices"), check_values(x, "x")
    require(y.is_contiguous() and y.dtype == x.dtype, f"contiguous rows of {x.dtype}", f"{y.dtype}, {y.stride()}")
    require(len(y) == indptr.numel() - 1 and y.shape[1] >= x.shape[1], "rows with room for sums", str(list(y.shape)))
    _native.spmm(indptr, indices, x, None, 1, x.shape[1], REDUCE[reduce], y, y.shape[1])


def spmm_grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of ``spmm`` (sum or mean) for ``x`` ``[num_src, ...]``: summed per source in edge order.

    ``shared``: the heads of ``grad`` ``[num_dst, H, ...]`` read one row; the result is ``[num_src, 1, ...]``.
    """
    dtype = grad.dtype
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    check_rows(grad, indptr.numel() - 1, "grad")
    if weight is not None:
        check_rows(weight, indices.numel(), "weight")
    grad, weight = common_values(grad, weight)
    heads, width = heads_and_width(grad, weight)
    if shared:
        grad_x = grad.new_empty((num_src, 1, *grad.shape[2:]))
        _native.spmm_shared_grad_x(indptr, indices, grad, weight, heads, width, reduce == "mean", num_src, grad_x)
        return grad_x.to(dtype)
    grad_x = grad.new_empty((num_src, *grad.shape[1:]))
    _native.spmm_grad_x(indptr, indices, grad, weight, heads, width, REDUCE[reduce], num_src, grad_x)
    return grad_x.to(dtype)


def spmm_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm`` (max or min) for ``x`` and ``weight``, shared evenly among ties.

    Ties are found by comparing messages, rounded as in the forward pass, with ``y``.
    """
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    dtypes = x.dtype, x.dtype if weight is None else weight.dtype
    check_rows(y, indptr.numel() - 1, "y")
    check_rows(grad, indptr.numel() - 1, "grad")
    x, weight = common_values(x, weight)
    require(x.dtype == dtypes[0], f"weights no wider than x, {dtypes[0]}, whose ties count", f"{dtypes[1]}")
    y, grad = check_values(y.to(x.dtype), "y"), check_values(grad.to(x.dtype), "grad")
    heads, width = heads_and_width(x, weight)
    grad_x, grad_weight = x.new_empty(x.shape), None if weight is None else weight.new_empty(weight.shape)
    _native.spmm_extremum_grad(indptr, indices, x, weight, heads, width, y, grad, x.shape[0], grad_x, grad_weight)
    return grad_x, None if weight is None else grad_weight.to(dtypes[1])


def scatter_src(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """Sum of edge values ``[E, ...]`` per source ``[num_src, ...]``, in edge order."""
    indptr, indices, e = check_offsets(indptr), check_ids(indices, "indices"), check_values(e, "edge values")
    check_rows(e, indices.numel(), "edge values")
    out = e.new_empty((num_src, *e.shape[1:]))
    _native.scatter_src(indptr, indices, e, row_size(e), num_src, out)
    return out


def scatter_dst(indptr: Tensor, e: Tensor) -> Tensor:
    """Sum of edge values ``[E, ...]`` per destination ``[n_dst, ...]``, in edge order."""
    indptr, e = check_offsets(indptr), check_values(e, "edge values")
    check_covers(indptr, e, "edge values")
    out = e.new_empty((indptr.numel() - 1, *e.shape[1:]))
    _native.scatter_dst(indptr, e, row_size(e), out)
    return out
