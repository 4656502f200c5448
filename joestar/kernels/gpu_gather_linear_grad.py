"""Gradients of products of gathered rows on the GPU: the rows are stored for the library's products, or gathered again
as they are multiplied."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up, column_sums
from joestar.kernels.gpu_join import split_columns_all
from joestar.kernels.gpu_launch import cdiv, check_ids, check_rows, multiprocessors, op, power_of_two
from joestar.kernels.gpu_row_sums import row_sums
from joestar.kernels.gpu_tiles import check_values, column_block, tile_columns, tile_configs, tile_rows
from joestar.kernels.layout import CAT_ALIGNMENT, NARROW
from joestar.kernels.machine import in_tensor_cores

_TILE = 64
"""Columns of the smallest tile in which a GPU's library multiplies."""
_COLUMNS, _WIDTH = 64, 128
"""Columns of gradients and of rows whose products a program adds up: 128 registers of each of 64 threads hold them."""
_STORED = {"STORED": 1}
_READ = [
    {"ROWS": 64, "AHEAD": 2, "PER_CORE": 4, "num_warps": 2},
    {"ROWS": 32, "AHEAD": 2, "PER_CORE": 4, "num_warps": 2},
]
"""Settings of programs that gather, ``PER_CORE`` on a multiprocessor at a time. Of two warps: on a Hopper four multiply
by instructions that want float32 turned, which costs more than they save (159 us in place of more than 228 for
611,504 rows of 100 columns and 128 of gradients; 296 if the rows are stored)."""


