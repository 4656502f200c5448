"""Several matrices turned on the GPU, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, op, require

_TILE = 32
_TOGETHER = 16
"""Matrices of one launch: a kernel has a limited number of arguments."""


@triton.jit
def _turn(
    matrices, outs, FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Matrix ``i`` belongs to the programs from ``FIRST[i]`` on, a tile each."""
    program = tl.program_id(0)
    for i in tl.static_range(COUNT):
        if (program >= FIRST[i]) & (program < FIRST[i + 1]):
            across: tl.constexpr = (COLUMNS[i] + TILE - 1) // TILE
            tile = program - FIRST[i]
            row, column = tile // across * TILE + tl.arange(0, TILE), tile % across * TILE + tl.arange(0, TILE)
            inside = (row < ROWS[i])[:, None] & (column < COLUMNS[i])[None, :]
            values = tl.load(matrices[i] + row[:, None] * COLUMNS[i] + column[None, :], inside, 0)
            tl.store(outs[i] + column[:, None] * ROWS[i] + row[None, :], tl.trans(values), tl.trans(inside))


@op
def turn_all(matrices: list[Tensor]) -> list[Tensor]:
    """``matrix.t()`` of every matrix, stored."""
    for matrix in matrices:
        require(matrix.dim() == 2, "matrices", f"{list(matrix.shape)}")
        require(matrix.numel() < 2**31, "fewer than 2**31 numbers", f"{matrix.numel()}")
    outs = [matrix.new_empty((matrix.shape[1], matrix.shape[0])) for matrix in matrices]
    pairs = [pair for pair in zip(matrices, outs, strict=True) if pair[0].numel()]
    for begin in range(0, len(pairs), _TOGETHER):
        part = pairs[begin : begin + _TOGETHER]
        first = [0]
        for matrix, _ in part:
            first.append(first[-1] + cdiv(matrix.shape[0], _TILE) * cdiv(matrix.shape[1], _TILE))
        _turn[(first[-1],)](
            tuple(matrix for matrix, _ in part), tuple(out for _, out in part), FIRST=tuple(first),
            ROWS=tuple(matrix.shape[0] for matrix, _ in part), COLUMNS=tuple(matrix.shape[1] for matrix, _ in part),
            COUNT=len(part), TILE=_TILE, num_warps=4,
        )  # fmt: skip
    return outs
