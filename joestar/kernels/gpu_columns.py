"""Sums over the rows of a matrix on the GPU: partial sums of a few programs, then the sums of these."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, op, require
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns

_PROGRAMS, _TILE = 528, 4096
"""Programs, four per multiprocessor of an H200; numbers of a tile."""


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


def added_up(partial: Tensor) -> Tensor:
    """The sum of the programs' parts ``[programs, ...]``, as a matrix times a vector: no TF32, and fast."""
    ones = partial.new_ones(partial.shape[0])
    return torch.mv(partial.flatten(1).t(), ones).view(partial.shape[1:])


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
    return added_up(out).to(x.dtype)
