"""Aggregated and own rows of an inner layer on the GPU, side by side or added up, and their gradient in one pass.

ReLU and dropout of the rows are applied where rows are read: their result is never stored. The gradient is gathered,
not scattered: every edge is linked into a list of its source, and each source adds up its own edges. Nothing is set to
zero first, no row is added to atomically, and the rows are written once, masked already.

The gradient asks which entries were positive and kept. It reads the rows again, or the bits that the aggregation noted
when it read them (the ops with ``kept``): 16 bytes in place of 512 for rows of 128 float32. These can also add a bias
to every row that they read, whose gradient, the sum of the rows' gradients, is added up while those are in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_bits import kept_bits, rows_within_warps, store_bits, unknown_bits, whole_words
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_grad import spmm_grad_x_transposed
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns, tile_configs, tile_rows

_RESIDENT = 132 * 32
"""Warps that gather gradients: 32 for each multiprocessor of an H200, which fit it at once with 64 registers."""


@triton.jit
def _activated(x, added, bits, row, column, mask, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr):
    """Entries of ``x`` plus ``added`` ``[1, BLOCK]``; with ``bits`` after ReLU and dropout, not yet scaled."""
    value = tl.load(x + row * WIDTH + column, mask, 0).to(ACC)
    if added is not None:
        value += added
    if bits is not None:
        value = tl.where((value > 0) & kept_bits(bits, row, column, mask, WORDS), value, 0)
    return value


@triton.jit(do_not_specialize=["n"])
def _aggregate_rows(
    indptr, indices, x, weight, factor, bias, bits, out, kept, n, scale,
    CAT: tl.constexpr, MEAN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum or mean of z over in-edges, z the activated rows of x; ``CAT``: z[i] beside it, else factor * z[i] added.

    ``bias``, only with ``bits``: added to the rows of x first. ``kept``: where to note which entries of the rows that
    are read are positive and kept.
    """
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    part = tl.program_id(1)
    column = tile_columns(part, BLOCK)
    if kept is not None:
        column = whole_words(part, WIDTH, WORDS, WIDE, BLOCK)
    inside = column < WIDTH
    added = bias
    if bias is not None:
        added = tl.load(bias + column, inside, 0).to(ACC)
    longest = tl.max(end - start)
    own = tl.zeros([ROWS, BLOCK], ACC)
    if CAT or factor is not None:
        own = _activated(x, added, bits, i.to(tl.int64), column, (i < n) & inside, WIDTH, WORDS, ACC)
        if kept is not None:
            store_bits(kept, i.to(tl.int64), own > 0, part, i < n, WORDS, WIDE, BLOCK)
    if factor is not None:
        own *= tl.load(factor).to(ACC)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values, sources, weights = (), (), ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            value = _activated(x, added, bits, source, column, (e < end) & inside, WIDTH, WORDS, ACC)
            sources, values = sources + (source,), values + (value,)  # noqa: RUF005
            if weight is not None:
                weights = weights + (tl.load(weight + e, e < end, 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            if kept is not None:
                store_bits(kept, sources[j], values[j] > 0, part, start + done + j < end, WORDS, WIDE, BLOCK)
            sums += values[j] if weight is None else values[j] * weights[j]
        done += AHEAD
    if bits is not None:
        own *= scale
        sums *= scale
    if MEAN:
        sums = sums / tl.maximum(end - start, 1).to(ACC)
    at = out + i.to(tl.int64) * (2 * WIDTH if CAT else WIDTH) + column
    if factor is not None:
        sums += own
    tl.store(at, sums.to(out.dtype.element_ty), (i < n) & inside)
    if CAT:
        tl.store(at + WIDTH, own.to(out.dtype.element_ty), (i < n) & inside)


def _run(indptr, indices, x, weight, factor, bits, scale, reduce, cat: bool, kept=None, bias=None) -> Tensor:
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight, own=factor, bias=bias)
    n, width = indptr.numel() - 1, x.shape[1]
    out = x.new_empty((n, 2 * width if cat else width))
    if not out.numel():
        return out
    block, words = column_block(width), cdiv(width, 32)

    def launch(config: tune.Config) -> None:
        _aggregate_rows[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, x, weight, factor, bias, bits, out, kept, n, scale,
            CAT=cat, MEAN=reduce == "mean", WIDTH=width, WORDS=words, WIDE=words if width <= block else block // 32,
            ACC=accumulator(x, weight), AHEAD=AHEAD, BLOCK=block, **config,
        )  # fmt: skip

    form = (cat, weight is not None, factor is not None, bits is not None, bias is not None)
    shape = (x.dtype, width, reduce, *form, tune.size_class(n), tune.size_class(indices.numel()))
    work = (3 * n + indices.numel()) * width * x.element_size()
    kernel, configs = "aggregate_rows", tile_configs(width, x.element_size())
    if kept is not None:
        kernel, configs = "aggregate_rows_kept", rows_within_warps(configs, block * x.element_size())
    launch(tune.choose(kernel, shape, configs, launch, work, x.device))
    return out


@op
def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str) -> Tensor:
    """``[sum or mean of z over in-edges, z[i]]``, ``[num_dst, 2 D]``; see ``joestar.ops.reference``."""
    return _run(indptr, indices, x, None, None, bits, scale, reduce, True)


