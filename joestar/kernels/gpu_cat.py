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
from joestar.kernels.activations import Before, parsed
from joestar.kernels.determinism import is_deterministic
from joestar.kernels.gpu_activations import before_reading
from joestar.kernels.gpu_bits import kept_bits, passes_relu, rows_within_warps, store_bits, unknown_bits, whole_words
from joestar.kernels.gpu_grad import spmm_grad_x_transposed
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, require
from joestar.kernels.gpu_links import gathered_grad, gathered_through
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    for_activations,
    of_columns,
    tile_columns,
    tile_configs,
    tile_rows,
)

_NOTHING = Before()


@triton.jit
def _activated(x, added, bits, row, column, mask, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr):
    """Entries of ``x`` plus ``added`` ``[1, BLOCK]``; with ``bits`` after ReLU and dropout, not yet scaled."""
    value = tl.load(x + row * WIDTH + column, mask, 0).to(ACC)
    if added is not None:
        value += added
    if bits is not None:
        value = tl.where(passes_relu(value) & kept_bits(bits, row, column, mask, WORDS), value, 0)
    return value


@triton.jit
def _read(
    x, added, bits, row, column, mask,
    ACT: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(``_activated``, nothing) or, with ``ACT``, (entries of ``x``, which are kept): in flight, not yet used."""
    if ACT is None:
        return _activated(x, added, bits, row, column, mask, WIDTH, WORDS, ACC), mask
    else:
        value, kept = tl.load(x + row * WIDTH + column, mask, 0), mask
        if bits is not None:
            kept = kept_bits(bits, row, column, mask, WORDS)
        return value, kept


@triton.jit
def _used(
    value, kept, added, gain, shift, mask, ACT: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr
):
    """What ``_read`` gave, after norm and activation (see ``gpu_activations``), not yet scaled."""
    if ACT is not None:
        value = value.to(ACC)
        if added is not None:
            value += added
        value = tl.where(kept, before_reading(value, gain, shift, mask, ACT, EPS, WIDTH, ACC), 0)
    return value


@triton.jit(do_not_specialize=["n"])
def _aggregate_rows(
    indptr, indices, x, weight, factor, bias, gain, shift, bits, out, kept, n, scale: tl.float64,
    CAT: tl.constexpr, MEAN: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
    WORDS: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum or mean of z over in-edges, z the activated rows of x; ``CAT``: z[i] beside it, else factor * z[i] added.

    ``bias``, only with ``bits`` or ``ACT``: added to the rows of x first. ``kept``: where to note which entries of the
    rows that are read are positive and kept. ``gain``, ``shift``: of a norm.
    """
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    part = tl.program_id(1)
    column = tile_columns(part, BLOCK)
    if kept is not None:
        column = whole_words(part, WIDTH, WORDS, WIDE, BLOCK)
    inside = column < WIDTH
    added = bias if bias is None else of_columns(bias, column, inside, ACC)
    gain = gain if gain is None else of_columns(gain, column, inside, ACC)
    shift = shift if shift is None else of_columns(shift, column, inside, ACC)
    longest = tl.max(end - start)
    own = tl.zeros([ROWS, BLOCK], ACC)
    if CAT or factor is not None:
        mask = (i < n) & inside
        own, holds = _read(x, added, bits, i.to(tl.int64), column, mask, ACT, WIDTH, WORDS, ACC)
        own = _used(own, holds, added, gain, shift, mask, ACT, EPS, WIDTH, ACC)
        if kept is not None:
            store_bits(kept, i.to(tl.int64), passes_relu(own), part, i < n, WORDS, WIDE, BLOCK)
    if factor is not None:
        own *= tl.load(factor).to(ACC)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        values, holding, sources, weights = (), (), (), ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0).to(tl.int64)
            value, holds = _read(x, added, bits, source, column, (e < end) & inside, ACT, WIDTH, WORDS, ACC)
            sources, values, holding = sources + (source,), values + (value,), holding + (holds,)  # noqa: RUF005
            if weight is not None:
                weights = weights + (tl.load(weight + e, e < end, 0).to(ACC),)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            if kept is not None:
                store_bits(kept, sources[j], passes_relu(values[j]), part, start + done + j < end, WORDS, WIDE, BLOCK)
            mask = (start + done + j < end) & inside
            value = _used(values[j], holding[j], added, gain, shift, mask, ACT, EPS, WIDTH, ACC)
            sums += value if weight is None else value * weights[j]
        done += AHEAD
    if bits is not None:
        own *= tl.full((), scale, ACC)
        sums *= tl.full((), scale, ACC)
    if MEAN:
        sums = sums / tl.maximum(end - start, 1).to(ACC)
    at = out + i.to(tl.int64) * (2 * WIDTH if CAT else WIDTH) + column
    if factor is not None:
        sums += own
    tl.store(at, sums.to(out.dtype.element_ty), (i < n) & inside)
    if CAT:
        tl.store(at + WIDTH, own.to(out.dtype.element_ty), (i < n) & inside)


