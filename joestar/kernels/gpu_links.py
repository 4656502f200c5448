"""Gradients of rows that edges read, gathered on the GPU: every edge is linked into a list of its source.

Each source adds up its own edges, in an order that changes between runs. Nothing is set to zero first, no row is added
to atomically, and every row is written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.activations import Before, parsed
from joestar.kernels.gpu_activations import through_reading
from joestar.kernels.gpu_bits import kept_bits, passes_relu
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, require
from joestar.kernels.gpu_spmm import row_edges
from joestar.kernels.gpu_structure import edge_dst
from joestar.kernels.gpu_tiles import (
    accumulator,
    column_block,
    for_activations,
    heads_and_width,
    of_columns,
    tile_columns,
    tile_configs,
    tile_rows,
)

MOST_EDGES = 2**31 - 1
"""Edges of one call: numbers of edges are int32 in lists."""
_RESIDENT = 132 * 32
"""Warps that gather gradients tile after tile: 32 for each multiprocessor of an H200, which holds them at once."""
_NORMED = 24
"""So many of 32 where there is a norm, whose programs need 72 registers: what does not fit would run alone behind."""
_NOTHING = Before()


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


def check_linkable(edges: int) -> None:
    """Raises ``ValueError`` for more edges than lists can name: numbers of edges are int32 in them, negative ones end a
    list, and gradients would be missing without a word.
    """
    require(
        edges <= MOST_EDGES, f"at most {MOST_EDGES} edges to link into lists of their sources",
        f"{edges}; aggregate over parts of the graph (graph[:, dsts]), or order the edges instead: "
        "torch.use_deterministic_algorithms(True)",
    )  # fmt: skip


def link_edges(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    """Every valid edge in a list of its source: (first edges int32 ``[num_src]``, -1 where none; links int64 ``[E]``).

    A link is ``next edge << 32 | row``; the order of a list changes between runs.

    Raises:
        ValueError: for more than ``MOST_EDGES`` edges.
    """
    check_linkable(indices.numel())
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
def _read_by(
    e, link, scales, grad, column, stride, inside, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, ACC: tl.constexpr
):
    """The gradient of the row that edge ``e`` leads to, 0 where there is no edge; ``HEADS`` is 0 without factors."""
    value = tl.load(grad + (link & 0xFFFFFFFF) * stride + column, (e >= 0) & inside, 0).to(ACC)
    if HEADS == 1:
        value = value * tl.load(scales + e, e >= 0, 0).to(ACC)
    elif HEADS > 1:
        at = e.to(tl.int64) * HEADS + column // HEAD_WIDTH
        value = value * tl.load(scales + at, (e >= 0) & inside, 0).to(ACC)
    return value


@triton.jit
def _own_part(
    s, column, inside, factor, grad, x, bits, num_src, num_dst,
    CAT: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(gradient of the destinations' own rows among sources ``s`` ``[ROWS, 1]``, which entries gradients reach)."""
    row = s.to(tl.int64)
    stride: tl.constexpr = 2 * WIDTH if CAT else WIDTH
    kept = (s < num_src) & inside
    if bits is not None:
        kept = kept_bits(bits, row, column, kept, WORDS)
        if x is not None:
            kept = kept & passes_relu(tl.load(x + row * WIDTH + column, (s < num_src) & inside, 0))
    total = tl.zeros([ROWS, BLOCK], ACC)
    if CAT or factor is not None:
        total = tl.load(grad + row * stride + (WIDTH if CAT else 0) + column, (s < num_dst) & inside, 0).to(ACC)
    if factor is not None:
        total = total * tl.load(factor).to(ACC)
    return total, kept


