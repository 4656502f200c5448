"""Batch norm of the valid rows of a padded set on the GPU: statistics, and sums of the gradient, in one pass each.

Programs keep a mean and the squares about it for every slot of their tiles, updated row by row (Welford, 1962), and
these are put together as Chan, Golub and LeVeque do it (1979): no digits cancel, whatever the mean. All sums run in the
same order in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, check_rows, op, require
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    of_columns,
    tile_columns,
    tile_configs,
    tile_rows,
)

_PROGRAMS, _TILE = 512, 4096
"""Most programs that go through rows, each of which leaves a part of the sums; numbers of a tile."""
_SECTOR, _PARTS = 8, 256
"""Columns, and parts at a time, of a program that puts parts together."""


@triton.jit(do_not_specialize=["n"])
def _moments(x, count, parts, seen, n, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """``parts[program]`` ``[2, WIDTH]``: mean, and squares about it, of its share of the valid rows; ``seen``: of how
    many."""
    valid = tl.minimum(tl.load(count), n)
    column = tile_columns(tl.program_id(1), BLOCK)
    mean, squares = tl.zeros([ROWS, BLOCK], ACC), tl.zeros([ROWS, BLOCK], ACC)
    rows = tl.zeros([ROWS, 1], ACC)
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < valid:
        i = first + tl.arange(0, ROWS)[:, None]
        value = tl.load(x + i * WIDTH + column, (i < valid) & (column < WIDTH), 0).to(ACC)
        rows += (i < valid).to(ACC)
        away = tl.where(i < valid, value - mean, 0)
        mean += away / tl.maximum(rows, 1)
        squares += away * (value - mean)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    total = tl.sum(rows, 0, keep_dims=True)
    whole = tl.sum(mean * rows, 0, keep_dims=True) / tl.maximum(total, 1)
    apart = mean - whole
    about = tl.sum(squares + rows * apart * apart, 0, keep_dims=True)
    at = parts + tl.program_id(0).to(tl.int64) * 2 * WIDTH + column
    tl.store(at, whole, column < WIDTH)
    tl.store(at + WIDTH, about, column < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(seen + tl.program_id(0) + tl.zeros_like(total).to(tl.int32), total)


@triton.jit
def _part(parts, seen, p, programs, column, WIDTH: tl.constexpr):
    """(means, squares, numbers of rows) of parts ``p`` ``[PARTS, 1]``."""
    inside = (p < programs) & (column < WIDTH)
    at = parts + p.to(tl.int64) * 2 * WIDTH + column
    return tl.load(at, inside, 0), tl.load(at + WIDTH, inside, 0), tl.load(seen + p, p < programs, 0)


@triton.jit(do_not_specialize=["programs"])
def _join_moments(
    parts, seen, mean, var, scale, programs, eps: tl.float64,
    WIDTH: tl.constexpr, ACC: tl.constexpr, SECTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Mean, unbiased variance (NaN of one row), and 1 over the root of the biased one plus ``eps``, of all parts."""
    column = tile_columns(tl.program_id(0), SECTOR)
    sums, rows = tl.zeros([PARTS, SECTOR], ACC), tl.zeros([PARTS, 1], ACC)
    first = 0
    while first < programs:
        means, _, number = _part(parts, seen, first + tl.arange(0, PARTS)[:, None], programs, column, WIDTH)
        sums += means * number
        rows += number
        first += PARTS
    total = tl.sum(rows, 0, keep_dims=True)
    whole = tl.sum(sums, 0, keep_dims=True) / tl.maximum(total, 1)
    sums = tl.zeros([PARTS, SECTOR], ACC)
    first = 0
    while first < programs:
        means, squares, number = _part(parts, seen, first + tl.arange(0, PARTS)[:, None], programs, column, WIDTH)
        sums += squares + number * (means - whole) * (means - whole)
        first += PARTS
    about = tl.sum(sums, 0, keep_dims=True)
    tl.store(mean + column, whole, column < WIDTH)
    tl.store(var + column, about / (total - 1), column < WIDTH)
    spread = about / tl.maximum(total, 1) + tl.full((), eps, ACC)
    tl.store(scale + column, 1 / tl.sqrt(spread), column < WIDTH)


