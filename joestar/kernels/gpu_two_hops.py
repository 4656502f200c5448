"""Two hops sampled and aggregated in one kernel on the GPU (FuseSampleAgg 3.2): no sample and no inner row is stored.

A program holds one destination: it draws its neighbours, and for one neighbour after the other draws that one's, reads
their feature rows together, and adds up the reduced row.
"""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_fused import sample_aggregate
from joestar.kernels.gpu_hash import UNROLLED, hashed, key_state, pick_tile, picks, row_state
from joestar.kernels.gpu_launch import cdiv, check_ids, check_key, check_node_ids, check_offsets, op, power_of_two
from joestar.kernels.gpu_sampling import picked_degree, row_extent, sample_cols
from joestar.kernels.gpu_spmm import aggregate
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
    tile_rows,
)

_LARGEST = 64
"""Largest fanout of the first hop that the kernel takes."""


@triton.jit(do_not_specialize=["n", "site"])
def _two_hops(
    indptr, indices, dsts, count, key, site, node_ids, x, y, n,
    K: tl.constexpr, WIDE: tl.constexpr, INNER: tl.constexpr, REPLACE: tl.constexpr, REDUCE: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``y[i] = reduce over picks u of dsts[i] of reduce over picks w of u of x[w]``; columns in axis 1."""
    i = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    start, degree, node = row_extent(indptr, dsts, count, i, n, False)
    a, b = key_state(key, site)
    a, b = row_state(a, b, hashed(node_ids, node))
    picked = picked_degree(degree, K, REPLACE)
    slot = tl.arange(0, WIDE)[None, :]
    sources = tl.load(indices + start + pick_tile(a, b, degree, K, WIDE, REPLACE), slot < picked, 0)
    inner_a, inner_b = key_state(key, site + 1)
    total = start_value(REDUCE, ROWS, BLOCK, ACC)
    most = tl.max(picked)
    j = tl.zeros((), tl.int64)
    while j < most:
        u = tl.sum(tl.where(slot == j, sources, 0), 1, keep_dims=True).to(tl.int64)
        u_start = tl.load(indptr + u, j < picked, 0)
        u_degree = tl.load(indptr + u + 1, j < picked, 0) - u_start
        u_a, u_b = row_state(inner_a, inner_b, hashed(node_ids, u))
        slots = picks(u_a, u_b, u_degree, INNER, REPLACE)
        u_picked = picked_degree(u_degree, INNER, REPLACE)
        values = ()
        for m in tl.static_range(INNER):
            w = tl.load(indices + u_start + slots[m], m < u_picked, 0).to(tl.int64)
            values = values + (tl.load(x + w * WIDTH + column, (m < u_picked) & inside, 0),)  # noqa: RUF005
        row = start_value(REDUCE, ROWS, BLOCK, ACC)
        for m in tl.static_range(INNER):
            row = combine(row, values[m].to(ACC), m < u_picked, REDUCE)
        total = combine(total, finish(row, u_picked, REDUCE, ACC), j < picked, REDUCE)
        j += 1
    result = finish(total, picked, REDUCE, ACC).to(y.dtype.element_ty)
    tl.store(y + i.to(tl.int64) * WIDTH + column, result, (i < n) & inside)


@op
def sample_aggregate_two_hops(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, inner: int, replace: bool, key: Tensor,
    site: int, x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``reduce`` over ``k`` in-neighbours of the same over ``inner`` of theirs, of rows of ``x`` ``[N, ...]``.

    The second hop samples with call site ``site + 1``, once per node, however often the first hop picks it. Rows past
    the count are 0.
    """
    check_offsets(indptr)
    check_ids(indices, dsts)
    check_values(features=x)
    check_key(key)
    check_node_ids(node_ids, indptr.numel() - 1)
    n, width = dsts.numel(), row_size(x)
    y = x.new_empty((n, *x.shape[1:]))
    if not y.numel():
        return y
    if not 0 < k <= _LARGEST or not 0 < inner <= UNROLLED:
        bound = n * k if k >= 0 else -1
        sub, picked, count = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, bound, node_ids)
        rows, _ = sample_aggregate(indptr, indices, picked, count, inner, replace, key, site + 1, x, reduce, node_ids)
        aggregate(sub, None, rows, None, reduce, y)
        return y
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _two_hops[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, dsts, dst_count, key, site, node_ids, x, y, n,
            K=k, WIDE=power_of_two(k), INNER=inner, REPLACE=replace, REDUCE=REDUCE[reduce],
            WIDTH=width, ACC=accumulator(x), BLOCK=block, **config,
        )  # fmt: skip

    shape = (x.dtype, width, k, inner, replace, reduce, tune.size_class(n))
    configs = [{"ROWS": 1, "num_warps": 1}, {"ROWS": 1, "num_warps": 2}, {"ROWS": 2, "num_warps": 2}]
    work = n * k * inner * width * x.element_size()
    launch(tune.choose("two_hops", shape, configs, launch, work, x.device))
    return y
