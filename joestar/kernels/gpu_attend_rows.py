"""Graph attention over rows of a table on the GPU, in one pass: a warp has the rows of a destination in registers.

For destinations of few edges, as sampling leaves them. A row is read once in the forward and once in the backward pass;
what a destination has more than ``SLOTS`` edges is read twice.

The sum over a row leaves its result in all lanes of the warp: the same arithmetic on scores in all of them would cost
more than the rows do. So scores are spread over the lanes while they are added up. Coefficients go through memory (the
cache, in fact), where every lane reads them. Programs take destinations that follow one another, and read the ids of
the next one while they work.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_edge_products import factor_of_edge
from joestar.kernels.gpu_launch import cdiv
from joestar.kernels.gpu_tiles import tile_columns
from joestar.kernels.gpu_warp_rows import (
    begin,
    edge_ids,
    edge_rows,
    every_product,
    numbers_of,
    one_row,
    rows_of_heads,
    shape_of,
    warp_grids,
)

_FEW = 1792
"""Most numbers of a warp, of 4 bytes, that 96 registers take forward, and 128 backward."""


@triton.jit
def _add_rows(
    sums, total, rows, weights, first, end, head, HEADS: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr
):
    """``sums[h] += weights[first + j, h] * rows[j]`` up to ``end``, and ``total`` ``[heads, 1]`` of the weights."""
    for j in tl.static_range(SLOTS):
        weight = tl.load(weights + (first + j) * HEADS + head, (first + j < end) & (head < HEADS), 0).to(ACC)
        sums += rows[j] * weight
        total += weight
    return sums, total


@triton.jit
def _add_every_row(
    sums, total, rows, weights, table, indices, start, end, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr, SLOTS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """``_add_rows`` for all edges of a destination; ``rows`` are those of the first ``SLOTS``, others are read."""
    sums, total = _add_rows(sums, total, rows, weights, start, end, head, HEADS, ACC, SLOTS)
    first = start + SLOTS
    while first < end:
        more = edge_rows(table, edge_ids(indices, first, end, MORE), end - first, column, WIDTH, ACC, MORE)
        sums, total = _add_rows(sums, total, more, weights, first, end, head, HEADS, ACC, MORE)
        first += MORE
    return sums, total


@triton.jit
def _logits(z, s_edge, e, end, head, SLOPE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """(sums of scores, logits) of edges ``e``, ``[edges, heads]``: minus infinity behind the last one.

    ``z`` are scores of both ends, to which ``s_edge``, unless ``None``, is added.
    """
    known = (e < end) & (head < HEADS)
    if s_edge is not None:
        z += tl.load(s_edge + e * HEADS + head, known, 0).to(ACC)
    return z, tl.where(known, tl.where(z > 0, z, z * tl.full([1, 1], SLOPE, ACC)), float("-inf"))


@triton.jit
def _stored(values, e, end, head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """``values`` ``[E, H]`` of edges ``e``."""
    return tl.load(values + e * HEADS + head, (e < end) & (head < HEADS), 0).to(ACC)


@triton.jit
def _softmax(
    z, kept, s_edge, alpha, bits, factor, start, end, SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr,
    ACC: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of a destination become coefficients after dropout: ``z`` of the first edges, ``kept`` of further ones.

    ``factor``: that of the first edges.
    """
    edge, head = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    z, logit = _logits(z, s_edge, start + edge, end, head, SLOPE, HEADS, ACC)
    top = tl.max(logit, 0, keep_dims=True)
    first = start + WIDE
    while first < end:
        e = first + edge
        _, more = _logits(_stored(kept, e, end, head, HEADS, ACC), s_edge, e, end, head, SLOPE, HEADS, ACC)
        top = tl.maximum(top, tl.max(more, 0, keep_dims=True))
        first += WIDE
    power = tl.exp(logit - top)
    total = tl.sum(tl.where(start + edge < end, power, 0), 0, keep_dims=True)
    first = start + WIDE
    while first < end:
        e = first + edge
        _, more = _logits(_stored(kept, e, end, head, HEADS, ACC), s_edge, e, end, head, SLOPE, HEADS, ACC)
        total += tl.sum(tl.where(e < end, tl.exp(more - top), 0), 0, keep_dims=True)
        first += WIDE
    _store_coefficients(kept, alpha, power / total, z, factor, start + edge, end, head, HEADS)
    first = start + WIDE
    while first < end:
        e = first + edge
        z, more = _logits(_stored(kept, e, end, head, HEADS, ACC), s_edge, e, end, head, SLOPE, HEADS, ACC)
        factor = factor_of_edge(bits, e, e < end, head, SCALE, HEADS, ACC)
        _store_coefficients(kept, alpha, tl.exp(more - top) / total, z, factor, e, end, head, HEADS)
        first += WIDE