@triton.jit
def _listed(
    e, total, links, scales, grad, column, stride, inside, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """``total`` plus what the edges from ``e`` on read."""
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        total += _read_by(e, link, scales, grad, column, stride, inside, HEADS, HEAD_WIDTH, ACC)
        e = _next_edge(link)
    return total


@triton.jit
def _read_again(s, column, inside, rows, bias, num_src, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """The rows ``s`` that went into norm and activation."""
    value = tl.load(rows + s.to(tl.int64) * WIDTH + column, (s < num_src) & inside, 0).to(ACC)
    if bias is not None:
        value += bias
    return value


@triton.jit
def _store_rows(
    s, total, kept, before, gain, shift, column, inside, bits, out, num_src, scale,
    ACT: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of sources ``s`` and returns them, not rounded, 0 behind the last one.

    With ``ACT`` they have gone back through activation and norm of the rows ``before``; also returned are the rows
    whose sums are the gradients of ``gain`` and ``shift``.
    """
    if bits is not None:
        total = tl.where(kept, total * tl.full((), scale, ACC), 0)
    valid = (s < num_src) & inside
    by_gain, by_shift = total, total
    if ACT is not None:
        total, by_gain, by_shift = through_reading(total, before, gain, shift, valid, ACT, EPS, WIDTH, ACC)
    tl.store(out + s.to(tl.int64) * WIDTH + column, total.to(out.dtype.element_ty), valid)
    return tl.where(valid, total, 0), by_gain, by_shift


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _gather_grad(
    heads, links, scales, factor, grad, x, bits, out, rows, bias, gain, shift, num_src, num_dst, scale: tl.float64,
    CAT: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    ACT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = the gradients of the rows that read source ``s``; with ``bits`` back through dropout and ReLU.

    Without ``x`` the bits are those of the entries that ReLU let through, too. With ``ACT`` (see ``gpu_activations``)
    that, and the norm, take the place of ReLU: ``rows`` are what they had, with a ``bias`` to add.
    """
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    bias = bias if bias is None else of_columns(bias, column, inside, ACC)
    gain = gain if gain is None else of_columns(gain, column, inside, ACC)
    shift = shift if shift is None else of_columns(shift, column, inside, ACC)
    stride: tl.constexpr = 2 * WIDTH if CAT else WIDTH
    s = tile_rows(ROWS)
    e = _first_edge(heads, s, num_src)
    total, kept = _own_part(
        s, column, inside, factor, grad, x, bits, num_src, num_dst, CAT, WIDTH, WORDS, ACC, BLOCK, ROWS
    )
    before = total
    if ACT is not None:
        before = _read_again(s, column, inside, rows, bias, num_src, WIDTH, ACC)
    total = _listed(e, total, links, scales, grad, column, stride, inside, HEADS, HEAD_WIDTH, ACC)
    _store_rows(s, total, kept, before, gain, shift, column, inside, bits, out, num_src, scale, ACT, EPS, WIDTH, ACC)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _gather_grad_summed(
    heads, links, scales, factor, grad, x, bits, out, rows, bias, gain, shift, sums, num_src, num_dst,
    scale: tl.float64,
    CAT: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    ACT: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``_gather_grad`` by programs that take every so many tiles, and add up their rows in ``sums``, not yet rounded.

    The first edge of a source is read three tiles ahead, its link two and that of the second edge one, so that no row
    waits for them; few sources have more edges. ``sums`` is ``[programs, 1, WIDTH]``, with a norm 3 in place of
    1: those for ``gain`` and ``shift``, too.
    """
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    bias = bias if bias is None else of_columns(bias, column, inside, ACC)
    gain = gain if gain is None else of_columns(gain, column, inside, ACC)
    shift = shift if shift is None else of_columns(shift, column, inside, ACC)
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
    if EPS > 0:
        gains, shifts = tl.zeros([ROWS, BLOCK], ACC), tl.zeros([ROWS, BLOCK], ACC)
    first = tl.program_id(0) * ROWS
    while first < num_src:
        e_3 = _first_edge(heads, s + 3 * step, num_src)
        link_2 = tl.load(links + e_2, e_2 >= 0, -1)
        second_1 = _next_edge(link_1)
        second_link_1 = tl.load(links + second_1, second_1 >= 0, -1)
        total, kept = _own_part(
            s, column, inside, factor, grad, x, bits, num_src, num_dst, CAT, WIDTH, WORDS, ACC, BLOCK, ROWS
        )
        before = total
        if ACT is not None:
            before = _read_again(s, column, inside, rows, bias, num_src, WIDTH, ACC)
        once = _read_by(e, link, scales, grad, column, stride, inside, HEADS, HEAD_WIDTH, ACC)
        twice = _read_by(second, second_link, scales, grad, column, stride, inside, HEADS, HEAD_WIDTH, ACC)
        total += once + twice
        third = _next_edge(second_link)
        total = _listed(third, total, links, scales, grad, column, stride, inside, HEADS, HEAD_WIDTH, ACC)
        stored, by_gain, by_shift = _store_rows(
            s, total, kept, before, gain, shift, column, inside, bits, out, num_src, scale, ACT, EPS, WIDTH, ACC
        )
        added += stored
        if EPS > 0:
            gains += by_gain
            shifts += by_shift
        e, link, second, second_link = e_1, link_1, second_1, second_link_1
        e_1, link_1, e_2 = e_2, link_2, e_3
        s += step
        first += step
    at = sums + tl.program_id(0).to(tl.int64) * (3 * WIDTH if EPS > 0 else WIDTH) + column
    tl.store(at, tl.sum(added, 0, keep_dims=True), inside)
    if EPS > 0:
        tl.store(at + WIDTH, tl.sum(gains, 0, keep_dims=True), inside)
        tl.store(at + 2 * WIDTH, tl.sum(shifts, 0, keep_dims=True), inside)


def gathered_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, num_src: int, weight: Tensor | None, reduce: str,
    x: Tensor | None = None, factor: Tensor | None = None, bits: Tensor | None = None, scale: float = 1.0,
    cat: bool = False, biased: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient ``[num_src, ...]`` of the rows of an aggregation (sum or mean), in the dtype of ``grad``.

    Args:
        grad: ``[num_dst, ...]``; weight: of edges, ``[E]``, or ``[E, H]`` with ``grad`` ``[num_dst, H, ...]``, or none.
        x, factor, bits, scale, cat: see ``gpu_cat``; rows are matrices ``[n, D]`` then, ``weight`` is ``[E]``.

    Returns:
        (rows, their sum if ``biased``, else ``[0]``).
    """
    out, sums = _gathered(indptr, indices, grad, num_src, weight, reduce, x, factor, bits, scale, cat, biased)
    return out, sums[0] if biased else grad.new_empty(0)


def gathered_through(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, reduce: str,
    factor: Tensor | None, bits: Tensor | None, scale: float, cat: bool, before: Before,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``gathered_grad`` of the rows that ``before`` made of ``x`` ``[num_src, D]``, and back through that.

    Returns:
        Gradients for ``x`` and, ``[0]`` where there is none, for ``gain``, ``shift`` and ``bias``.
    """
    vectors = before.gain, before.shift, before.bias
    summed = any(vector is not None for vector in vectors)
    out, sums = _gathered(
        indptr, indices, grad, x.shape[0], weight, reduce, None, factor, bits, scale, cat, summed, x, before
    )
    places = (1, 2, 0) if before.eps else (0, 0, 0)
    of_vectors = (
        grad.new_empty(0) if vector is None else sums[place].to(vector.dtype)
        for vector, place in zip(vectors, places, strict=True)
    )
    return out, *of_vectors


def _gathered(
    indptr, indices, grad, num_src, weight, reduce, x, factor, bits, scale, cat: bool, summed: bool,
    rows: Tensor | None = None, before: Before = _NOTHING,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(gradients of rows, their sums ``[1, D]`` if ``summed``, with a norm ``[3, D]``)."""
    n, edges, device = indptr.numel() - 1, indices.numel(), grad.device
    check_linkable(edges)
    heads, head_width = heads_and_width(grad, weight)
    width = heads * head_width // (2 if cat else 1)
    out = grad.new_empty((num_src, width) if cat else (num_src, *grad.shape[1:]))
    vectors = 3 if before.eps else 1
    if not out.numel():
        return out, grad.new_zeros((vectors, width)) if summed else None
    first = torch.full((num_src,), -1, dtype=torch.int32, device=device)
    links = torch.empty(edges, dtype=torch.int64, device=device)
    wide = torch.float64 if torch.float64 in (grad.dtype, None if weight is None else weight.dtype) else torch.float32
    mean, own = reduce == "mean", heads == 1 and (weight is not None or reduce == "mean")
    scales = torch.empty(edges if own else 0, dtype=wide, device=device)
    _link(indptr, indices, weight if own else None, first, links, scales, mean)
    if heads > 1:
        scales = weight if not mean else per_degree(indptr, indices, weight.to(wide))
    block, act = column_block(width), None if before.act is None else parsed(before.act)

    sizes = {"CAT": cat, "HEADS": heads if heads > 1 else int(own), "HEAD_WIDTH": max(1, head_width), "WIDTH": width,
             "WORDS": cdiv(width, 32), "ACT": act, "EPS": before.eps, "ACC": accumulator(grad, weight),
             "BLOCK": block}  # fmt: skip

    def launch(config: tune.Config) -> Tensor | None:
        tiles, parts = cdiv(num_src, config["ROWS"]), cdiv(width, block)
        operands = first, links, scales, factor, grad, x, bits, out, rows, before.bias, before.gain, before.shift
        if not summed:
            _gather_grad[(tiles, parts)](*operands, num_src, n, scale, **sizes, **config)
            return None
        resident = _RESIDENT * (_NORMED if before.eps else 32) // 32
        programs = min(tiles, max(1, resident // config["num_warps"]))
        sums = torch.empty((programs, vectors, width), dtype=wide, device=device)
        _gather_grad_summed[(programs, parts)](*operands, sums, num_src, n, scale, **sizes, **config)
        return added_up(sums, grad.dtype if act is None else None)

    form = (cat, heads, own, factor is not None, bits is not None, x is not None, summed)
    configs = tile_configs(width, grad.element_size())
    if act is not None:
        form, configs = (*form, *act, before.eps > 0), for_activations(configs, before.eps > 0)
    shape = (grad.dtype, width, *form, tune.size_class(num_src), tune.size_class(edges))
    work = 3 * out.numel() * out.element_size()
    return out, launch(tune.choose("gather_grad", shape, configs, launch, work, device))


def per_degree(indptr: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """Weights ``[E, H]`` over the degree of their row."""
    degree = (indptr[1:] - indptr[:-1]).clamp(min=1).to(weight.dtype)
    row = edge_dst(indptr, indices.numel(), indices)
    return weight / torch.index_select(degree, 0, row)[:, None]
