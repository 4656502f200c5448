"""Small products whose rows are no multiple of 16 bytes, on the GPU.

The library has slow kernels for such rows: 10 us for 1,000 x 256 by 256 x 47 in bfloat16. Small tiles keep enough of a
GPU busy, and what they load is little.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, on_device
from joestar.kernels.gpu_mm_relu import check_product
from joestar.kernels.gpu_tiles import accumulator
from joestar.kernels.layout import power_of_two
from joestar.kernels.machine import in_tensor_cores, products_in_tf32

_ROWS = 16
"""Of a tile, the fewest that tensor cores take."""
_DEPTH, _SLOW_DEPTH = 512, 128
"""Bytes of a row that are loaded at a time, for tensor cores; where none multiplies, registers hold fewer."""


@triton.jit(do_not_specialize=["n"])
def _product(
    x, weight, bias, out, n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of ``out = x @ weight + bias``."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, WIDTH, DEPTH):
        k = first + tl.arange(0, DEPTH)
        rows = tl.load(x + i * WIDTH + k[None, :], (i < n) & (k < WIDTH)[None, :], 0)
        inside = (k < WIDTH)[:, None] & (column < COLUMNS)[None, :]
        block = tl.load(weight + k[:, None] * DOWN + column[None, :] * RIGHT, inside, 0)
        total = tl.dot(rows, block, total, input_precision=PRECISION, out_dtype=ACC)
    if bias is not None:
        total += tl.load(bias + column, column < COLUMNS, 0).to(ACC)[None, :]
    tl.store(out + i * COLUMNS + column[None, :], total.to(out.dtype.element_ty), (i < n) & (column < COLUMNS)[None, :])


@on_device
def mm_unaligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight + bias``; float32 in TF32 where PyTorch's own products are allowed to."""
    check_product(x, weight, bias)
    (n, width), columns = x.shape, weight.shape[1]
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty((n, columns))
    if not out.numel():
        return out
    block = min(64, max(16, power_of_two(columns)))
    deep = (_DEPTH if in_tensor_cores(x.dtype) else _SLOW_DEPTH) // x.element_size()
    _product[(cdiv(n, _ROWS), cdiv(columns, block))](
        x, weight, bias, out, n, WIDTH=width, COLUMNS=columns, DOWN=weight.stride(0), RIGHT=weight.stride(1),
        PRECISION="tf32" if x.dtype != torch.float32 or products_in_tf32() else "ieee", ACC=accumulator(x, weight),
        ROWS=_ROWS, BLOCK=block, DEPTH=min(max(16, power_of_two(width)), deep), num_warps=4,
    )  # fmt: skip
    return out