def _checked(x: Tensor, *how) -> Before:
    """What happens to the rows; ``ValueError`` also for a norm of rows that are several tiles."""
    before = Before(*how)
    before.check(x)
    require(not before.eps or x.shape[1] <= column_block(x.shape[1]), "a norm over 256 columns at most", x.shape[1])
    return before


def _run(
    indptr, indices, x, weight, factor, bits, scale, reduce, cat: bool, kept=None, before: Before = _NOTHING
) -> Tensor:
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight, own=factor, bias=before.bias, gain=before.gain, shift=before.shift)
    act = None if before.act is None else parsed(before.act)
    n, width = indptr.numel() - 1, x.shape[1]
    out = x.new_empty((n, 2 * width if cat else width))
    if not out.numel():
        return out
    block, words = column_block(width), cdiv(width, 32)
    ahead = AHEAD if act is None or x.element_size() > 2 else AHEAD // 2  # twice as many columns a thread

    def launch(config: tune.Config) -> None:
        _aggregate_rows[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            indptr, indices, x, weight, factor, before.bias, before.gain, before.shift, bits, out, kept, n, scale,
            CAT=cat, MEAN=reduce == "mean", ACT=act, EPS=before.eps, WIDTH=width, WORDS=words,
            WIDE=words if width <= block else block // 32, ACC=accumulator(x, weight), AHEAD=ahead, BLOCK=block,
            **config,
        )  # fmt: skip

    kernel, configs = "aggregate_rows", tile_configs(width, x.element_size())
    form = (cat, weight is not None, factor is not None, bits is not None, before.bias is not None)
    if act is not None:
        form, configs = (*form, *act, before.eps > 0), for_activations(configs, before.eps > 0)
    shape = (x.dtype, width, reduce, *form, tune.size_class(n), tune.size_class(indices.numel()))
    work = (3 * n + indices.numel()) * width * x.element_size()
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
    return _run(indptr, indices, x, None, None, bits, scale, reduce, True, kept, Before(bias=bias)), kept


@op
def aggregate_rows_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor, scale: float,
    reduce: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``aggregate_rows`` of ``x + bias``, and int32 ``[num_src, ceil(D / 32)]``: which entries it read are in z."""
    kept = unknown_bits(x)
    return _run(indptr, indices, x, weight, own, bits, scale, reduce, False, kept, Before(bias=bias)), kept


@op
def aggregate_activated(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None = None, shift: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``aggregate_cat`` or ``aggregate_rows`` of any activation, behind a layer norm; see ``joestar.ops.reference``."""
    before = _checked(x, act, gain, shift, eps, bias)
    return _run(indptr, indices, x, weight, own, bits, scale, reduce, cat, None, before)


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


@op
def aggregate_activated_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str, cat: bool, act: str, gain: Tensor | None, shift: Tensor | None,
    eps: float, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_activated`` for ``x``, ``gain``, ``shift`` and ``bias``, ``[0]`` where there is none.

    The order of all sums is as in ``aggregate_cat_grad``.
    """
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, x=x, weight=weight, own=own, gain=gain, shift=shift, bias=bias)
    before = _checked(x, act, gain, shift, eps, bias)
    if is_deterministic():
        rows = _in_edge_order(indptr, indices, grad, x.shape[0], None, weight, own, bits, scale, reduce, cat)
        rows, *sums = before.gradients(rows, x)
        return rows.to(x.dtype), *sums
    return gathered_through(indptr, indices, grad, x, weight, reduce, own, bits, scale, cat, before)


def _gradient(
    indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat: bool, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradient of every row; if ``biased`` also their sum, else an empty tensor."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, x=x, weight=weight, own=factor)
    if is_deterministic():
        rows = _in_edge_order(indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat)
        return rows, rows.sum(0) if biased else grad.new_empty(0)
    return gathered_grad(indptr, indices, grad, num_src, weight, reduce, x, factor, bits, scale, cat, biased)


def _in_edge_order(indptr, indices, grad, num_src, x, weight, factor, bits, scale, reduce, cat: bool) -> Tensor:
    """The gradient by way of the edges sorted by source."""
    width = grad.shape[1] // 2 if cat else grad.shape[1]
    total = spmm_grad_x_transposed(indptr, indices, grad[:, :width].contiguous(), weight, num_src, reduce)
    if cat:
        total[: grad.shape[0]].add_(grad[:, width:])
    elif factor is not None:
        total[: grad.shape[0]].add_(factor * grad)
    if bits is None:
        return total
    column = torch.arange(width, device=grad.device)
    words = cdiv(width, 32)
    kept = (bits[:, column % words] >> (column // words).to(torch.int32)) & 1 != 0
    kept = kept if x is None else kept & ~(x <= 0)
    return torch.where(kept, total * scale, torch.zeros_like(total))
