"""Fused sample-gather-aggregation on the GPU (thesis figure 5.7, FuseSampleAgg 3): the sample is never stored.

A program holds a few rows: it draws their picks in registers, then reads one feature row per pick, all reads
independent of each other. Programs past the rows count edges, so that the count costs no launch of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_hash import UNROLLED, hashed, key_state, pick_tile, picks, row_state
from joestar.kernels.gpu_launch import cdiv, check_ids, check_key, check_node_ids, check_offsets, op, power_of_two
from joestar.kernels.gpu_sampling import picked_degree, row_extent, sample_cols
from joestar.kernels.gpu_spmm import aggregate, copy_rows
from joestar.kernels.gpu_tiles import (
    REDUCE,
    accumulator,
    check_values,
    column_block,
    combine,
    finish,
    row_size,
    start_value,
    tile_columns,
    tile_configs,
    tile_rows,
)
from joestar.kernels.layout import cat_width

_LARGEST = 64
"""Largest fanout of the fused kernel."""
_COUNTED = 256
"""Rows whose edges one counting program adds up."""
_PART = 1024
"""Columns of a row that a program takes: beside reading as many, drawing the picks once more costs little."""
_HELD = 160
"""Most numbers that a thread holds of a tile's picks."""


@triton.jit
def _count_rows(indptr, dsts, count, total, first, n, k, REPLACE: tl.constexpr, COUNTED: tl.constexpr):
    """Adds the picked degrees of ``COUNTED`` rows to the total."""
    i = first * COUNTED + tl.arange(0, COUNTED)
    _, degree, _ = row_extent(indptr, dsts, count, i, n, False)
    tl.atomic_add(total, tl.sum(picked_degree(degree, k, REPLACE), 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "k"])
def _count_edges(indptr, dsts, count, total, n, k, REPLACE: tl.constexpr, COUNTED: tl.constexpr):
    _count_rows(indptr, dsts, count, total, tl.program_id(0), n, k, REPLACE, COUNTED)


