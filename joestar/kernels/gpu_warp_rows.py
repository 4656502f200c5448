"""Rows of a destination's edges in the registers of a warp, on the GPU; what begins from them: products with heads.

For destinations of few edges, as sampling leaves them: what one has more than ``SLOTS`` edges is read when it is used.
Programs take destinations that follow one another, and read the ids of the next one while they work.
"""

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
def rows_of_heads(values, i, head, column, known, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """``[heads, columns]``: ``values[i]`` of ``[n, H, F]``."""
    return tl.load(values + (i * HEADS + head) * WIDTH + column, known & (head < HEADS) & (column < WIDTH), 0).to(ACC)


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
def store_products(
    values, rows, vectors, plus, first, end, head, HEADS: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr
):
    """``values[first + j, h] = rows[j] * vectors[h] + plus[h]`` up to ``end``."""
    slot = tl.arange(0, WIDE)[None, :]
    products = tl.zeros([vectors.shape[0], WIDE], vectors.dtype)
    for j in tl.static_range(SLOTS):
        products = tl.where(slot == j, tl.sum(rows[j] * vectors, 1, keep_dims=True) + plus, products)
    inside = (slot < SLOTS) & (first + slot < end) & (head < HEADS)
    tl.store(values + (first + slot) * HEADS + head, products, inside)


@triton.jit
def store_every_product(
    values, rows, vectors, plus, table, indices, start, end, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The same for all edges of a destination; ``rows`` are those of the first ``SLOTS``, others are read."""
    store_products(values, rows, vectors, plus, start, end, head, HEADS, SLOTS, WIDE)
    first = start + SLOTS
    while first < end:
        more = edge_rows(table, edge_ids(indices, first, end, MORE), end - first, column, WIDTH, ACC, MORE)
        store_products(values, more, vectors, plus, first, end, head, HEADS, MORE, MORE)
        first += MORE


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
):  # fmt: skip
    """``out[e, h] = <x[indices[e]], grad[row of e, h]>``, over the row's degree for a mean."""
    column, head = tile_columns(0, BLOCK), tl.arange(0, TALL)[:, None]
    nothing = tl.zeros([TALL, 1], ACC)
    i, last, start, end, ids = begin(indptr, indices, n, share, SLOTS)
    while i < last:
        g = rows_of_heads(grad, i, head, column, start < end, HEADS, WIDTH, ACC)
        rows = edge_rows(x, ids, end - start, column, WIDTH, ACC, SLOTS)
        following = tl.load(indptr + i + 2, i + 1 < last, 0)
        ids = edge_ids(indices, end, following, SLOTS)
        if MEAN:
            g = g / tl.maximum(end - start, 1).to(ACC)
        store_every_product(
            out, rows, g, nothing, x, indices, start, end, head, column, HEADS, WIDTH, ACC, SLOTS, WIDE, MORE
        )
        i += 1
        start, end = end, following


def shape_of(rows: int, edges: int, table: Tensor, heads: int) -> dict:
    """Constants of a launch."""
    slots = next((most for most in _SLOTS if most * rows >= edges), _SLOTS[-1])
    acc, width = accumulator(table), table.shape[1]
    sizes = {
        "BLOCK": max(32, power_of_two(width)),
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
    return edges <= _DEGREE * rows and numbers_of(shape_of(rows, edges, table, heads), held) <= _NUMBERS


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
