"""Edge values on the CPU: sampled dense-dense products, edge softmax and gradients with one value per edge.

Every function has the signature of its namesake in ``joestar.ops.reference``. Elementwise results have its bits; inner
products and exponentials agree to rounding, and have the same bits for any number of threads.
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
)
from joestar.kernels.checks import row_size as _row_size
from joestar.kernels.cpu_spmm import REDUCE
from joestar.kernels.layout import message_shape, shares_rows

EDGE_OPS = {"add": 0, "sub": 1, "mul": 2, "div": 3, "copy_lhs": 4, "copy_rhs": 5}


def sddmm(indptr: Tensor, indices: Tensor, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
    """Edge values from source rows ``lhs`` and destination rows ``rhs``: ``[E, ...]``, 0 past the last edge.

    ``op`` is "add", "sub", "mul", "div" (equal trailing shapes), "dot" (over the last dimension), "copy_lhs" (``rhs``
    is not read) or "copy_rhs" (``lhs`` is not read).
    """
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    if op == "copy_lhs":
        rhs = None
    elif op == "copy_rhs":
        lhs = None
    lhs = None if lhs is None else check_values(lhs, "lhs")
    rhs = None if rhs is None else check_values(rhs, "rhs")
    if rhs is not None:
        check_rows(rhs, indptr.numel() - 1, "rhs")
    if lhs is not None and rhs is not None:
        require(lhs.shape[1:] == rhs.shape[1:], f"rows of one shape, {list(lhs.shape[1:])}", f"{list(rhs.shape[1:])}")
        lhs, rhs = common_values(lhs, rhs)
    rows = rhs if lhs is None else lhs
    if op == "dot":
        out = rows.new_empty((indices.numel(), *rows.shape[1:-1]))
        width = rows.shape[-1]
        _native.sddmm_dot(indptr, indices, lhs, rhs, _row_size(out), width, False, False, out)
        return out
    out = rows.new_empty((indices.numel(), *rows.shape[1:]))
    _native.sddmm(indptr, indices, lhs, rhs, _row_size(rows), EDGE_OPS[op], out)
    return out


def spmm_grad_weight(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, weight_like: Tensor, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for the edge weights, in the shape and dtype of ``weight_like``."""
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    check_rows(grad, indptr.numel() - 1, "grad")
    check_rows(weight_like, indices.numel(), "weight_like")
    x, grad = common_values(x, grad)
    shared, row = shares_rows(x, weight_like), list(message_shape(x, weight_like))
    require(list(grad.shape[1:]) == row, f"a gradient with rows {row}", f"{list(grad.shape[1:])}")
    heads, width = heads_and_width(grad, weight_like)
    out = x.new_empty((indices.numel(), *weight_like.shape[1:]))
    _native.sddmm_dot(indptr, indices, x, grad, heads, width, shared, REDUCE[reduce] == REDUCE["mean"], out)
    return out.to(weight_like.dtype)


def edge_softmax(indptr: Tensor, s: Tensor) -> Tensor:
    """Softmax of edge values ``[E, ...]`` over the in-edges of each destination; 0 past the last edge."""
    indptr, s = check_offsets(indptr), check_values(s, "edge values")
    check_covers(indptr, s, "edge values")
    out = s.new_empty(s.shape)
    _native.edge_softmax(indptr, s, s.shape[0], _row_size(s), out)
    return out


def edge_softmax_grad(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``edge_softmax``: ``out * (grad - sum over the row of out * grad)``."""
    indptr = check_offsets(indptr)
    out, grad = check_values(out, "out"), check_values(grad.to(out.dtype), "grad")
    check_covers(indptr, out, "out")
    check_rows(grad, out.shape[0], "grad")
    grad_s = out.new_empty(out.shape)
    _native.edge_softmax_grad(indptr, out, grad, out.shape[0], _row_size(out), grad_s)
    return grad_s