@op
def aggregate_rows(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Weighted sum or mean of z over in-edges, plus ``own * z[i]``: ``[num_dst, D]``; see ``joestar.ops.reference``."""
    return _run(indptr, indices, x, weight, own, bits, scale, reduce, False)


@op
def aggregate_cat_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor, scale: float, reduce: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``aggregate_cat`` of ``x + bias``, and int32 ``[num_src, ceil(D / 32)]``: which entries it read are in z."""
    kept = unknown_bits(x)
    return _run(indptr, indices, x, None, None, bits, scale, reduce, True, kept, bias), kept


@op
def aggregate_rows_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor, scale: float,
    reduce: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``aggregate_rows`` of ``x + bias``, and int32 ``[num_src, ceil(D / 32)]``: which entries it read are in z."""
    kept = unknown_bits(x)
    return _run(indptr, indices, x, weight, own, bits, scale, reduce, False, kept, bias), kept


@triton.jit(do_not_specialize=["n"])
def _link_edges(
    indptr, indices, weight, heads, links, scales, n,
    MEAN: tl.constexpr, SCALED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts every edge at the front of its source's list; an edge's link is ``next << 32 | row``."""
    i = tile_rows(BLOCK)
    start, end = row_edges(indptr, None, None, i, n)
    scale = tl.full([BLOCK, 1], 1.0, scales.dtype.element_ty)
    if MEAN:
        scale = 1.0 / tl.maximum(end - start, 1).to(scales.dtype.element_ty)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done + tile_columns(0, SLOTS)
        valid = e < end
        source = tl.load(indices + e, valid, 0).to(tl.int64)
        after = tl.atomic_xchg(heads + source, e.to(tl.int32), valid, sem="relaxed")
        tl.store(links + e, (after.to(tl.int64) << 32) | i.to(tl.int64), valid)
        if SCALED:
            value = scale + tl.zeros([BLOCK, SLOTS], scales.dtype.element_ty)
            if weight is not None:
                value = value * tl.load(weight + e, valid, 0).to(scales.dtype.element_ty)
            tl.store(scales + e, value, valid)
        done += SLOTS


def link_edges(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    """Every valid edge in a list of its source: (first edges int32 ``[num_src]``, -1 where none; links int64 ``[E]``).

    A link is ``next edge << 32 | row``; the order of a list changes between runs.
    """
    heads = torch.full((num_src,), -1, dtype=torch.int32, device=indices.device)
    links = torch.empty(indices.numel(), dtype=torch.int64, device=indices.device)
    _link(indptr, indices, None, heads, links, links.new_empty(0, dtype=torch.float32), False)
    return heads, links


def _link(indptr, indices, weight, heads, links, scales, mean: bool) -> None:
    n = indptr.numel() - 1
    if n and indices.numel():
        _link_edges[(cdiv(n, 16),)](
            indptr, indices, weight, heads, links, scales, n,
            MEAN=mean, SCALED=scales.numel() > 0, SLOTS=16, BLOCK=16, num_warps=4,
        )  # fmt: skip


@triton.jit
def _first_edge(heads, s, num_src):
    """The first edge of sources ``s`` ``[ROWS, 1]``, -1 where there is none."""
    return tl.load(heads + s, s < num_src, -1)


@triton.jit
def _next_edge(link):
    return (link >> 32).to(tl.int32)


@triton.jit
def _read_by(e, link, scales, grad, column, stride, inside, SCALED: tl.constexpr, ACC: tl.constexpr):
    """The gradient of the row that edge ``e`` leads to, 0 where there is no edge."""
    value = tl.load(grad + (link & 0xFFFFFFFF) * stride + column, (e >= 0) & inside, 0).to(ACC)
    if SCALED:
        value = value * tl.load(scales + e, e >= 0, 0).to(ACC)
    return value


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _gather_grad(
    heads, links, scales, factor, grad, x, bits, out, sums, num_src, num_dst, scale,
    CAT: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = the gradients of the rows that read source ``s``; with ``bits`` back through dropout and ReLU.

    Without ``x`` the bits are those of the entries that ReLU let through, too. A program takes every so many tiles: the
    first edge of a source is read three tiles ahead, its link two and that of the second edge one, so that no row waits
    for them; few sources have more edges. With ``sums`` ``[programs, WIDTH]`` it adds up the rows of ``out``, before
    they are rounded.
    """
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    stride: tl.constexpr = 2 * WIDTH if CAT else WIDTH
    step = tl.num_programs(0) * ROWS
    s = tile_rows(ROWS)
    e = _first_edge(heads, s, num_src)
    link = tl.load(links + e, e >= 0, -1)
    e_1, e_2 = _first_edge(heads, s + step, num_src), _first_edge(heads, s + 2 * step, num_src)
    link_1 = tl.load(links + e_1, e_1 >= 0, -1)
    second = _next_edge(link)
    second_link = tl.load(links + second, second >= 0, -1)
    added = tl.zeros([ROWS, BLOCK], ACC)
    first = tl.program_id(0) * ROWS
    while first < num_src:
        e_3 = _first_edge(heads, s + 3 * step, num_src)
        link_2 = tl.load(links + e_2, e_2 >= 0, -1)
        second_1 = _next_edge(link_1)
        second_link_1 = tl.load(links + second_1, second_1 >= 0, -1)
        row = s.to(tl.int64)
        valid = (s < num_src) & inside
        kept = valid
        if bits is not None:
            kept = kept_bits(bits, row, column, valid, WORDS)
            if x is not None:
                kept = kept & (tl.load(x + row * WIDTH + column, valid, 0) > 0)
        total = tl.zeros([ROWS, BLOCK], ACC)
        if CAT or factor is not None:
            total = tl.load(grad + row * stride + (WIDTH if CAT else 0) + column, (s < num_dst) & inside, 0).to(ACC)
        if factor is not None:
            total = total * tl.load(factor).to(ACC)
        once = _read_by(e, link, scales, grad, column, stride, inside, SCALED, ACC)
        twice = _read_by(second, second_link, scales, grad, column, stride, inside, SCALED, ACC)
        total += once + twice
        e = _next_edge(second_link)
        while tl.max(e) >= 0:
            link = tl.load(links + e, e >= 0, -1)
            total += _read_by(e, link, scales, grad, column, stride, inside, SCALED, ACC)
            e = _next_edge(link)
        if bits is not None:
            total = tl.where(kept, total * scale, 0)
        tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), valid)
        if sums is not None:
            added += tl.where(valid, total, 0)
        e, link, second, second_link = e_1, link_1, second_1, second_link_1
        e_1, link_1, e_2 = e_2, link_2, e_3
        s += step
        first += step
    if sums is not None:
        at = sums + tl.program_id(0).to(tl.int64) * WIDTH + column
        tl.store(at, tl.sum(added, 0, keep_dims=True), inside)


@op
def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x``.

    Sums run in an order that changes between runs, but under ``torch.use_deterministic_algorithms(True)``.
    """
    return _gradient(indptr, indices, grad, x.shape[0], x, None, None, bits, scale, reduce, True)[0]


@op
def aggregate_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``aggregate_rows`` for ``x``; the order of its sums is as in ``aggregate_cat_grad``."""
    return _gradient(indptr, indices, grad, x.shape[0], x, weight, own, bits, scale, reduce, False)[0]


@op
def aggregate_cat_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, kept: Tensor, scale: float, reduce: str, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of ``aggregate_cat_kept`` for ``x`` and, if ``biased``, for the bias ``[D]``, else ``[0]``.

    The order of all sums is as in ``aggregate_cat_grad``.
    """
    return _gradient(indptr, indices, grad, kept.shape[0], None, None, None, kept, scale, reduce, True, biased)


@op
def aggregate_rows_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, own: Tensor | None, kept: Tensor,
    scale: float, reduce: str, biased: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_rows_kept``, as in ``aggregate_cat_kept_grad``."""
    return _gradient(indptr, indices, grad, kept.shape[0], None, weight, own, kept, scale, reduce, False, biased)


def _gradient(
    indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat: bool, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradient of every row; if ``biased`` also their sum, else an empty tensor."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, x=x, weight=weight, own=factor)
    n, edges, device = indptr.numel() - 1, indices.numel(), grad.device
    width = grad.shape[1] // 2 if cat else grad.shape[1]
    if torch.are_deterministic_algorithms_enabled():
        rows = _in_edge_order(indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat)
        return rows, rows.sum(0) if biased else grad.new_empty(0)
    out = grad.new_empty((num_src, width))
    if not out.numel():
        return out, grad.new_zeros(width if biased else 0)
    heads = torch.full((num_src,), -1, dtype=torch.int32, device=device)
    links = torch.empty(edges, dtype=torch.int64, device=device)
    mean = reduce == "mean"
    scaled = mean or weight is not None
    precision = torch.float64 if grad.dtype == torch.float64 else torch.float32
    scales = torch.empty(edges if scaled else 0, dtype=precision, device=device)
    _link(indptr, indices, weight, heads, links, scales, mean)
    block = column_block(width)

    def launch(config: tune.Config) -> Tensor:
        programs = min(cdiv(num_src, config["ROWS"]), _RESIDENT // config["num_warps"])
        sums = torch.empty((programs, width), dtype=precision, device=device) if biased else None
        _gather_grad[(programs, cdiv(width, block))](
            heads, links, scales, factor, grad, x, bits, out, sums, num_src, n, scale,
            CAT=cat, SCALED=scaled, WIDTH=width, WORDS=cdiv(width, 32), ACC=accumulator(grad), BLOCK=block, **config,
        )  # fmt: skip
        return added_up(sums, grad.dtype) if biased else grad.new_empty(0)

    form = (cat, scaled, factor is not None, bits is not None, biased)
    shape = (grad.dtype, width, *form, tune.size_class(num_src), tune.size_class(edges))
    work = 3 * out.numel() * out.element_size()
    kernel = "gather_grad_kept" if bits is not None and x is None else "gather_grad"
    configs = tile_configs(width, grad.element_size())
    return out, launch(tune.choose(kernel, shape, configs, launch, work, device))


def _in_edge_order(indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat: bool) -> Tensor:
    """The gradient by way of the edges sorted by source."""
    width = grad.shape[1] // 2 if cat else grad.shape[1]
    total = spmm_grad_x_transposed(indptr, indices, grad[:, :width].contiguous(), weight, num_src, reduce)
    if cat:
        total[: grad.shape[0]] += grad[:, width:]
    elif factor is not None:
        total[: grad.shape[0]] += factor * grad
    if bits is None:
        return total
    column = torch.arange(width, device=grad.device)
    words = cdiv(width, 32)
    kept = (bits[:, column % words] >> (column // words).to(torch.int32)) & 1 != 0
    kept = kept if x is None else kept & (x > 0)
    return torch.where(kept, total * scale, torch.zeros_like(total))