@triton.jit
def _store_coefficients(kept, alpha, value, z, factor, e, end, head, HEADS: tl.constexpr):
    known = (e < end) & (head < HEADS)
    tl.store(alpha + e * HEADS + head, tl.where(z > 0, value, -value), known)
    tl.store(kept + e * HEADS + head, value * factor, known)


@triton.jit(do_not_specialize=["n", "share"])
def _attend_rows(
    indptr, indices, dsts, table, v_src, v_dst, s_edge, bits, kept, y, alpha, n, share,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, MORE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """``y[i, h]`` = the weighted sum of the rows of destination ``i``; ``alpha``: signed coefficients.

    ``kept`` ``[E, H]``: the coefficients after dropout, before that the scores' sums of all but the first edges.
    """
    column, head = tile_columns(0, BLOCK), tl.arange(0, TALL)[:, None]
    edge, of = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    vectors = rows_of_heads(v_src, 0, column, True, HEADS, WIDTH, ACC)
    nothing = tl.zeros([TALL, 1], ACC)
    i, last, start, end, ids = begin(indptr, indices, n, share, SLOTS)
    while i < last:
        rows = edge_rows(table, ids, end - start, column, WIDTH, ACC, SLOTS)
        own = one_row(table, tl.load(dsts + i), start < end, column, WIDTH, ACC)
        factor = factor_of_edge(bits, start + edge, start + edge < end, of, SCALE, HEADS, ACC)
        following = tl.load(indptr + i + 2, i + 1 < last, 0)
        ids = edge_ids(indices, end, following, SLOTS)
        by_dst = rows_of_heads(v_dst, 0, column, True, HEADS, WIDTH, ACC)
        z = every_product(
            kept, rows, vectors, own, by_dst, table, indices, start, end, column,
            HEADS, WIDTH, ACC, BLOCK, TALL, SLOTS, WIDE, MORE, VECTOR,
        )  # fmt: skip
        _softmax(z, kept, s_edge, alpha, bits, factor, start, end, SLOPE, SCALE, HEADS, ACC, TALL, WIDE)
        tl.debug_barrier()
        sums = tl.zeros([TALL, BLOCK], ACC)
        sums, _ = _add_every_row(
            sums, nothing, rows, kept, table, indices, start, end, head, column, HEADS, WIDTH, ACC, SLOTS, MORE
        )
        at = y + (i * HEADS + head) * WIDTH + column
        tl.store(at, sums.to(y.dtype.element_ty), (head < HEADS) & (column < WIDTH))
        i += 1
        start, end = end, following


@triton.jit
def _scores_grad(
    for_z, product, e, end, head, signed, delta, SLOPE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr
):
    """Stores the gradients of the scores' sums of edges ``e``; ``product``: those of the coefficients."""
    value = tl.abs(signed) * (product - delta)
    value = tl.where(signed > 0, value, value * tl.full([1, 1], SLOPE, ACC))
    tl.store(for_z + e * HEADS + head, value, (e < end) & (head < HEADS))


@triton.jit
def _softmax_grad(
    product, for_z, alpha, bits, signed, factor, start, end, SLOPE: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same for a destination, products of whose first edges these are; those of further ones ``for_z`` holds.

    ``signed``, ``factor``: coefficients and dropout's factors of the first edges.
    """
    edge, head = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    product *= factor
    delta = tl.sum(tl.abs(signed) * product, 0, keep_dims=True)
    first = start + WIDE
    while first < end:
        e = first + edge
        more = _stored(for_z, e, end, head, HEADS, ACC)
        more *= factor_of_edge(bits, e, e < end, head, SCALE, HEADS, ACC)
        delta += tl.sum(tl.abs(_stored(alpha, e, end, head, HEADS, ACC)) * more, 0, keep_dims=True)
        first += WIDE
    _scores_grad(for_z, product, start + edge, end, head, signed, delta, SLOPE, HEADS, ACC)
    first = start + WIDE
    while first < end:
        e = first + edge
        more = _stored(for_z, e, end, head, HEADS, ACC)
        more *= factor_of_edge(bits, e, e < end, head, SCALE, HEADS, ACC)
        signed = _stored(alpha, e, end, head, HEADS, ACC)
        _scores_grad(for_z, more, e, end, head, signed, delta, SLOPE, HEADS, ACC)
        first += WIDE


@triton.jit(do_not_specialize=["n", "share"])
def _attend_rows_grad(
    indptr, indices, dsts, table, alpha, grad, bits, for_z, out, n, share,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, MORE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """``out[program]``: the program's share of the gradients of both vectors, ``[2, H, F]``.

    ``for_z`` ``[E, H]``: the gradients of the scores' sums, before that products of rows and gradients.
    """
    column, head = tile_columns(0, BLOCK), tl.arange(0, TALL)[:, None]
    edge, of = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    for_src, for_dst = tl.zeros([TALL, BLOCK], ACC), tl.zeros([TALL, BLOCK], ACC)
    nothing = tl.zeros([TALL, 1], ACC)
    i, last, start, end, ids = begin(indptr, indices, n, share, SLOTS)
    while i < last:
        g = rows_of_heads(grad, i, column, start < end, HEADS, WIDTH, ACC)
        rows = edge_rows(table, ids, end - start, column, WIDTH, ACC, SLOTS)
        own = one_row(table, tl.load(dsts + i), start < end, column, WIDTH, ACC)
        e = start + edge
        signed = tl.load(alpha + e * HEADS + of, (e < end) & (of < HEADS), 0)
        factor = factor_of_edge(bits, e, e < end, of, SCALE, HEADS, ACC)
        following = tl.load(indptr + i + 2, i + 1 < last, 0)
        ids = edge_ids(indices, end, following, SLOTS)
        product = every_product(
            for_z, rows, g, None, None, table, indices, start, end, column,
            HEADS, WIDTH, ACC, BLOCK, TALL, SLOTS, WIDE, MORE, VECTOR,
        )  # fmt: skip
        _softmax_grad(product, for_z, alpha, bits, signed, factor, start, end, SLOPE, SCALE, HEADS, ACC, TALL, WIDE)
        tl.debug_barrier()
        for_src, total = _add_every_row(
            for_src, nothing, rows, for_z, table, indices, start, end, head, column, HEADS, WIDTH, ACC, SLOTS, MORE
        )
        for_dst += own * total
        i += 1
        start, end = end, following
    at = out + tl.program_id(0).to(tl.int64) * 2 * HEADS * WIDTH + head * WIDTH + column
    inside = (head < HEADS) & (column < WIDTH)
    tl.store(at, for_src, inside)
    tl.store(at + HEADS * WIDTH, for_dst, inside)


def _grids(device: torch.device, shape: dict, backward: bool) -> list[tune.Config]:
    """Programs of one warp, as many as a multiprocessor holds or a multiple of it; the default first."""
    configs = warp_grids(device, (16, 32, 12, 24) if backward else (16, 32, 48))
    if backward and numbers_of(shape) <= _FEW:
        configs += [{**config, "maxnreg": 128} for config in warp_grids(device, (16,))]
    if not backward and numbers_of(shape) <= _FEW:
        configs += [{**config, "maxnreg": 96} for config in warp_grids(device, (21, 42))]
    return configs


def attend_rows(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, slope: float,
    bits: Tensor | None, scale: float, s_edge: Tensor | None, y: Tensor, alpha: Tensor,
) -> None:  # fmt: skip
    """Fills ``y`` ``[num_dst, H, F]`` and, up to the last edge, ``alpha`` ``[E, H]``: see the op ``gather_attend``."""
    n, heads = y.shape[:2]
    kept, constants = torch.empty_like(alpha), shape_of(n, indices.numel(), table, heads)

    def launch(config: tune.Config) -> None:
        config = dict(config)
        grid = max(1, min(config.pop("GRID"), n))
        _attend_rows[(grid,)](
            indptr, indices, dsts, table, v_src, v_dst, s_edge, bits, kept, y, alpha, n, cdiv(n, grid),
            SLOPE=slope, SCALE=scale, **constants, **config, num_warps=1,
        )  # fmt: skip

    shape = (table.dtype, heads, table.shape[1], constants["SLOTS"], s_edge is not None, tune.size_class(n))
    work = y.numel() * y.element_size()
    launch(tune.choose("attend_rows", shape, _grids(table.device, constants, False), launch, work, table.device))


def attend_rows_grad(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, alpha: Tensor, grad: Tensor, slope: float,
    bits: Tensor | None, scale: float, for_z: Tensor,
) -> Tensor:  # fmt: skip
    """Gradients of both vectors, ``[2, H, F]``; see ``joestar.ops.gather_attend``.

    Fills ``for_z`` ``[E, H]``, the gradients of the scores' sums, up to the last edge.
    """
    n, heads, width = grad.shape
    constants, found = shape_of(n, indices.numel(), table, heads), []

    def launch(config: tune.Config) -> None:
        config = dict(config)
        grid = max(1, min(config.pop("GRID"), n))
        partial = alpha.new_empty((grid, 2, heads, width))
        _attend_rows_grad[(grid,)](
            indptr, indices, dsts, table, alpha, grad, bits, for_z, partial, n, cdiv(n, grid),
            SLOPE=slope, SCALE=scale, **constants, **config, num_warps=1,
        )  # fmt: skip
        found[:] = [added_up(partial)]

    shape = (table.dtype, heads, width, constants["SLOTS"], tune.size_class(n))
    work = grad.numel() * grad.element_size()
    launch(tune.choose("attend_rows_grad", shape, _grids(table.device, constants, True), launch, work, table.device))
    return found[0]
