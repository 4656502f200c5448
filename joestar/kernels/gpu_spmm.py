"""Aggregation over the in-edges of destinations on the GPU: one semiring kernel, a tile of rows per program.

A tile reads four edges at a time, so that their feature rows are in flight together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, require
from joestar.kernels.gpu_shared import shared_sum
from joestar.kernels.gpu_tiles import (
    REDUCE,
    accumulator,
    check_values,
    column_block,
    combine,
    finish,
    heads_and_width,
    row_size,
    start_value,
    tile_columns,
    tile_configs,
    tile_rows,
)
from joestar.kernels.layout import message_shape, shares_rows

AHEAD = 4
"""Edges of a row that are read before the first is used."""


@triton.jit
def row_edges(indptr, rows, count, i, n):
    """(first edge, end) of rows ``i``: of the matrix, or of the columns ``rows[:count]`` of a graph."""
    valid = i < n
    if rows is not None:
        valid = valid & (i < tl.load(count))
        i = tl.load(rows + i, valid, 0).to(tl.int64)
    return tl.load(indptr + i, valid, 0), tl.load(indptr + i + 1, valid, 0)


@triton.jit(do_not_specialize=["n"])
def _spmm(
    indptr, indices, x, weight, y, rows, count, n,
    REDUCE: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``y[i] = reduce of weight[e] * x[indices[e]]``; ``indices`` of ``None`` reads ``x[e]``.

    Axis 1 of the grid runs over ``PARTS`` parts of each head: a row of a tile has one weight.
    """
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, rows, count, i, n)
    head = tl.program_id(1) // PARTS
    column = tile_columns(tl.program_id(1) % PARTS, BLOCK)
    inside = column < HEAD_WIDTH
    column += head * HEAD_WIDTH
    longest = tl.max(end - start)
    sums = start_value(REDUCE, ROWS, BLOCK, ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = e
            if indices is not None:
                source = tl.load(indices + e, e < end, 0).to(tl.int64)
            value = tl.load(x + source * WIDTH + column, (e < end) & inside, 0).to(ACC)
            if weight is not None:
                value = value * tl.load(weight + e * HEADS + head, e < end, 0).to(ACC)
            values = values + (value,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            sums = combine(sums, values[j], start + done + j < end, REDUCE)
        done += AHEAD
    result = finish(sums, end - start, REDUCE, ACC).to(y.dtype.element_ty)
    tl.store(y + i.to(tl.int64) * STRIDE + column, result, (i < n) & inside)


def aggregate(
    indptr: Tensor, indices: Tensor | None, x: Tensor, weight: Tensor | None, reduce: str, y: Tensor,
    stride: int | None = None, rows: Tensor | None = None, count: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills ``y``, rows ``stride`` apart, with ``spmm``: of the matrix, or of its columns ``rows[:count]``."""
    n, width = y.shape[0], row_size(x)
    if n == 0 or width == 0:
        return
    heads, head_width = heads_and_width(x, weight)
    block = column_block(head_width)
    parts = cdiv(head_width, block)

    def launch(config: tune.Config) -> None:
        _spmm[(cdiv(n, config["ROWS"]), heads * parts)](
            indptr, indices, x, weight, y, rows, count, n,
            REDUCE=REDUCE[reduce], WIDTH=width, STRIDE=stride or width, HEADS=heads, HEAD_WIDTH=head_width,
            ACC=accumulator(x, weight), PARTS=parts, BLOCK=block, AHEAD=AHEAD, **config,
        )  # fmt: skip

    edges = x.shape[0] if indices is None else indices.numel()
    work = (n + (edges if rows is None else 0)) * width * x.element_size()
    shape = (x.dtype, width, heads if weight is not None else 0, reduce, tune.size_class(n), tune.size_class(edges))
    launch(tune.choose("spmm", shape, tile_configs(head_width, x.element_size()), launch, work, x.device))


@triton.jit(do_not_specialize=["n"])
def _copy_rows(x, ids, out, n, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    i = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    mask = (i < n) & (column < WIDTH)
    source = tl.load(ids + i, i < n, 0).to(tl.int64)
    tl.store(out + i.to(tl.int64) * STRIDE + column, tl.load(x + source * WIDTH + column, mask, 0), mask)


def copy_rows(x: Tensor, ids: Tensor, out: Tensor, width: int, stride: int) -> None:
    """``out[i] = x[ids[i]]``, rows of ``out`` ``stride`` apart."""
    if ids.numel() == 0 or width == 0:
        return
    block, config = column_block(width), tile_configs(width, x.element_size())[0]
    grid = (cdiv(ids.numel(), config["ROWS"]), cdiv(width, block))
    _copy_rows[grid](x, ids, out, ids.numel(), WIDTH=width, STRIDE=stride, BLOCK=block, **config)


@op
def spmm(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e of d of weight[e] * x[indices[e]]``; an empty row gives 0.

    ``x`` ``[N]``, ``[N, D]`` or ``[N, H, D]``; ``weight`` ``[E]`` or, with three dimensions, ``[E, H]``;
    ``reduce`` is "sum", "mean", "max" or "min". Sums run in edge order: the result does not change between runs. A
    sum or mean of ``x`` ``[N, 1, D]`` with ``weight`` ``[E, H]`` reads a row once for all heads: ``[num_dst, H, D]``.
    """
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight)
    y = x.new_empty((indptr.numel() - 1, *message_shape(x, weight)))
    if shares_rows(x, weight):
        require(reduce in ("sum", "mean"), "sum or mean of rows shared by heads (x.expand them for others)", reduce)
        shared_sum(indptr, indices, x, weight, reduce == "mean", y)
        return y
    aggregate(indptr, indices, x, weight, reduce, y)
    return y


@op
def scatter_dst(indptr: Tensor, e: Tensor) -> Tensor:
    """Sum of edge values ``[E, ...]`` per destination ``[num_dst, ...]``, in edge order."""
    check_offsets(indptr)
    check_values(e=e)
    out = e.new_empty((indptr.numel() - 1, *e.shape[1:]))
    aggregate(indptr, None, e, None, "sum", out)
    return out


def transposed(indptr: Tensor, indices: Tensor, dst: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges ordered by source, stably: (offsets int64 ``[num_src + 1]``, destinations, edge numbers).

    Edges past the last valid one come last, behind all offsets.
    """
    valid = torch.arange(indices.numel(), device=indices.device) < indptr[-1]
    source, order = torch.sort(torch.where(valid, indices.to(torch.int64), num_src), stable=True)
    offsets = torch.searchsorted(source, torch.arange(num_src + 1, device=indices.device))
    return offsets, dst[order], order