@triton.jit
def _reduce_picks(
    x, y, own, factor, bases, picked, i, node, out, n, first,
    K: tl.constexpr, REDUCE: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of rows ``i``: a read per pick, all independent of each other."""
    column = first + tile_columns(0, BLOCK)
    inside = column < WIDTH
    values = ()
    for j in tl.static_range(K):
        mask = (j < picked) & inside
        values = values + (tl.load(x + bases[j] + column, mask, 0),)  # noqa: RUF005
    if own is not None or factor is not None:
        mine = tl.load(x + node * WIDTH + column, (i < n) & inside, 0)
    if own is not None:
        tl.store(own + out + column, mine, (i < n) & inside)
    sums = start_value(REDUCE, ROWS, BLOCK, ACC)
    for j in tl.static_range(K):
        sums = combine(sums, values[j].to(ACC), j < picked, REDUCE)
    result = finish(sums, picked, REDUCE, ACC)
    if factor is not None:
        result += mine.to(ACC) * tl.load(factor).to(ACC)
    tl.store(y + out + column, result.to(y.dtype.element_ty), (i < n) & inside)


@triton.jit(do_not_specialize=["n", "site", "row_programs", "parts"])
def _sample_aggregate(
    indptr, indices, dsts, count, key, site, node_ids, x, y, own, factor, total, n, row_programs, parts,
    K: tl.constexpr, WIDE: tl.constexpr, REPLACE: tl.constexpr, REDUCE: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, COUNTED: tl.constexpr,
    TAIL: tl.constexpr, ONES: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of ``y`` (and of ``own``: the destinations' own features), both ``STRIDE`` apart; the number of edges.

    ``TAIL`` columns follow the own rows: 1, 0, ... with ``ONES``, else 0. With ``factor``, own features times it are
    added to ``y``. Rows of several tiles have ``parts``, of ``PART`` tiles each; a program takes one of them, a tile
    after the other, and its neighbours draw the same picks and read the same ids, from the cache.
    """
    program = tl.program_id(0)
    if program >= row_programs:
        _count_rows(indptr, dsts, count, total, program - row_programs, n, K, REPLACE, COUNTED)
    else:
        i = tile_rows(ROWS)
        if parts is not None:
            i = program // parts * ROWS + tl.arange(0, ROWS)[:, None]
        start, degree, node = row_extent(indptr, dsts, count, i, n, False)
        a, b = key_state(key, site)
        a, b = row_state(a, b, hashed(node_ids, node))
        picked = picked_degree(degree, K, REPLACE)
        bases = ()
        if WIDE == 0:
            slots = picks(a, b, degree, K, REPLACE)
            for j in tl.static_range(K):
                source = tl.load(indices + start + slots[j], j < picked, 0)
                bases = bases + (source.to(tl.int64) * WIDTH,)  # noqa: RUF005
        else:
            slot = tl.arange(0, WIDE)[None, :]
            sources = tl.load(indices + start + pick_tile(a, b, degree, K, WIDE, REPLACE), slot < picked, 0)
            for j in tl.static_range(K):
                source = tl.sum(tl.where(slot == j, sources, 0), 1, keep_dims=True)
                bases = bases + (source.to(tl.int64) * WIDTH,)  # noqa: RUF005
        out = i.to(tl.int64) * STRIDE
        if parts is None:
            _reduce_picks(x, y, own, factor, bases, picked, i, node, out, n, 0, K, REDUCE, WIDTH, ACC, BLOCK, ROWS)
        else:
            tile = program % parts * PART
            last = tl.minimum(tile + PART, (WIDTH + BLOCK - 1) // BLOCK)
            while tile < last:
                first = tile * BLOCK
                _reduce_picks(
                    x, y, own, factor, bases, picked, i, node, out, n, first, K, REDUCE, WIDTH, ACC, BLOCK, ROWS
                )  # fmt: skip
                tile += 1
        if TAIL > 0:
            tail = tile_columns(0, 16)
            value = tl.where(tail == 0, 1.0 if ONES else 0.0, 0.0) + tl.zeros([ROWS, 16], tl.float32)
            mask = (i < n) & (tail < TAIL)
            if parts is not None:
                mask = mask & (program % parts == 0)
            tl.store(own + out + WIDTH + tail, value.to(own.dtype.element_ty), mask)


def _tile(width: int, k: int) -> int:
    """Columns of a tile; the picks of a row that is not one tile fit registers."""
    block = column_block(width)
    if width > block and k * block > 32 * _HELD:
        block = 128 if k <= 40 else 64
    return block


def _fused(
    indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, y, own, stride, factor, ones, node_ids
) -> Tensor:
    """Fills ``y`` (and ``own``) through one kernel; returns the edge count."""
    n, width = dsts.numel(), row_size(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    counters = cdiv(n, _COUNTED)
    wide = power_of_two(k) if k > UNROLLED else 0
    block = _tile(width, k)
    parts = cdiv(width, _PART) if width > block else None

    def launch(config: tune.Config) -> None:
        row_programs = cdiv(n, config["ROWS"]) * (parts or 1)
        _sample_aggregate[(row_programs + counters,)](
            indptr, indices, dsts, dst_count, key, site, node_ids, x, y, own, factor, total, n, row_programs, parts,
            K=k, WIDE=wide, REPLACE=replace, REDUCE=REDUCE[reduce],
            WIDTH=width, STRIDE=stride, ACC=accumulator(x), COUNTED=_COUNTED,
            TAIL=max(0, stride - 2 * width) if own is not None else 0, ONES=ones, PART=_PART // block, BLOCK=block,
            **config,
        )  # fmt: skip

    shape = (x.dtype, width, k, replace, reduce, own is not None, factor is not None, tune.size_class(n))
    configs = tile_configs(width, x.element_size())
    if wide:  # the picks of a row then need reductions, which are cheap within a warp
        configs = [{"ROWS": 1, "num_warps": 1}, *configs[:2]]
    config = tune.choose(
        "sample_aggregate", shape, configs, launch, n * (k + 1) * width * x.element_size(), x.device, reset=total.zero_
    )
    launch(config)
    return total


def _two_steps(
    indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, y, own, stride, factor, ones, node_ids
) -> Tensor:
    """The same for other fanouts: all edges straight from the graph, else by way of a sample."""
    n, width = dsts.numel(), row_size(x)
    if k < 0:
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        _count_edges[(cdiv(n, _COUNTED),)](indptr, dsts, dst_count, total, n, k, REPLACE=False, COUNTED=_COUNTED)
        aggregate(indptr, indices, x, None, reduce, y, stride, dsts, dst_count)
    else:
        sub, picked, total = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, n * k, node_ids)
        aggregate(sub, picked, x, None, reduce, y, stride)
    if own is not None:
        copy_rows(x, dsts, own, width, stride)
        if stride > 2 * width:
            own[:, width:] = 0
            own[:, width] = float(ones)
    if factor is not None:
        y.addcmul_(torch.index_select(x, 0, dsts), factor.to(y.dtype))
    return total


def _run(
    indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids, y, own, stride, factor=None,
    ones=False,
) -> Tensor:  # fmt: skip
    check_offsets(indptr)
    check_ids(indices, dsts)
    check_values(features=x)
    check_key(key)
    check_node_ids(node_ids, indptr.numel() - 1)
    if not dsts.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    fits = 0 < k <= _LARGEST and row_size(x) > 0
    args = (indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, y, own, stride, factor, ones, node_ids)
    return _fused(*args) if fits else _two_steps(*args)


@op
def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, ...]``: (y ``[n_dst, ...]``, edge count).

    ``reduce`` is "sum", "mean", "max" or "min"; float32 accumulation for 16-bit features. Rows past the count are 0.
    """
    y = x.new_empty((dsts.numel(), *x.shape[1:]))
    return y, _run(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids, y, None, row_size(x))


@op
def sample_aggregate_self(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` and the destinations' own rows ``x[dsts]``: (y, own, edge count)."""
    y, own = x.new_empty((dsts.numel(), *x.shape[1:])), x.new_empty((dsts.numel(), *x.shape[1:]))
    draws = (k, replace, key, site)
    return y, own, _run(indptr, indices, dsts, dst_count, *draws, x, reduce, node_ids, y, own, row_size(x))


@op
def sample_aggregate_cat(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, ones: bool = True, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[aggregated rows, own rows, 1, 0, ...]``, for one GEMM: (``[num_dst, cat_width(D, ones)]``, edge count).

    Without ``ones`` the 1 is a 0, or not there.
    """
    width = x.shape[1]
    both = x.new_empty((dsts.numel(), cat_width(width, ones)))
    y, own = both[:, :width], both[:, width:]
    return both, _run(
        indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids, y, own, both.shape[1], ones=ones
    )


@op
def sample_aggregate_own(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, own: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` plus ``own * x[dsts]``, ``own`` one entry: (y, edge count)."""
    check_values(own=own)
    y = x.new_empty((dsts.numel(), *x.shape[1:]))
    draws, factor = (k, replace, key, site), own.contiguous()
    return y, _run(indptr, indices, dsts, dst_count, *draws, x, reduce, node_ids, y, None, row_size(x), factor)
