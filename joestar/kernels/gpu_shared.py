"""Sums of rows that several heads share, on the GPU: a program per destination holds all heads in registers.

``x`` ``[N, 1, ...]`` and ``weight`` ``[E, H]``: the row of an edge is read once, whatever the number of heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, power_of_two
from joestar.kernels.gpu_tiles import accumulator, column_block, row_size, tile_columns

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


def tile_settings(heads: int, width: int, *values: Tensor) -> dict:
    """Tile of a program that holds all heads of one destination, and of a row as much as fits."""
    tall = power_of_two(heads)
    block = min(column_block(width), max(32, _LARGEST // tall))
    warps = min(8, max(1, tall * block // 256))
    return {"ACC": accumulator(*values), "TALL": tall, "BLOCK": block, "num_warps": warps}


def _launch(kernel, indptr: Tensor, operands: tuple, heads: int, width: int, mean: bool) -> None:
    settings = tile_settings(heads, width, *operands[1:])
    grid = (indptr.numel() - 1, cdiv(width, settings["BLOCK"]))
    kernel[grid](indptr, *operands, MEAN=mean, HEADS=heads, WIDTH=width, AHEAD=_AHEAD, **settings)


def shared_sum(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor, mean: bool, y: Tensor) -> None:
    """Fills ``y`` ``[num_dst, H, ...]`` with sums (means) of ``weight[e, h] * x[indices[e]]``."""
    if y.numel():
        _launch(_sum, indptr, (indices, x, weight, y), y.shape[1], row_size(x), mean)
