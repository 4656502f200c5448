"""Several reductions of the same rows in one pass over them on the GPU, and their gradient in one pass.

Forward, a tile of destinations holds every reduction in registers and reads a row once. The gradient is gathered, not
scattered, as in ``gpu_links``: a source adds up over its edges what sums pass on, and the share of every extremum that
it attains. Nothing is set to zero first, nothing is added to atomically, and every row is written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, require
from joestar.kernels.gpu_links import link_edges
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    combine,
    finish,
    start_value,
    tile_columns,
    tile_configs,
    tile_rows,
)
from joestar.kernels.layout import REDUCTIONS, extrema, reductions


@triton.jit
def _store(out, at, value, mask):
    if out is not None:
        tl.store(out + at, value.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["n"])
def _multi_aggregate(
    indptr, indices, x, sums, means, tops, lows, square_sums, square_means, top_ties, low_ties, n,
    TOTAL: tl.constexpr, SQUARES: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every reduction whose result is not ``None``; ``TOTAL``, ``SQUARES``: whether any needs the sum (of squares)."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    longest = tl.max(end - start)
    total = tl.zeros([ROWS, BLOCK], ACC)
    squares = tl.zeros([ROWS, BLOCK], ACC)
    top, low = start_value(2, ROWS, BLOCK, ACC), start_value(3, ROWS, BLOCK, ACC)
    at_top = tl.zeros([ROWS, BLOCK], tl.int32)
    at_low = tl.zeros([ROWS, BLOCK], tl.int32)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            values = values + (tl.load(x + source * WIDTH + column, (e < end) & inside, 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            value, valid = values[j], start + done + j < end
            if TOTAL:
                total += value
            if SQUARES:
                squares += value * value
            if top_ties is not None:
                at_top = tl.where(valid & (value > top), 1, at_top + (valid & (value == top)).to(tl.int32))
            if tops is not None:
                top = combine(top, value, valid, 2)
            if low_ties is not None:
                at_low = tl.where(valid & (value < low), 1, at_low + (valid & (value == low)).to(tl.int32))
            if lows is not None:
                low = combine(low, value, valid, 3)
        done += AHEAD
    degree, mask = end - start, (i < n) & inside
    at = i.to(tl.int64) * WIDTH + column
    _store(sums, at, total, mask)
    _store(means, at, finish(total, degree, 1, ACC), mask)
    _store(tops, at, finish(top, degree, 2, ACC), mask)
    _store(lows, at, finish(low, degree, 3, ACC), mask)
    _store(square_sums, at, squares, mask)
    _store(square_means, at, finish(squares, degree, 1, ACC), mask)
    _store(top_ties, at, at_top, mask)
    _store(low_ties, at, at_low, mask)


@op
def multi_aggregate(indptr: Tensor, indices: Tensor, x: Tensor, reduces: str, ties: bool) -> list[Tensor]:
    """Reductions ``[num_dst, F]`` of the same rows, then ties of extrema; see ``joestar.ops.multi_aggregate``."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x)
    require(x.dim() == 2, "x [N, F]", list(x.shape))
    n, width = indptr.numel() - 1, x.shape[1]
    found = {kind: x.new_empty((n, width)) for kind in reductions(reduces)}
    tied = {kind: x.new_empty((n, width), dtype=torch.int32) for kind in extrema(reduces) if ties}
    results = [*found.values(), *tied.values()]
    if n == 0 or width == 0:
        return results
    block = column_block(width)
    outputs = *map(found.get, REDUCTIONS), tied.get("max"), tied.get("min")

    def launch(config: tune.Config) -> None:
        _multi_aggregate[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, x, *outputs, n,
            TOTAL=bool(found.keys() & {"sum", "mean"}), SQUARES=bool(found.keys() & {"sum2", "mean2"}), WIDTH=width,
            ACC=accumulator(x), BLOCK=block, AHEAD=AHEAD, **config,
        )  # fmt: skip

    work = (len(results) * n + indices.numel()) * width * x.element_size()
    shape = (x.dtype, width, reduces, ties, tune.size_class(n), tune.size_class(indices.numel()))
    configs = tile_configs(width, x.element_size())
    launch(tune.choose("multi_aggregate", shape, configs, launch, work, x.device))
    return results


@triton.jit
def _share(value, y, share, at, mask, ACC: tl.constexpr):
    """What an extremum ``y`` passes on to rows that attain it."""
    attained = tl.load(y + at, mask, 0).to(ACC) == value
    return tl.where(attained, tl.load(share + at, mask, 0).to(ACC), 0)


@triton.jit(do_not_specialize=["num_src"])
def _multi_grad(
    heads, links, x, rows, squares, first, first_share, second, second_share, out, num_src,
    WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = what the edges of source ``s`` pass on, followed along its list."""
    s = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    own, valid = s.to(tl.int64) * WIDTH + column, (s < num_src) & inside
    value = tl.load(x + own, valid, 0).to(ACC)
    total = tl.zeros([ROWS, BLOCK], ACC)
    scale = tl.zeros([ROWS, BLOCK], ACC)
    e = tl.load(heads + s, s < num_src, -1)
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        at, mask = (link & 0xFFFFFFFF) * WIDTH + column, (e >= 0) & inside
        if rows is not None:
            total += tl.load(rows + at, mask, 0).to(ACC)
        if squares is not None:
            scale += tl.load(squares + at, mask, 0).to(ACC)
        if first is not None:
            total += _share(value, first, first_share, at, mask, ACC)
        if second is not None:
            total += _share(value, second, second_share, at, mask, ACC)
        e = (link >> 32).to(tl.int32)
    if squares is not None:
        total += (value + value) * scale
    tl.store(out + own, total.to(out.dtype.element_ty), valid)


@op
def multi_aggregate_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, rows: Tensor | None, squares: Tensor | None, extremes: list[Tensor],
    shares: list[Tensor],
) -> Tensor:  # fmt: skip
    """Gradient of ``multi_aggregate`` for ``x``; sums run in an order that changes between runs."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, rows=rows, squares=squares)
    for share in shares:
        check_values(share=share)
    require(len(extremes) == len(shares) <= 2, "a share for each of at most two extrema", (len(extremes), len(shares)))
    num_src, width = x.shape
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    pairs = [part for pair in zip(extremes, shares, strict=True) for part in pair]
    pairs += [None] * (4 - len(pairs))
    heads, links = link_edges(indptr, indices, num_src)
    block, n = column_block(width), indptr.numel() - 1

    def launch(config: tune.Config) -> None:
        _multi_grad[(cdiv(num_src, config["ROWS"]), cdiv(width, block))](
            heads, links, x, rows, squares, *pairs, out, num_src,
            WIDTH=width, ACC=accumulator(x, rows, squares, *shares), BLOCK=block, **config,
        )  # fmt: skip

    form = (rows is not None, squares is not None, len(shares))
    shape = (x.dtype, width, *form, tune.size_class(num_src), tune.size_class(indices.numel()))
    work = (2 * num_src + 6 * n) * width * x.element_size()
    launch(tune.choose("multi_grad", shape, tile_configs(width, x.element_size()), launch, work, x.device))
    return out
