"""Aggregated and own rows of an inner layer side by side on the GPU, and the gradient of that in one pass.

The gradient is gathered, not scattered: every edge is linked into a list of its source, and each source adds up its
own edges. Nothing is set to zero first, no row is added to atomically, and the rows are written once, masked already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns, tile_configs, tile_rows
from joestar.kernels.layout import cat_width


@triton.jit(do_not_specialize=["n"])
def _aggregate_cat(
    indptr, indices, x, both, n,
    MEAN: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``both[i] = [sum or mean of x[sources of i], x[i], 1, 0, ...]``."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    longest = tl.max(end - start)
    own = tl.load(x + i.to(tl.int64) * WIDTH + column, (i < n) & inside, 0)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            values = values + (tl.load(x + source * WIDTH + column, (e < end) & inside, 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            sums += values[j]
        done += AHEAD
    if MEAN:
        sums = sums / tl.maximum(end - start, 1).to(ACC)
    out = both + i.to(tl.int64) * STRIDE + column
    tl.store(out, sums.to(both.dtype.element_ty), (i < n) & inside)
    tl.store(out + WIDTH, own, (i < n) & inside)
    if tl.program_id(1) == 0:
        tail = tile_columns(0, TAIL)
        value = tl.where(tail == 0, 1.0, 0.0) + tl.zeros([ROWS, TAIL], tl.float32)
        at = both + i.to(tl.int64) * STRIDE + 2 * WIDTH + tail
        tl.store(at, value.to(both.dtype.element_ty), (i < n) & (tail < STRIDE - 2 * WIDTH))


@op
def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, reduce: str) -> Tensor:
    """``[sum or mean over in-edges, x[i], 1, 0, ...]`` for every destination ``i``; see ``joestar.ops.reference``."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x)
    n, width = indptr.numel() - 1, x.shape[1]
    both = x.new_empty((n, cat_width(width)))
    if not n:
        return both
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _aggregate_cat[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, x, both, n,
            MEAN=reduce == "mean", WIDTH=width, STRIDE=both.shape[1], ACC=accumulator(x), AHEAD=AHEAD,
            BLOCK=block, TAIL=16, **config,
        )  # fmt: skip

    shape = (x.dtype, width, reduce, tune.size_class(n), tune.size_class(indices.numel()))
    work = (3 * n + indices.numel()) * width * x.element_size()
    launch(tune.choose("aggregate_cat", shape, tile_configs(width, x.element_size()), launch, work, x.device))
    return both


@triton.jit(do_not_specialize=["n"])
def _link_edges(
    indptr, indices, heads, links, scales, n, MEAN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Puts every edge at the front of its source's list; an edge's link is ``next << 32 | row``."""
    i = tile_rows(BLOCK)
    start, end = row_edges(indptr, None, None, i, n)
    scale = 1.0 / tl.maximum(end - start, 1).to(tl.float32)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done + tile_columns(0, SLOTS)
        valid = e < end
        source = tl.load(indices + e, valid, 0).to(tl.int64)
        after = tl.atomic_xchg(heads + source, e.to(tl.int32), valid, sem="relaxed")
        tl.store(links + e, (after.to(tl.int64) << 32) | i.to(tl.int64), valid)
        if MEAN:
            tl.store(scales + e, scale + tl.zeros([BLOCK, SLOTS], tl.float32), valid)
        done += SLOTS


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _gather_grad(
    heads, links, scales, grad, y, out, num_src, num_dst, factor,
    MEAN: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = the gradients of the rows that read source ``s``; where ``y`` is not positive, 0."""
    s = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    e = tl.load(heads + s, s < num_src, -1)
    at = s.to(tl.int64) * WIDTH + column
    mine = (s < num_dst) & inside
    total = tl.load(grad + s.to(tl.int64) * STRIDE + WIDTH + column, mine, 0).to(ACC)
    if y is not None:
        result = tl.load(y + at, (s < num_src) & inside, 0)
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        row = link & 0xFFFFFFFF
        value = tl.load(grad + row * STRIDE + column, (e >= 0) & inside, 0).to(ACC)
        if MEAN:
            value = value * tl.load(scales + e, e >= 0, 0).to(ACC)
        total += value
        e = (link >> 32).to(tl.int32)
    if y is not None:
        total = tl.where(result > 0, total * factor, 0)
    tl.store(out + at, total.to(out.dtype.element_ty), (s < num_src) & inside)


@op
def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, num_src: int, width: int, reduce: str, y: Tensor | None, scale: float
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, width]``; with ``y`` through its ReLU and dropout, too.

    Sums run in an order that changes between runs; see ``joestar.ops.reference``.
    """
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, y=y)
    n, edges, device = indptr.numel() - 1, indices.numel(), grad.device
    out = grad.new_empty((num_src, width))
    if not out.numel():
        return out
    heads = torch.full((num_src,), -1, dtype=torch.int32, device=device)
    links = torch.empty(edges, dtype=torch.int64, device=device)
    mean = reduce == "mean"
    scales = torch.empty(edges if mean else 0, dtype=torch.float32, device=device)
    if n and edges:
        _link_edges[(cdiv(n, 16),)](
            indptr, indices, heads, links, scales, n, MEAN=mean, SLOTS=16, BLOCK=16, num_warps=4
        )
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _gather_grad[(cdiv(num_src, config["ROWS"]), cdiv(width, block))](
            heads, links, scales, grad, y, out, num_src, n, scale,
            MEAN=mean, WIDTH=width, STRIDE=grad.shape[1], ACC=accumulator(grad), BLOCK=block, **config,
        )  # fmt: skip

    shape = (grad.dtype, width, reduce, y is not None, tune.size_class(num_src), tune.size_class(edges))
    work = 3 * out.numel() * out.element_size()
    launch(tune.choose("aggregate_cat_grad", shape, tile_configs(width, grad.element_size()), launch, work, device))
    return out
