"""Sums of a table's rows with a few weights each on the GPU: the gradient of a product that has a few columns.

The library would want the rows of the ids side by side, which costs twice what reading them does, and leaves most of
its tile empty. Here they are read once, several at a time, and added up in registers; programs' parts are added in
order.
"""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv
from joestar.kernels.gpu_tiles import accumulator, distinct, row_tile, tile_columns
from joestar.kernels.layout import wide_dtype

_TILE = 512
"""Numbers of a tile of rows, read at once by four warps."""


@triton.jit
def _tile_ids(ids, first, last, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Ids of ``AHEAD`` tiles of rows from ``first`` on, ``[ROWS, 1]`` each; without ``ids`` their own numbers."""
    found = ()
    for j in tl.static_range(AHEAD):
        i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
        found = found + (i if ids is None else tl.load(ids + i, i < last, 0),)  # noqa: RUF005
    return found


@triton.jit
def _plus(sums, rows, weights, i, last, HEADS: tl.constexpr, ACC: tl.constexpr):
    """``sums[h]`` plus the rows times ``weights[i, h]``, where ``i`` is in front of ``last``."""
    more = ()
    for head in tl.static_range(HEADS):
        weight = tl.load(weights + i * HEADS + head, i < last, 0).to(ACC)
        more = more + (sums[head] + rows.to(ACC) * weight,)  # noqa: RUF005
    return more


@triton.jit
def _store_sums(at, sums, column, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    for head in tl.static_range(HEADS):
        tl.store(at + head * WIDTH + column, tl.sum(sums[head], 0, keep_dims=True), column < WIDTH)


@triton.jit(do_not_specialize=["n", "few"])
def _row_sums_by(
    table, ids, weights, count, others, out, n, few,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """``out[program, h]`` = its share of the sum of ``weights[i, h] * table[ids[i]]`` over the first ``count`` rows.

    With ``others`` there are as many sums again, of the first ``few`` rows, times these.
    Axis 1 of the grid runs over the tiles of a row. ``AHEAD`` tiles of rows are read before they are added up.
    """
    column = tile_columns(0 if WIDTH <= BLOCK else tl.program_id(1), BLOCK)
    last = n.to(tl.int64)
    if count is not None:
        last = tl.minimum(last, tl.load(count))
    sums, more = (), ()
    for _ in tl.static_range(HEADS):
        sums = sums + (tl.zeros([ROWS, BLOCK], ACC),)  # noqa: RUF005
        more = more + (tl.zeros([ROWS, BLOCK], ACC),)  # noqa: RUF005
    many: tl.constexpr = ROWS * AHEAD
    first, stride = tl.program_id(0).to(tl.int64) * many, tl.num_programs(0).to(tl.int64) * many
    following = _tile_ids(ids, first, last, ROWS, AHEAD)  # a turn ahead: the ids are there when their rows are read
    while first < last:
        rows = ()
        for j in tl.static_range(AHEAD):
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            source = following[j].to(tl.int64)
            known = (i < last) & (source >= 0)  # NO_ROW is a row of zeros
            rows = rows + (tl.load(table + source * WIDTH + column, known & (column < WIDTH), 0),)  # noqa: RUF005
        following = _tile_ids(ids, first + stride, last, ROWS, AHEAD)
        for j in tl.static_range(AHEAD):
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            sums = _plus(sums, rows[j], weights, i, last, HEADS, ACC)
            if others is not None:
                more = _plus(more, rows[j], others, i, few, HEADS, ACC)
        first += stride
    program = tl.program_id(0).to(tl.int64) * (HEADS * WIDTH)
    if others is None:
        _store_sums(out + program, sums, column, HEADS, WIDTH)
    else:
        _store_sums(out + 2 * program, sums, column, HEADS, WIDTH)
        _store_sums(out + 2 * program + HEADS * WIDTH, more, column, HEADS, WIDTH)


def _sum_tiles(width: int, numbers: int, heads: int) -> list[tune.Config]:
    """Rows of a tile, of so many ``numbers`` each, tiles ahead, warps and programs; the default first."""
    most, ahead = 1 << max(0, (8192 // heads).bit_length() - 1), max(1, 32 // heads)
    tried = ((_TILE, 8, 1056), (_TILE, 4, 1056), (_TILE, 4, 2112), (2 * _TILE, 1, 1056))
    configs = []
    for tile, tiles, grid in tried:
        rows = max(1, min(tile, most) // numbers)
        warps = max(1, min(8, 4 * rows * numbers // tile))
        configs.append({"ROWS": rows, "AHEAD": min(tiles, ahead), "num_warps": warps, "GRID": grid})
    return distinct(configs, width)


def row_sums(
    table: Tensor, ids: Tensor | None, weights: Tensor, count: Tensor | None = None, others: Tensor | None = None
) -> Tensor:
    """``[H, F]``: the sums of the rows of the ids (the first ``count`` of them) times ``weights`` ``[n, H]``.

    Without ``ids`` the rows are the table's first ``n``. With ``others`` ``[m, H]`` ``[2, H, F]``: those of the first
    ``m`` rows times these, too.

    In the dtype of the weights, added up in float32 at least; the same in every run.
    """
    (n, heads), width = weights.shape, table.shape[1]
    block, found = row_tile(max(1, width)), []
    parts, sets = cdiv(width, block), 1 if others is None else 2

    def launch(config: tune.Config) -> None:
        config = dict(config)
        each = config["ROWS"] * config["AHEAD"]
        grid = max(1, min(config.pop("GRID") // parts, cdiv(n, each)))
        shape = (grid, *([] if others is None else [2]), heads, width)
        partial = weights.new_empty(shape, dtype=wide_dtype(weights.dtype))
        _row_sums_by[(grid, parts)](
            table, ids, weights, count, others, partial, n, 0 if others is None else others.shape[0],
            HEADS=heads, WIDTH=width, ACC=accumulator(table, weights), BLOCK=block, **config,
        )  # fmt: skip
        found[:] = [added_up(partial, weights.dtype)]

    if not (n and heads and width):
        return weights.new_zeros((heads, width) if others is None else (2, heads, width))
    shape = (table.dtype, weights.dtype, ids is None, others is None, heads, width, tune.size_class(n))
    work = n * width * table.element_size()
    launch(tune.choose("row_sums_by", shape, _sum_tiles(width, block, sets * heads), launch, work, table.device))
    return found[0]
