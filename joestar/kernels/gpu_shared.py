"""Sums of rows that several heads share, on the GPU: a program per destination holds all heads in registers.

``x`` ``[N, 1, ...]`` and ``weight`` ``[E, H]``: the row of an edge is read once, whatever the number of heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_edge_products import edge_products
from joestar.kernels.gpu_launch import cdiv, power_of_two
from joestar.kernels.gpu_tiles import accumulator, column_block, row_size, row_tile, tile_columns

_AHEAD = 4
_LARGEST = 2048
"""Accumulators of a program; wider rows are cut into parts."""


@triton.jit
def _edge_weights(weight, e, valid, head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """Weights ``[heads, 1]`` of one edge."""
    return tl.load(weight + e * HEADS + head, valid & (head < HEADS), 0).to(ACC)


@triton.jit
def _sum(
    indptr, indices, x, weight, y,
    MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y[i, h] = sum of weight[e, h] * x[indices[e]]``."""
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    head, column = tl.arange(0, TALL)[:, None], tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    sums = tl.zeros([TALL, BLOCK], ACC)
    first = start
    while first < end:
        rows = ()
        for j in tl.static_range(AHEAD):
            source = tl.load(indices + first + j, first + j < end, 0).to(tl.int64)
            rows = rows + (tl.load(x + source * WIDTH + column, (first + j < end) & inside, 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            sums += rows[j] * _edge_weights(weight, first + j, first + j < end, head, HEADS, ACC)
        first += AHEAD
    if MEAN:
        sums = sums / tl.maximum(end - start, 1).to(ACC)
    tl.store(y + (i * HEADS + head) * WIDTH + column, sums.to(y.dtype.element_ty), (head < HEADS) & inside)


@triton.jit
def own_rows(
    grad, i, degree, head, column, MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr
):
    """Rows ``[heads, columns]`` of destination ``i``, over its degree for a mean; not read where it has no edges."""
    mask = (head < HEADS) & (column < WIDTH) & (degree > 0)
    value = tl.load(grad + (i * HEADS + head) * WIDTH + column, mask, 0).to(ACC)
    return value / tl.maximum(degree, 1).to(ACC) if MEAN else value


@triton.jit
def _scatter(
    indptr, indices, grad, weight, out,
    MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[indices[e]] += sum over h of weight[e, h] * grad[row of e, h]``, by atomic additions."""
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    head, column = tl.arange(0, TALL)[:, None], tile_columns(tl.program_id(1), BLOCK)
    own = own_rows(grad, i, end - start, head, column, MEAN, HEADS, WIDTH, ACC)
    first = start
    while first < end:
        for j in tl.static_range(AHEAD):
            valid = first + j < end
            source = tl.load(indices + first + j, valid, 0).to(tl.int64)
            scale = _edge_weights(weight, first + j, valid, head, HEADS, ACC)
            message = tl.sum(own * scale, 0, keep_dims=True)
            tl.atomic_add(out + source * WIDTH + column, message, valid & (column < WIDTH), sem="relaxed")
        first += AHEAD


@triton.jit
def _dots(
    indptr, indices, x, grad, out,
    MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[e, h] = <x[indices[e]], grad[row of e, h]>``: one pass over the row for all heads."""
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    head, column = tl.arange(0, TALL)[:, None], tile_columns(0, BLOCK)
    own = own_rows(grad, i, end - start, head, column, MEAN, HEADS, WIDTH, ACC)
    first = start
    while first < end:
        rows = ()
        for j in tl.static_range(AHEAD):
            valid = first + j < end
            source = tl.load(indices + first + j, valid, 0).to(tl.int64)
            rows = rows + (tl.load(x + source * WIDTH + column, valid & (column < WIDTH), 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            value = tl.sum(own * rows[j], 1, keep_dims=True).to(out.dtype.element_ty)
            tl.store(out + (first + j) * HEADS + head, value, (first + j < end) & (head < HEADS))
        first += AHEAD


def tile_settings(heads: int, width: int, whole: bool, *values: Tensor) -> dict:
    """Tile of a program that holds all heads of one destination; ``whole``: with whole rows, else parts of them."""
    tall = power_of_two(heads)
    block = power_of_two(width) if whole else min(column_block(width), max(32, _LARGEST // tall))
    warps = min(8, max(1, tall * block // 256))
    return {"ACC": accumulator(*values), "TALL": tall, "BLOCK": block, "num_warps": warps}


def _launch(kernel, indptr: Tensor, operands: tuple, heads: int, width: int, mean: bool, whole: bool) -> None:
    settings = tile_settings(heads, width, whole, *operands[1:])
    grid = (indptr.numel() - 1, cdiv(width, settings["BLOCK"]))
    kernel[grid](indptr, *operands, MEAN=mean, HEADS=heads, WIDTH=width, AHEAD=_AHEAD, **settings)


def shared_sum(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor, mean: bool, y: Tensor) -> None:
    """Fills ``y`` ``[num_dst, H, ...]`` with sums (means) of ``weight[e, h] * x[indices[e]]``."""
    if y.numel():
        _launch(_sum, indptr, (indices, x, weight, y), y.shape[1], row_size(x), mean, False)


def shared_scatter(indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor, mean: bool, out: Tensor) -> None:
    """Adds ``weight[e, h] * grad[row of e, h]``, summed over heads, to ``out[indices[e]]``."""
    if out.numel() and grad.numel() and indices.numel():
        _launch(_scatter, indptr, (indices, grad, weight, out), weight.shape[1], row_size(out), mean, False)


def shared_dots(indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, mean: bool, out: Tensor) -> None:
    """Fills ``out`` ``[E, H]``, which is 0 behind the last edge, with ``<x[indices[e]], grad[row of e, h]>``."""
    width = row_size(x)
    if not (out.numel() and grad.numel() and indices.numel()):
        return
    if width > row_tile(width):
        rows = x.reshape(-1, 1, width), grad.reshape(grad.shape[0], -1, width)
        edge_products(indptr, indices, *rows, out, mean=mean)
    else:
        _launch(_dots, indptr, (indices, x, grad, out), out.shape[1], width, mean, True)
