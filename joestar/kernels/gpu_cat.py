"""Aggregated and own rows of an inner layer on the GPU, side by side or added up, and their gradient in one pass.

ReLU and dropout of the rows are applied where rows are read: their result is never stored. The gradient is gathered,
not scattered: every edge is linked into a list of its source, and each source adds up its own edges. Nothing is set to
zero first, no row is added to atomically, and the rows are written once, masked already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_grad import spmm_grad_x_transposed
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import accumulator, check_values, column_block, tile_columns, tile_configs, tile_rows


@triton.jit
def _split_columns(joined, parts, rows, WIDTH: tl.constexpr, WIDTHS: tl.constexpr, COUNT: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // WIDTH, at % WIDTH
    value = tl.load(joined + at, row < rows, 0)
    first = 0
    for i in tl.static_range(COUNT):
        inside = (row < rows) & (column >= first) & (column < first + WIDTHS[i])
        tl.store(parts[i] + row * WIDTHS[i] + (column - first), value, inside)
        first += WIDTHS[i]


@op
def split_columns(joined: Tensor, widths: list[int]) -> list[Tensor]:
    """The parts of ``join_columns``, contiguous, in one launch; a width of 0 is a vector."""
    rows = joined.shape[0]
    parts = [joined.new_empty((rows, width) if width else (rows,)) for width in widths]
    if joined.numel():
        _split_columns[(cdiv(joined.numel(), 512),)](
            joined, tuple(parts), rows,
            WIDTH=joined.shape[1], WIDTHS=tuple(width or 1 for width in widths), COUNT=len(parts), BLOCK=512,
        )  # fmt: skip
    return parts


@triton.jit
def _kept(bits, row, column, mask, WORDS: tl.constexpr):
    """Whether dropout keeps the entries: neighbouring columns read neighbouring words."""
    word = tl.load(bits + row * WORDS + column % WORDS, mask, 0)
    return ((word >> (column // WORDS)) & 1) != 0


@triton.jit
def _activated(x, bits, row, column, mask, scale, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr):
    """Entries of ``x``; with ``bits`` after ReLU and dropout."""
    value = tl.load(x + row * WIDTH + column, mask, 0).to(ACC)
    if bits is not None:
        value = tl.where((value > 0) & _kept(bits, row, column, mask, WORDS), value * scale, 0)
    return value


@triton.jit(do_not_specialize=["n"])
def _aggregate_rows(
    indptr, indices, x, weight, factor, bits, out, n, scale,
    CAT: tl.constexpr, MEAN: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum or mean of z over in-edges, z the activated rows of x; ``CAT``: z[i] beside it, else factor * z[i] added."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    longest = tl.max(end - start)
    own = tl.zeros([ROWS, BLOCK], ACC)
    if CAT or factor is not None:
        own = _activated(x, bits, i.to(tl.int64), column, (i < n) & inside, scale, WIDTH, WORDS, ACC)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            value = _activated(x, bits, source, column, (e < end) & inside, scale, WIDTH, WORDS, ACC)
            if weight is not None:
                value = value * tl.load(weight + e, e < end, 0).to(ACC)
            values = values + (value,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            sums += values[j]
        done += AHEAD
    if MEAN:
        sums = sums / tl.maximum(end - start, 1).to(ACC)
    at = out + i.to(tl.int64) * (2 * WIDTH if CAT else WIDTH) + column
    if factor is not None:
        sums += own * tl.load(factor).to(ACC)
    tl.store(at, sums.to(out.dtype.element_ty), (i < n) & inside)
    if CAT:
        tl.store(at + WIDTH, own.to(out.dtype.element_ty), (i < n) & inside)


def _run(indptr, indices, x, weight, factor, bits, scale, reduce, cat: bool) -> Tensor:
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight, own=factor)
    n, width = indptr.numel() - 1, x.shape[1]
    out = x.new_empty((n, 2 * width if cat else width))
    if not out.numel():
        return out
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _aggregate_rows[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, x, weight, factor, bits, out, n, scale,
            CAT=cat, MEAN=reduce == "mean", WIDTH=width, WORDS=cdiv(width, 32), ACC=accumulator(x, weight),
            AHEAD=AHEAD, BLOCK=block, **config,
        )  # fmt: skip

    form = (cat, weight is not None, factor is not None, bits is not None)
    shape = (x.dtype, width, reduce, *form, tune.size_class(n), tune.size_class(indices.numel()))
    work = (3 * n + indices.numel()) * width * x.element_size()
    launch(tune.choose("aggregate_rows", shape, tile_configs(width, x.element_size()), launch, work, x.device))
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


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _gather_grad(
    heads, links, scales, factor, grad, x, bits, out, num_src, num_dst, scale,
    CAT: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = the gradients of the rows that read source ``s``; with ``bits`` back through dropout and ReLU."""
    s = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    e = tl.load(heads + s, s < num_src, -1)
    row = s.to(tl.int64)
    valid = (s < num_src) & inside
    stride: tl.constexpr = 2 * WIDTH if CAT else WIDTH
    total = tl.zeros([ROWS, BLOCK], ACC)
    if CAT or factor is not None:
        total = tl.load(grad + row * stride + (WIDTH if CAT else 0) + column, (s < num_dst) & inside, 0).to(ACC)
    if factor is not None:
        total = total * tl.load(factor).to(ACC)
    kept = valid
    if bits is not None:
        kept = (tl.load(x + row * WIDTH + column, valid, 0) > 0) & _kept(bits, row, column, valid, WORDS)
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        reader = link & 0xFFFFFFFF
        value = tl.load(grad + reader * stride + column, (e >= 0) & inside, 0).to(ACC)
        if SCALED:
            value = value * tl.load(scales + e, e >= 0, 0).to(ACC)
        total += value
        e = (link >> 32).to(tl.int32)
    if bits is not None:
        total = tl.where(kept, total * scale, 0)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), valid)


