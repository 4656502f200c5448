"""Sums over the rows of a matrix on the GPU: partial sums of a few programs, then the sums of these."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, op, power_of_two, require
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns

_PROGRAMS, _TILE = 528, 4096
"""Programs, four per multiprocessor of an H200; numbers of a tile."""
_SECTOR = 8
"""Columns that a program of the second stage adds up: 32 bytes in float32, the least that memory reads."""


@triton.jit(do_not_specialize=["n"])
def _column_sums(x, out, n, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """``out[program]`` = the sum of its share of the rows."""
    column = tile_columns(tl.program_id(1), BLOCK)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < n:
        i = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(x + i * WIDTH + column, (i < n) & (column < WIDTH), 0).to(ACC)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    at = out + tl.program_id(0).to(tl.int64) * WIDTH + column
    tl.store(at, tl.sum(sums, 0, keep_dims=True), column < WIDTH)


@triton.jit(do_not_specialize=["n"])
def _add_up(x, out, n, width, ACC: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """``out[column]`` = the sum of the column."""
    column = tile_columns(tl.program_id(0), COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], ACC)
    first = tl.zeros((), tl.int32)
    while first < n:
        i = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(x + i.to(tl.int64) * width + column, (i < n) & (column < width), 0).to(ACC)
        first += ROWS
    tl.store(out + column, tl.sum(sums, 0, keep_dims=True).to(out.dtype.element_ty), column < width)


def added_up(partial: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the programs' parts ``[programs, ...]`` in ``dtype``, by default theirs: the same in every run."""
    out = partial.new_empty(partial.shape[1:], dtype=dtype)
    n, width = partial.shape[0], out.numel()
    if width:
        rows = min(4096, power_of_two(n))
        warps = min(32, max(1, rows // 128))
        _add_up[(cdiv(width, _SECTOR),)](
            partial, out, n, width, ACC=accumulator(partial), COLUMNS=_SECTOR, ROWS=rows, num_warps=warps
        )
    return out


@op
def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of ``x`` ``[n, D]``: ``[D]``; added up in float32 at least, the same in every run."""
    check_values(x=x)
    require(x.dim() == 2, "a matrix", list(x.shape))
    n, width = x.shape
    if not (n and width):
        return x.new_zeros(width)
    block = column_block(width)
    rows = max(1, _TILE // block)
    programs = min(_PROGRAMS, cdiv(n, rows))
    out = x.new_empty((programs, width), dtype=torch.promote_types(x.dtype, torch.float32))
    _column_sums[(programs, cdiv(width, block))](x, out, n, WIDTH=width, ACC=accumulator(x), BLOCK=block, ROWS=rows)
    return added_up(out, x.dtype)
