"""Edge values on the GPU: sampled dense-dense products and edge softmax. A program holds a tile of destinations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_edge_products import edge_products
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, fill_tail, op, power_of_two
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    row_size,
    row_tile,
    tile_columns,
    tile_rows,
)

_OPS = {"add": 0, "sub": 1, "mul": 2, "div": 3, "copy_lhs": 4, "copy_rhs": 5}
_TAIL = 128


@triton.jit
def _edge_value(left, right, OP: tl.constexpr):
    if OP == 0:
        return left + right
    elif OP == 1:
        return left - right
    elif OP == 2:
        return left * right
    elif left.dtype == tl.float32:
        return tl.div_rn(left, right)
    else:
        return left / right


@triton.jit(do_not_specialize=["n", "num_edges"])
def _sddmm(
    indptr, indices, lhs, rhs, out, n, num_edges,
    OP: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elementwise values of the edges of a tile of destinations; then a share of the zeros behind the last edge."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    used = (start < end) & inside
    if OP != 4:
        right = tl.load(rhs + i.to(tl.int64) * WIDTH + column, used, 1).to(ACC)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            if OP == 5:
                value = right
            else:
                source = tl.load(indices + e, e < end, 0).to(tl.int64)
                mask = (e < end) & inside
                value = tl.load(lhs + source * WIDTH + column, mask, 0).to(ACC)
                if OP != 4:
                    value = _edge_value(value, right, OP)
            values = values + (value,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            e = start + done + j
            mask = (e < end) & inside
            tl.store(out + e * WIDTH + column, values[j].to(out.dtype.element_ty), mask)
        done += AHEAD
    fill_tail(out, tl.load(indptr + n) * WIDTH, num_edges.to(tl.int64) * WIDTH, 0, TAIL)


@triton.jit(do_not_specialize=["n", "num_edges"])
def _dots(
    indptr, indices, lhs, rhs, out, n, num_edges,
    MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, TAIL: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Inner products over one head of the edges of a tile of destinations (mean: over the degree); then zeros."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    head = tl.program_id(1)
    column = tile_columns(0, BLOCK)
    inside = column < WIDTH
    column += head * WIDTH
    used = (start < end) & inside
    right = tl.load(rhs + i.to(tl.int64) * (HEADS * WIDTH) + column, used, 0).to(ACC)
    if MEAN:
        right = right / tl.maximum(end - start, 1).to(ACC)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            mask = (e < end) & inside
            left = tl.load(lhs + source * (HEADS * WIDTH) + column, mask, 0).to(ACC)
            values = values + (tl.sum(left * right, 1, keep_dims=True),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            e = start + done + j
            tl.store(out + e * HEADS + head, values[j].to(out.dtype.element_ty), e < end)
        done += AHEAD
    fill_tail(out, tl.load(indptr + n) * HEADS, num_edges.to(tl.int64) * HEADS, 0, TAIL)


def edge_dots(
    indptr: Tensor, indices: Tensor, lhs: Tensor, rhs: Tensor, heads: int, width: int, mean: bool, out: Tensor
) -> None:
    """Fills ``out`` ``[E, heads]`` with ``<lhs[source], rhs[destination]>`` per head, 0 past the last edge."""
    n, num_edges = indptr.numel() - 1, indices.numel()
    if not out.numel():
        return
    block = power_of_two(width)
    if width > row_tile(width):
        products = lhs.reshape(-1, heads, width), rhs.reshape(n, heads, width), out.zero_().view(num_edges, heads)
        edge_products(indptr, indices, *products, mean=mean)
        return
    rows = max(1, 512 // block)
    _dots[(max(1, cdiv(n, rows)), heads)](
        indptr, indices, lhs, rhs, out, n, num_edges,
        MEAN=mean, HEADS=heads, WIDTH=width, ACC=accumulator(lhs, rhs), TAIL=_TAIL, AHEAD=AHEAD,
        BLOCK=block, ROWS=rows, num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip


@op
def sddmm(indptr: Tensor, indices: Tensor, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
    """Edge values from source rows ``lhs`` and destination rows ``rhs``: ``[E, ...]``, 0 past the last edge.

    ``op`` is "add", "sub", "mul", "div" (equal trailing shapes), "dot" (over the last dimension), "copy_lhs" (``rhs``
    is not read) or "copy_rhs" (``lhs`` is not read).
    """
    check_offsets(indptr)
    check_ids(indices)
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    check_values(lhs=lhs, rhs=rhs)
    rows, num_edges = rhs if lhs is None else lhs, indices.numel()
    dtype = rows.dtype
    if lhs is not None and rhs is not None:
        if lhs.shape[1:] != rhs.shape[1:]:
            expected, came = list(lhs.shape[1:]), list(rhs.shape[1:])
            raise ValueError(f"GPU kernel: expected rows of one shape, {expected}, got {came}")
        dtype = torch.promote_types(lhs.dtype, rhs.dtype)
    shape = rows.shape[1:-1] if op == "dot" else rows.shape[1:]
    out = torch.empty((num_edges, *shape), dtype=dtype, device=rows.device)
    if not out.numel():
        return out
    if op == "dot":
        edge_dots(indptr, indices, lhs, rhs, row_size(out), rows.shape[-1], False, out)
        return out
    n, width = indptr.numel() - 1, row_size(rows)
    block = column_block(width)
    tile_rows = max(1, 256 // block)
    _sddmm[(max(1, cdiv(n, tile_rows)), cdiv(width, block))](
        indptr, indices, lhs, rhs, out, n, num_edges,
        OP=_OPS[op], WIDTH=width, ACC=accumulator(lhs, rhs), TAIL=_TAIL, AHEAD=AHEAD,
        BLOCK=block, ROWS=tile_rows, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n", "num_edges"])
def _edge_softmax(
    indptr, s, out, n, num_edges,
    WIDTH: tl.constexpr, ACC: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The maximum of each row, the sum of exponentials, then the quotients; then zeros behind the last edge."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    longest = tl.max(end - start)
    top = tl.full([ROWS, BLOCK], float("-inf"), ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        for j in tl.static_range(AHEAD):
            e = start + done + j
            mask = (e < end) & inside
            value = tl.load(s + e * WIDTH + column, mask, float("-inf")).to(ACC)
            top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
        done += AHEAD
    total = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        for j in tl.static_range(AHEAD):
            e = start + done + j
            mask = (e < end) & inside
            value = tl.load(s + e * WIDTH + column, mask, 0).to(ACC)
            total += tl.where(mask, tl.exp(value - top), 0)
        done += AHEAD
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        mask = (e < end) & inside
        at = e * WIDTH + column
        value = tl.load(s + at, mask, 0).to(ACC)
        tl.store(out + at, (tl.exp(value - top) / total).to(out.dtype.element_ty), mask)
        done += 1
    fill_tail(out, tl.load(indptr + n) * WIDTH, num_edges.to(tl.int64) * WIDTH, 0, TAIL)


@triton.jit(do_not_specialize=["n", "num_edges"])
def _edge_softmax_grad(
    indptr, y, grad, out, n, num_edges,
    WIDTH: tl.constexpr, ACC: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``y * (grad - sum over the row of y * grad)``; then zeros behind the last edge."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    longest = tl.max(end - start)
    total = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        for j in tl.static_range(AHEAD):
            e = start + done + j
            mask = (e < end) & inside
            at = e * WIDTH + column
            total += tl.load(y + at, mask, 0).to(ACC) * tl.load(grad + at, mask, 0).to(ACC)
        done += AHEAD
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        mask = (e < end) & inside
        at = e * WIDTH + column
        value = tl.load(y + at, mask, 0).to(ACC) * (tl.load(grad + at, mask, 0).to(ACC) - total)
        tl.store(out + at, value.to(out.dtype.element_ty), mask)
        done += 1
    fill_tail(out, tl.load(indptr + n) * WIDTH, num_edges.to(tl.int64) * WIDTH, 0, TAIL)


def _per_row(kernel, indptr: Tensor, values: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Runs a kernel of two passes over the edges ``[E, ...]`` of each row."""
    n, width = indptr.numel() - 1, row_size(out)
    if out.numel():
        block = column_block(width)
        rows = max(1, 64 // block)
        kernel[(max(1, cdiv(n, rows)), cdiv(width, block))](
            indptr, *values, out, n, out.shape[0],
            WIDTH=width, ACC=accumulator(out), TAIL=_TAIL, AHEAD=AHEAD, BLOCK=block, ROWS=rows, num_warps=2,
        )  # fmt: skip
    return out


@op
def edge_softmax(indptr: Tensor, s: Tensor) -> Tensor:
    """Softmax of edge values ``[E, ...]`` over the in-edges of each destination; 0 past the last edge."""
    check_offsets(indptr)
    check_values(s=s)
    return _per_row(_edge_softmax, indptr, (s,), torch.empty_like(s))


@op
def edge_softmax_grad(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``edge_softmax``: ``out * (grad - sum over the row of out * grad)``."""
    check_offsets(indptr)
    check_values(out=out, grad=grad)
    return _per_row(_edge_softmax_grad, indptr, (out, grad), torch.empty_like(out))
