"""Rows of a destination's edges in the registers of a warp, on the GPU; what begins from them: products with heads.

For destinations of few edges, as sampling leaves them: what one has more than ``SLOTS`` edges is read when it is used.
Programs take destinations that follow one another, and read the ids of the next one while they work.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, power_of_two
from joestar.kernels.gpu_tiles import accumulator, tile_columns
from joestar.kernels.tune import Config

_SLOTS, _MORE, _DEGREE = (2, 4, 6, 8), 2, 16
"""Rows in registers, further ones at a time, and most edges per destination, on average, for which this pays."""
_NUMBERS = 2560
"""Most numbers of a warp, of 4 bytes."""


@triton.jit
def one_row(table, source, known, column, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """``[1, columns]``: a row of the table, 0 unless ``known``."""
    return tl.load(table + source.to(tl.int64) * WIDTH + column, known & (column < WIDTH), 0).to(ACC)


@triton.jit
def rows_of_heads(values, i, column, known, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """``values[i]`` of ``[n, H, F]``: a tile ``[1, columns]`` per head."""
    rows = ()
    for head in tl.static_range(HEADS):
        at = values + (i * HEADS + head) * WIDTH + column
        rows = rows + (tl.load(at, known & (column < WIDTH), 0).to(ACC),)  # noqa: RUF005
    return rows


@triton.jit
def edge_ids(indices, first, end, SLOTS: tl.constexpr):
    """Ids of the edges from ``first`` on, one scalar each."""
    ids = ()
    for j in tl.static_range(SLOTS):
        ids = ids + (tl.load(indices + first + j, first + j < end, 0),)  # noqa: RUF005
    return ids


@triton.jit
def edge_rows(table, ids, count, column, WIDTH: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr):
    """The rows of the first ``count`` ids, as many tiles ``[1, columns]``."""
    rows = ()
    for j in tl.static_range(SLOTS):
        rows = rows + (one_row(table, ids[j], j < count, column, WIDTH, ACC),)  # noqa: RUF005
    return rows


@triton.jit
def _halved(values, lane, COUNT: tl.constexpr, BIT: tl.constexpr):
    """Half as many vectors of lanes: each lane adds up two lanes' shares of the first or of the second half's."""
    upper, found = (lane & BIT) != 0, ()
    for v in tl.static_range(COUNT // 2):
        stays = tl.where(upper, values[v + COUNT // 2], values[v])
        goes = tl.where(upper, values[v], values[v + COUNT // 2])
        found = found + (stays + tl.gather(goes, lane ^ BIT, 0),)  # noqa: RUF005
    return found


@triton.jit
def _spread(
    rows, vectors, own, by, SLOTS: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Products of ``rows`` and every head's ``vectors``, ``[WIDE, TALL]``, spread over the lanes of the warp.

    With ``own``, the slot behind the rows has its products with ``by``. As many sums as there are lanes take 31
    exchanges between lanes; one by one they would take 5 each.
    """
    VALUES: tl.constexpr = WIDE * TALL
    lane, values = tl.arange(0, 32), ()
    for j in tl.static_range(WIDE):
        for head in tl.static_range(TALL):
            if head < HEADS and (j < SLOTS or (j == SLOTS and own is not None)):
                product = rows[j] * vectors[head] if j < SLOTS else own * by[head]
                product = tl.reshape(product, (BLOCK // (32 * VECTOR), 32, VECTOR))
                values = values + (tl.sum(tl.sum(product, 2), 0),)  # noqa: RUF005
            else:
                values = values + (tl.zeros([32], ACC),)  # noqa: RUF005
    for halving in tl.static_range(5):
        if (VALUES >> halving) > 1:
            values = _halved(values, lane, VALUES >> halving, 16 >> halving)
    return tl.reshape(tl.sum(tl.reshape(values[0], (VALUES, 32 // VALUES)), 1), (WIDE, TALL))


@triton.jit
def _spread_to_memory(
    at, rows, vectors, plus, first, end, FROM: tl.constexpr, COUNT: tl.constexpr, PER: tl.constexpr,
    HEADS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Stores the products of ``COUNT`` rows ``FROM`` a place on, which belong to edges ``first`` and following."""
    few = ()
    for j in tl.static_range(COUNT):
        few = few + (rows[FROM + j],)  # noqa: RUF005
    products = _spread(few, vectors, None, None, COUNT, HEADS, ACC, BLOCK, TALL, PER, VECTOR) + plus
    slot, head = tl.arange(0, PER)[:, None], tl.arange(0, TALL)[None, :]
    e = first + FROM + slot
    tl.store(at + e * HEADS + head, products, (slot < COUNT) & (e < end) & (head < HEADS))


@triton.jit
def every_product(
    values, rows, vectors, own, by, table, indices, start, end, column, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    MORE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Products of all edges' rows and every head's vector, plus that of ``own``, unless ``None``, and ``by``.

    Those of the first ``WIDE`` edges, ``[WIDE, TALL]``; those of further ones are stored in ``values`` ``[E, H]``.
    ``rows`` are those of the first ``SLOTS`` edges, others are read.
    """
    edge, head = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    plus = tl.zeros([1, TALL], ACC)
    PER: tl.constexpr = min(WIDE, 32 // TALL)
    if own is not None and (SLOTS == WIDE or PER < WIDE):
        plus = _spread((own,), by, None, None, 1, HEADS, ACC, BLOCK, TALL, 1, VECTOR)
    if PER == WIDE:
        if own is not None and SLOTS < WIDE:
            z = _spread(rows, vectors, own, by, SLOTS, HEADS, ACC, BLOCK, TALL, WIDE, VECTOR)
            plus = tl.sum(tl.where(edge == SLOTS, z, 0), 0, keep_dims=True)
        else:
            z = _spread(rows, vectors, None, None, SLOTS, HEADS, ACC, BLOCK, TALL, WIDE, VECTOR)
        z += plus
    else:
        for part in tl.static_range(0, SLOTS, PER):
            _spread_to_memory(
                values, rows, vectors, plus, start, end, part, min(PER, SLOTS - part), PER,
                HEADS, ACC, BLOCK, TALL, VECTOR,
            )  # fmt: skip
    first = start + SLOTS
    MANY: tl.constexpr = min(MORE, 32 // TALL)
    while first < end:
        more = edge_rows(table, edge_ids(indices, first, end, MANY), end - first, column, WIDTH, ACC, MANY)
        _spread_to_memory(values, more, vectors, plus, first, end, 0, MANY, MANY, HEADS, ACC, BLOCK, TALL, VECTOR)
        first += MANY
    e = start + edge
    known = (e < end) & (head < HEADS)
    if PER < WIDE:
        tl.debug_barrier()
        z = tl.load(values + e * HEADS + head, known, 0)
    elif end - start > SLOTS:
        tl.debug_barrier()
        z = tl.where(edge < SLOTS, z, tl.load(values + e * HEADS + head, known & (edge >= SLOTS), 0))
    return z


@triton.jit
def begin(indptr, indices, n, share, SLOTS: tl.constexpr):
    """(this program's first destination, the end of its share, first edge, end, ids of the destination's edges)."""
    i = tl.program_id(0).to(tl.int64) * share
    last = tl.minimum(i + share, n)
    start = tl.load(indptr + i, i < last, 0)
    end = tl.load(indptr + i + 1, i < last, 0)
    return i, last, start, end, edge_ids(indices, start, end, SLOTS)


@triton.jit(do_not_specialize=["n", "share"])
def _warp_products(
    indptr, indices, x, grad, out, n, share,
    MEAN: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, MORE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """``out[e, h] = <x[indices[e]], grad[row of e, h]>``, over the row's degree for a mean."""
    column = tile_columns(0, BLOCK)
    edge, head = tl.arange(0, WIDE)[:, None], tl.arange(0, TALL)[None, :]
    i, last, start, end, ids = begin(indptr, indices, n, share, SLOTS)
    while i < last:
        g = rows_of_heads(grad, i, column, start < end, HEADS, WIDTH, ACC)
        rows = edge_rows(x, ids, end - start, column, WIDTH, ACC, SLOTS)
        following = tl.load(indptr + i + 2, i + 1 < last, 0)
        ids = edge_ids(indices, end, following, SLOTS)
        if MEAN:
            degree, each = tl.maximum(end - start, 1).to(ACC), ()
            for h in tl.static_range(HEADS):
                each = each + (g[h] / degree,)  # noqa: RUF005
            g = each
        z = every_product(
            out, rows, g, None, None, x, indices, start, end, column,
            HEADS, WIDTH, ACC, BLOCK, TALL, SLOTS, WIDE, MORE, VECTOR,
        )  # fmt: skip
        e = start + edge
        tl.store(out + e * HEADS + head, z, (edge < SLOTS) & (e < end) & (head < HEADS))
        i += 1
        start, end = end, following


def shape_of(rows: int, edges: int, table: Tensor, heads: int) -> dict:
    """Constants of a launch."""
    slots = next((most for most in _SLOTS if most * rows >= edges), _SLOTS[-1])
    acc, width = accumulator(table), table.shape[1]
    block = max(32, power_of_two(width))
    together = max(1, 16 // table.element_size())
    sizes = {
        "BLOCK": block,
        "VECTOR": min(block // 32, math.gcd(width, together)) if width else 1,
        "TALL": power_of_two(heads),
        "WIDE": power_of_two(slots),
        "MORE": _MORE,
    }
    return {"HEADS": heads, "WIDTH": width, "ACC": acc, "SLOTS": slots, **sizes}


def numbers_of(shape: dict, held: int = 2) -> int:
    """What a warp holds, in units of 4 bytes: rows, and so many numbers ``held`` per head and column."""
    return (shape["SLOTS"] + held * shape["TALL"]) * shape["BLOCK"] * (2 if shape["ACC"] == tl.float64 else 1)


def fits(rows: int, edges: int, table: Tensor, heads: int, held: int = 2) -> bool:
    """Whether destinations have few enough edges, and their rows and all heads a place in a warp's registers."""
    if edges > _DEGREE * rows or heads > 32:  # a lane for each
        return False
    return numbers_of(shape_of(rows, edges, table, heads), held) <= _NUMBERS


def warp_grids(device: torch.device, each: tuple[int, ...]) -> list[Config]:
    """Programs of one warp, ``each`` of these numbers per multiprocessor."""
    many = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return [{"GRID": many * count} for count in each]


def warp_products(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, out: Tensor, mean: bool, programs: int
) -> None:
    """Fills ``out`` ``[E, H]`` up to the last edge; ``x`` ``[N, F]``, ``grad`` ``[num_dst, H, F]``, which fits."""
    n, heads = grad.shape[:2]
    grid = max(1, min(programs, n))
    constants = {**shape_of(n, indices.numel(), x, heads), "ACC": accumulator(x, grad)}
    _warp_products[(grid,)](indptr, indices, x, grad, out, n, cdiv(n, grid), MEAN=mean, **constants, num_warps=1)