@triton.jit(do_not_specialize=["n"])
def _normalised(
    x, mean, scale, weight, bias, count, out, n,
    WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out`` = (x - mean) * scale * weight + bias of the valid rows, ``bias`` of the others."""
    i, column = tile_rows(ROWS).to(tl.int64), tile_columns(tl.program_id(1), BLOCK)
    valid = i < tl.load(count)
    value = tl.load(x + i * WIDTH + column, valid & (i < n) & (column < WIDTH), 0).to(ACC)
    factor = of_columns(scale, column, column < WIDTH, ACC)
    if weight is not None:
        factor *= of_columns(weight, column, column < WIDTH, ACC)
    y = tl.where(valid, (value - of_columns(mean, column, column < WIDTH, ACC)) * factor, 0)
    if bias is not None:
        y += of_columns(bias, column, column < WIDTH, ACC)
    tl.store(out + i * WIDTH + column, y.to(out.dtype.element_ty), (i < n) & (column < WIDTH))


@triton.jit(do_not_specialize=["n"])
def _gradient_sums(
    grad, x, mean, scale, count, parts, n,
    WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``parts[program]`` ``[2, WIDTH]``: the sums of ``grad``, and of its products with the normalised rows."""
    valid = tl.minimum(tl.load(count), n)
    column = tile_columns(tl.program_id(1), BLOCK)
    centre, factor = of_columns(mean, column, column < WIDTH, ACC), of_columns(scale, column, column < WIDTH, ACC)
    sums, products = tl.zeros([ROWS, BLOCK], ACC), tl.zeros([ROWS, BLOCK], ACC)
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < valid:
        i = first + tl.arange(0, ROWS)[:, None]
        inside = (i < valid) & (column < WIDTH)
        by = tl.load(grad + i * WIDTH + column, inside, 0).to(ACC)
        value = tl.load(x + i * WIDTH + column, inside, 0).to(ACC)
        sums += by
        products += by * (value - centre)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    at = parts + tl.program_id(0).to(tl.int64) * 2 * WIDTH + column
    tl.store(at, tl.sum(sums, 0, keep_dims=True), column < WIDTH)
    tl.store(at + WIDTH, tl.sum(products, 0, keep_dims=True) * factor, column < WIDTH)


def _checked(x: Tensor, count: Tensor, **vectors: Tensor | None) -> tuple[int, int, torch.dtype]:
    """(n, D, the dtype of sums)."""
    check_values(x=x, **vectors)
    require(x.dim() == 2, "x [n, D]", list(x.shape))
    n, width = x.shape
    check_rows(n)
    require(count.dtype == torch.int64 and count.numel() == 1, "count int64 []", f"{count.dtype} {list(count.shape)}")
    for name, vector in vectors.items():
        require(vector is None or vector.shape == (width,), f"{name} [{width}]", vector is not None and vector.shape)
    return n, width, torch.promote_types(x.dtype, torch.float32)


def _through(n: int, width: int) -> tuple[dict, int]:
    """(how programs go through rows, how many of them there are)."""
    block = column_block(width)
    rows = max(1, _TILE // block)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows}, min(_PROGRAMS, cdiv(n, rows))


@op
def batch_norm_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``joestar.ops.dense.batch_norm_rows``."""
    n, width, wide = _checked(x, count, weight=weight, bias=bias)
    out = torch.empty_like(x)
    mean, var, scale = (x.new_empty(width, dtype=wide) for _ in range(3))
    if not width:
        return out, mean, var, scale
    if not n:  # as of a batch without rows
        return out, mean.zero_(), var.zero_().neg_(), scale.fill_(eps).rsqrt_()
    through, programs = _through(n, width)
    acc, columns = accumulator(x), cdiv(width, through["BLOCK"])
    parts, seen = x.new_empty((programs, 2, width), dtype=wide), x.new_empty(programs, dtype=wide)
    _moments[(programs, columns)](x, count, parts, seen, n, ACC=acc, **through)
    _join_moments[(cdiv(width, _SECTOR),)](
        parts, seen, mean, var, scale, programs, eps, WIDTH=width, ACC=acc, SECTOR=_SECTOR, PARTS=_PARTS
    )

    def launch(config: tune.Config) -> None:
        _normalised[(cdiv(n, config["ROWS"]), columns)](
            x, mean, scale, weight, bias, count, out, n, WIDTH=width, ACC=acc, BLOCK=through["BLOCK"], **config
        )

    shape = (x.dtype, width, weight is not None, bias is not None, tune.size_class(n))
    configs, work = tile_configs(width, x.element_size()), 2 * x.numel() * x.element_size()
    launch(tune.choose("batch_norm_rows", shape, configs, launch, work, x.device))
    return out, mean, var, scale


@op
def batch_norm_rows_sums(grad: Tensor, x: Tensor, count: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """See ``joestar.ops.dense.batch_norm_rows``."""
    n, width, wide = _checked(x, count, mean=mean, scale=scale)
    right = grad.shape == x.shape and grad.dtype == x.dtype
    require(right, f"grad {x.dtype} {list(x.shape)}", f"{grad.dtype} {list(grad.shape)}")
    if not x.numel():
        return x.new_zeros((2, width), dtype=wide)
    through, programs = _through(n, width)
    parts = x.new_empty((programs, 2, width), dtype=wide)
    _gradient_sums[(programs, cdiv(width, through["BLOCK"]))](
        grad, x, mean, scale, count, parts, n, ACC=accumulator(x), **through
    )
    return added_up(parts)
