"""Sums over the rows of a matrix on the GPU: partial sums of a few programs, then the sums of these."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, check_rows, op, power_of_two, require
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, row_size, tile_columns

_PROGRAMS, _TILE = 528, 4096
"""Programs, four per multiprocessor of an H200; numbers of a tile."""
_SECTOR = 8
"""Columns that a program of the second stage adds up: 32 bytes in float32, the least that memory reads."""
_SHARE = 256
"""Rows that a program of the second stage adds up, if a third one follows."""


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


@triton.jit(do_not_specialize=["n", "share"])
def _add_up(x, out, n, share, width, ACC: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """``out[part]`` = the sums of the columns over rows ``[part * share, (part + 1) * share)``."""
    column = tile_columns(tl.program_id(0), COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], ACC)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, n)
    while first < last:
        i = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(x + i.to(tl.int64) * width + column, (i < last) & (column < width), 0).to(ACC)
        first += ROWS
    at = out + tl.program_id(1).to(tl.int64) * width + column
    tl.store(at, tl.sum(sums, 0, keep_dims=True).to(out.dtype.element_ty), column < width)


def added_up(partial: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the programs' parts ``[programs, ...]`` in ``dtype``, by default theirs: the same in every run."""
    n = partial.shape[0]
    if n > 2 * _SHARE:
        partial = _added_up(partial, partial.new_empty((cdiv(n, _SHARE), *partial.shape[1:])), _SHARE)
    return _added_up(partial, partial.new_empty(partial.shape[1:], dtype=dtype), partial.shape[0])


def _added_up(partial: Tensor, out: Tensor, share: int) -> Tensor:
    """Sums of every ``share`` parts."""
    n, width = partial.shape[0], row_size(partial)
    if width:
        rows = min(512, power_of_two(share))
        _add_up[(cdiv(width, _SECTOR), cdiv(n, share))](
            partial, out, n, share, width, ACC=accumulator(partial), COLUMNS=_SECTOR, ROWS=rows, num_warps=4
        )
    return out


@op
def column_sums(x: Tensor, dtype: str | None = None) -> Tensor:
    """Sums over the rows of ``x`` ``[n, D]``: ``[D]`` in ``dtype``, by default that of the rows; added up in float32 at
    least, the same in every run."""
    check_values(x=x)
    require(x.dim() == 2, "a matrix", list(x.shape))
    made = x.dtype if dtype is None else getattr(torch, dtype)
    n, width = x.shape
    check_rows(n)
    if not (n and width):
        return x.new_zeros(width, dtype=made)
    block = column_block(width)
    rows = max(1, _TILE // block)
    programs = min(_PROGRAMS, cdiv(n, rows))
    out = x.new_empty((programs, width), dtype=torch.promote_types(x.dtype, torch.float32))
    _column_sums[(programs, cdiv(width, block))](x, out, n, WIDTH=width, ACC=accumulator(x), BLOCK=block, ROWS=rows)
    return added_up(out, made)