@op
def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x``.

    Sums run in an order that changes between runs, but under ``torch.use_deterministic_algorithms(True)``.
    """
    return _gradient(indptr, indices, grad, x, None, None, bits, scale, reduce, True)


@op
def aggregate_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``aggregate_rows`` for ``x``; the order of its sums is as in ``aggregate_cat_grad``."""
    return _gradient(indptr, indices, grad, x, weight, own, bits, scale, reduce, False)


def _gradient(indptr, indices, grad, x, weight, factor, bits, scale, reduce, cat: bool) -> Tensor:
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, x=x, weight=weight, own=factor)
    n, edges, device = indptr.numel() - 1, indices.numel(), grad.device
    num_src, width = x.shape
    if torch.are_deterministic_algorithms_enabled():
        return _in_edge_order(indptr, indices, grad, x, weight, factor, bits, scale, reduce, cat)
    out = torch.empty_like(x)
    if not out.numel():
        return out
    heads = torch.full((num_src,), -1, dtype=torch.int32, device=device)
    links = torch.empty(edges, dtype=torch.int64, device=device)
    mean = reduce == "mean"
    scaled = mean or weight is not None
    precision = torch.float64 if grad.dtype == torch.float64 else torch.float32
    scales = torch.empty(edges if scaled else 0, dtype=precision, device=device)
    _link(indptr, indices, weight, heads, links, scales, mean)
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _gather_grad[(cdiv(num_src, config["ROWS"]), cdiv(width, block))](
            heads, links, scales, factor, grad, x, bits, out, num_src, n, scale,
            CAT=cat, SCALED=scaled, WIDTH=width, WORDS=cdiv(width, 32), ACC=accumulator(grad), BLOCK=block, **config,
        )  # fmt: skip

    form = (cat, scaled, factor is not None, bits is not None)
    shape = (grad.dtype, width, *form, tune.size_class(num_src), tune.size_class(edges))
    work = 3 * out.numel() * out.element_size()
    launch(tune.choose("aggregate_rows_grad", shape, tile_configs(width, grad.element_size()), launch, work, device))
    return out


def _in_edge_order(indptr, indices, grad, x, weight, factor, bits, scale, reduce, cat: bool) -> Tensor:
    """The gradient by way of the edges sorted by source."""
    width = x.shape[1]
    total = spmm_grad_x_transposed(indptr, indices, grad[:, :width].contiguous(), weight, x.shape[0], reduce)
    if cat:
        total[: grad.shape[0]] += grad[:, width:]
    elif factor is not None:
        total[: grad.shape[0]] += factor * grad
    if bits is None:
        return total
    column = torch.arange(width, device=x.device)
    kept = (bits[:, column % bits.shape[1]] >> (column // bits.shape[1]).to(torch.int32)) & 1
    return torch.where((x > 0) & (kept != 0), total * scale, torch.zeros_like(total))