@triton.jit(do_not_specialize=["n"])
def _gather_rows(table, ids, out, n, WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows ``[x, 1, 0, ...]`` of ``WIDE`` columns, ``[x]`` where that is their width; ``x`` is 0 of ``NO_ROW``."""
    i, column = tile_rows(ROWS), tile_columns(tl.program_id(1), BLOCK)
    source = tl.load(ids + i, i < n, -1).to(tl.int64)
    rows = tl.load(table + source * WIDTH + column, (source >= 0) & (column < WIDTH), 0).to(out.dtype.element_ty)
    if WIDE > WIDTH:
        rows = tl.where(column == WIDTH, 1, rows).to(out.dtype.element_ty)
    tl.store(out + i.to(tl.int64) * WIDE + column, rows, (i < n) & (column < WIDE))


def gather_rows(table: Tensor, ids: Tensor, dtype: torch.dtype, ones: bool = False) -> Tensor:
    """Rows ``ids`` of a table ``[N, F]``, stored: ``[n, F]`` in ``dtype``; with ``ones`` ``[x, 1, 0, ...]``."""
    n, width = ids.numel(), table.shape[1]
    wide = with_ones(width) if ones else width
    check_rows(n)
    out = table.new_empty((n, wide), dtype=dtype)
    if not out.numel():
        return out
    block = column_block(wide)

    def launch(config: tune.Config) -> None:
        _gather_rows[(cdiv(n, config["ROWS"]), cdiv(wide, block))](
            table, ids, out, n, WIDTH=width, WIDE=wide, BLOCK=block, **config
        )

    shape = (table.dtype, dtype, width, wide, tune.size_class(n))
    work = n * (width * table.element_size() + wide * out.element_size())
    launch(tune.choose("gather_rows", shape, tile_configs(wide, table.element_size()), launch, work, table.device))
    return out


def with_ones(width: int) -> int:
    """Columns of rows of ``width`` with a column of ones, and zeros up to the alignment of products."""
    return cdiv(width + 1, CAT_ALIGNMENT) * CAT_ALIGNMENT


def ones_are_free(width: int) -> bool:
    """Whether a column of ones makes a product no tile wider."""
    return cdiv(with_ones(width), _TILE) == cdiv(width, _TILE)


@triton.jit
def _part_of(part, grads, sums, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """(gradient of a part, its sums, its columns, which one the part begins with); all columns are multiples of
    ``EVEN``."""
    grad, total, columns, first = grads[0], sums[0], COLUMNS[0], part * BLOCK
    before: tl.constexpr = 0
    for place in tl.static_range(1, len(COLUMNS)):
        before += (COLUMNS[place - 1] + BLOCK - 1) // BLOCK
        grad = tl.where(part >= before, grads[place], grad)
        total = tl.where(part >= before, sums[place], total)
        columns = tl.where(part >= before, COLUMNS[place], columns)
        first = tl.where(part >= before, (part - before) * BLOCK, first)
    return grad, total, tl.multiple_of(columns, EVEN), first


@triton.jit
def _rows_of(grad, i, column, n, columns):
    """Rows ``i`` of a gradient, these columns; 0 behind the last ones."""
    inside = (i < n)[:, None] & (column < columns)[None, :]
    return tl.load(grad + i.to(tl.int64)[:, None] * columns + column[None, :], inside, 0)


@triton.jit(do_not_specialize=["n", "tiles"])
def _gather_linear_grad(
    table, ids, grads, sums, n, tiles,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """``sums[g][program]`` = ``grads[g].T @ table[ids]`` ``[COLUMNS[g], WIDTH]`` of its share of the rows, not rounded.

    The row of id ``NO_ROW`` is 0. A program keeps its part of the result, one of ``ACROSS`` blocks of columns of all
    gradients, and goes through tiles of rows, of which the next one is on its way while one is multiplied: rows of the
    table to shared memory, gradients, which are turned, to registers (Triton would turn them on the way to shared
    memory, four bytes at a time). Programs of the same rows follow one another: all but the first find these in the
    second-level cache.
    """
    parts: tl.constexpr = ACROSS * ((WIDTH + DEPTH - 1) // DEPTH)
    part, program, step = tl.program_id(0) % parts, tl.program_id(0) // parts, tl.num_programs(0) // parts
    grad, out, columns, first = _part_of(part % ACROSS, grads, sums, COLUMNS, BLOCK, EVEN)
    column, k = first + tl.arange(0, BLOCK), (part // ACROSS) * DEPTH + tl.arange(0, DEPTH)
    total = tl.zeros([BLOCK, DEPTH], out.dtype.element_ty)
    i = program * ROWS + tl.arange(0, ROWS)
    following = _rows_of(grad, i, column, n, columns)
    for _ in tl.range(program, tiles, step, num_stages=AHEAD):
        source = tl.load(ids + i, i < n, -1).to(tl.int64)
        rows = tl.load(table + source[:, None] * WIDTH + k[None, :], (source >= 0)[:, None] & (k < WIDTH)[None, :], 0)
        by = following
        i += step * ROWS
        following = _rows_of(grad, i, column, n, columns)
        total = tl.dot(tl.trans(by), rows, total, input_precision="tf32", out_dtype=out.dtype.element_ty)
    out += program.to(tl.int64) * columns * WIDTH
    tl.store(out + column[:, None] * WIDTH + k[None, :], total, (column < columns)[:, None] & (k < WIDTH)[None, :])


def _multiplied(table: Tensor, ids: Tensor, grads: list[Tensor], config: tune.Config) -> list[Tensor]:
    """``grad.T @ rows`` ``[C, F]`` of every gradient ``[n, C]``, in its dtype; ``rows`` are the first ``n``."""
    n, width, columns = grads[0].shape[0], table.shape[1], tuple(grad.shape[1] for grad in grads)
    check_rows(n)
    if not n:
        return [grad.new_zeros((grad.shape[1], width)) for grad in grads]
    block, depth = min(_COLUMNS, max(16, power_of_two(max(columns)))), min(_WIDTH, max(16, power_of_two(width)))
    across, tiles = sum(cdiv(count, block) for count in columns), cdiv(n, config["ROWS"])
    parts = across * cdiv(width, depth)
    programs = min(tiles, max(1, config["PER_CORE"] * multiprocessors(table.device) // parts))
    sums = tuple(table.new_empty((programs, count, width), dtype=torch.float32) for count in columns)
    config = {name: value for name, value in config.items() if name != "PER_CORE"}
    _gather_linear_grad[(programs * parts,)](
        table, ids, tuple(grads), sums, n, tiles, WIDTH=width, COLUMNS=columns, ACROSS=across, EVEN=math.gcd(*columns),
        BLOCK=block, DEPTH=depth, **config,
    )  # fmt: skip
    return [added_up(part, grad.dtype) for part, grad in zip(sums, grads, strict=True)]


def _read(table: Tensor, ids: Tensor, grads: list[Tensor], config: tune.Config) -> list[Tensor]:
    """``_multiplied``, by a launch for those of as many rows."""
    found: dict[int, Tensor] = {}
    for n in {grad.shape[0]: None for grad in grads}:
        places = [place for place, grad in enumerate(grads) if grad.shape[0] == n]
        found |= zip(places, _multiplied(table, ids, [grads[p] for p in places], config), strict=True)
    return [found[place] for place in range(len(grads))]


@op
def gather_linear_grad(table: Tensor, ids: Tensor, grads: list[Tensor], biases: int) -> list[Tensor]:
    """``grad.T @ table[ids]`` ``[C, F]`` of every gradient ``[n, C]``, or ``[m, C]`` of the first ``m`` rows, then the
    sums ``[C]`` of the first ``biases``.

    The rows are gathered once, and stored for the library's products, or, where one dtype is multiplied by tensor
    cores, by products of ours, which store none: by a launch for every number of rows, 64 columns of gradients at a
    time. Timing decides, but for where sums must have a fixed order. In stored rows a column of ones makes the sums,
    unless the products would be a tile wider: where it does, rows are stored, else gradients are read again for them.
    Gradients of few columns are added up as the rows are read, which are not stored.
    """
    check_ids(ids)
    check_values(table=table, **{f"grads[{i}]": grad for i, grad in enumerate(grads)})
    if all(grad.shape[1] <= NARROW for grad in grads):
        sums = [row_sums(table, ids[: grad.shape[0]], grad) for grad in grads]
        return sums + [column_sums(grad) for grad in grads[:biases]]
    width, first = table.shape[1], grads[0]
    ones = biases > 0 and ones_are_free(width)

    def launch(config: tune.Config) -> list[Tensor]:
        if "STORED" not in config:
            return _read(table, ids, grads, config) + [column_sums(grad) for grad in grads[:biases]]
        rows = gather_rows(table, ids[: max(grad.shape[0] for grad in grads)], first.dtype, ones)
        firsts = [rows[: grad.shape[0]] for grad in grads]
        if not ones:
            sums = [column_sums(grad) for grad in grads[:biases]]
            return [grad.t() @ first for grad, first in zip(grads, firsts, strict=True)] + sums
        joined = [grad.t() @ first for grad, first in zip(grads[:biases], firsts, strict=False)]
        parts = split_columns_all(joined, [2] * biases, [width, 0] * biases)
        rest = [grad.t() @ first[:, :width] for grad, first in zip(grads[biases:], firsts[biases:], strict=True)]
        return parts[::2] + rest + parts[1::2]

    of_grads = ("x".join(map(str, (grad.shape[1], tune.size_class(grad.shape[0])))) for grad in grads)
    shape = (table.dtype, first.dtype, width, biases, *of_grads)
    row = width * table.element_size()
    work = sum(grad.shape[0] * (row + grad.shape[1] * grad.element_size()) for grad in grads)
    return launch(tune.choose("gather_linear_grad", shape, candidates(table, first, ones), launch, work, table.device))


def candidates(table: Tensor, grad: Tensor, ones: bool = False) -> list[tune.Config]:
    """Launch settings: stored rows, and, where tensor cores multiply what is gathered as it is, those of programs that
    gather; tiles of fewer rows of wide tables, whose addresses need registers, too.

    Stored rows alone where ``ones`` among them make the sums of biases: reading gradients again for those takes what
    gathering saves, and hides less behind other work (a step of GATv2 1.648 ms, 1.638 with stored rows).
    """
    if ones or table.dtype != grad.dtype or not in_tensor_cores(grad.dtype) or not table.shape[1]:
        return [_STORED]
    return [_STORED, *_READ[table.shape[1] > _WIDTH :]]
