"""The product of gathered rows on the GPU: its loads gather, so the rows are never stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, check_ids, check_rows, op, power_of_two
from joestar.kernels.gpu_row_sums import NARROW, row_sums
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns, tile_configs, tile_rows

_CONFIGS = [
    {"ROWS": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3},
    {"ROWS": 128, "DEPTH": 32, "num_warps": 4, "num_stages": 3},
    {"ROWS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 4},
    {"ROWS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 2},
]


@triton.jit(do_not_specialize=["n"])
def _gather_linear(
    table, ids, weight, bias, out, n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``out[i] = table[ids[i]] @ weight.T + bias``: a block of rows and of columns per program."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + i, i < n, 0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, WIDTH, DEPTH):
        k = first + tl.arange(0, DEPTH)
        rows = tl.load(table + source[:, None] * WIDTH + k[None, :], (i < n)[:, None] & (k < WIDTH)[None, :], 0)
        inside = (column < COLUMNS)[None, :] & (k < WIDTH)[:, None]
        part = tl.load(weight + column[None, :] * WIDTH + k[:, None], inside, 0)
        total = tl.dot(rows.to(part.dtype), part, total, input_precision=PRECISION, out_dtype=ACC)
    if bias is not None:
        total += tl.load(bias + column, column < COLUMNS, 0).to(ACC)[None, :]
    at = out + i.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), (i < n)[:, None] & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["n"])
def _gather_rows(table, ids, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    i, column = tile_rows(ROWS), tile_columns(tl.program_id(1), BLOCK)
    source = tl.load(ids + i, i < n, 0).to(tl.int64)
    mask = (i < n) & (column < WIDTH)
    rows = tl.load(table + source * WIDTH + column, mask, 0)
    tl.store(out + i.to(tl.int64) * WIDTH + column, rows.to(out.dtype.element_ty), mask)


def gather_rows(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` of a table ``[N, F]``, stored: ``[n, F]`` in ``dtype``."""
    n, width = ids.numel(), table.shape[1]
    check_rows(n)
    out = table.new_empty((n, width), dtype=dtype)
    if not out.numel():
        return out
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _gather_rows[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            table, ids, out, n, WIDTH=width, BLOCK=block, **config
        )

    shape = (table.dtype, dtype, width, tune.size_class(n))
    work = n * width * (table.element_size() + out.element_size())
    launch(tune.choose("gather_rows", shape, tile_configs(width, table.element_size()), launch, work, table.device))
    return out


@op
def gather_linear_weight_grad(table: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """``grad.T @ table[ids]`` ``[C, F]`` in the dtype of ``grad``; the rows are stored for the library's product.

    With few columns they are added up as they are read.
    """
    check_ids(ids)
    check_values(table=table, grad=grad)
    if grad.shape[1] <= NARROW:
        return row_sums(table, ids, grad)
    return grad.t() @ gather_rows(table, ids, grad.dtype)


@op
def gather_linear(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[n, C]`` in the weight's dtype; float32 products in TF32 where PyTorch's own are allowed to."""
    check_ids(ids)
    check_values(table=table, weight=weight, bias=bias)
    n, (columns, width) = ids.numel(), weight.shape
    check_rows(n)
    out = weight.new_empty((n, columns))
    if not out.numel():
        return out
    precision = "tf32" if weight.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"
    block = min(128, max(16, power_of_two(columns)))

    def launch(config: tune.Config) -> None:
        _gather_linear[(cdiv(n, config["ROWS"]), cdiv(columns, block))](
            table, ids, weight, bias, out, n,
            WIDTH=width, COLUMNS=columns, PRECISION=precision, ACC=accumulator(table, weight), BLOCK=block, **config,
        )  # fmt: skip

    shape = (table.dtype, weight.dtype, width, columns, precision, bias is not None, tune.size_class(n))
    work = n * (width * table.element_size() + columns * weight.element_size())
    launch(tune.choose("gather_linear", shape, _CONFIGS, launch, work, out.device))
    return out
