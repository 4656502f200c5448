"""Weights of several heads as one matrix on the GPU."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, on_device

_BLOCK = 1024


@triton.jit
def _block_diagonal(
    weight, out, size, down, right, HEADS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // (HEADS * WIDTH), at % (HEADS * WIDTH)
    inside = (at < size) & (row // COLUMNS == column // WIDTH)
    source = row // COLUMNS * (COLUMNS * WIDTH) + row % COLUMNS * down + column % WIDTH * right
    tl.store(out + at, tl.load(weight + source, inside, 0), at < size)


@on_device
def block_diagonal(weight: Tensor) -> Tensor:
    """``[H C, H F]`` with the matrices of ``weight`` ``[H, C, F]`` on the diagonal and zeros elsewhere.

    ``weight`` may be transposed in its last two dimensions; every head's numbers must be together.
    """
    heads, columns, width = weight.shape
    out = weight.new_empty((heads * columns, heads * width))
    down, right = weight.stride()[1:]
    if weight.stride(0) != columns * width or {down, right} - {1, columns, width}:
        weight = weight.contiguous()
        down, right = width, 1
    if out.numel():
        _block_diagonal[(cdiv(out.numel(), _BLOCK),)](
            weight, out, out.numel(), down, right, HEADS=heads, COLUMNS=columns, WIDTH=width, BLOCK=_BLOCK
        )
    return out
