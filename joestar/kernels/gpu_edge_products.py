"""Products of the edges' rows and their destinations' gradients on the GPU: what attention's gradients begin with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, power_of_two, require
from joestar.kernels.gpu_tiles import accumulator, check_values, distinct, row_tile, tile_columns
from joestar.kernels.gpu_warp_rows import fits, warp_grids, warp_products
from joestar.kernels.layout import shares_rows
from joestar.kernels.machine import products_in_tf32


def check_bits(bits: Tensor | None, edges: int, heads: int) -> None:
    """Raises ``ValueError`` unless the bits, if any, are int32 ``[edges, ceil(heads / 32)]``."""
    if bits is not None:
        words = (edges, cdiv(heads, 32))
        right = bits.shape == words and bits.dtype == torch.int32
        require(right, f"bits int32 {list(words)}", f"{bits.dtype} {list(bits.shape)}")


def check_edge_scores(s_edge: Tensor, edges: int, heads: int, dtype: torch.dtype | None = None) -> None:
    """Raises ``ValueError`` unless scores of edges are ``[edges, heads]``, of the dtype if one is given."""
    check_values(s_edge=s_edge)
    dtype = s_edge.dtype if dtype is None else dtype
    right = s_edge.shape == (edges, heads) and s_edge.dtype == dtype
    require(right, f"s_edge {dtype} {[edges, heads]}", f"{s_edge.dtype} {list(s_edge.shape)}")


@triton.jit
def factor_of_edge(bits, e, valid, head, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """``SCALE`` ``[heads, 1]`` where the coefficient of edge ``e`` is kept, else 0; 1 without dropout."""
    if bits is None:
        return tl.full(head.shape, 1, ACC)
    else:
        WORDS: tl.constexpr = (HEADS + 31) // 32
        word = tl.load(bits + e * WORDS + head % WORDS, valid & (head < HEADS), 0)
        return ((word >> (head // WORDS)) & 1).to(ACC) * tl.full([1, 1], SCALE, ACC)


@triton.jit
def lanes(BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Columns ``[1, parts, LANES]``: a warp has four rows at once, and few threads share a row to add it up."""
    part = tl.arange(0, BLOCK // LANES)[None, :, None]
    return part * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def dots(a, b):
    """``[rows]``: the products of rows ``[rows, parts, LANES]``; parts are added up in registers."""
    return tl.sum(tl.sum(a * b, 1), 1)


@triton.jit
def _score_grads(
    products, alpha, deltas, bits, e, row, known, head,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Products of rows and gradients, as they are or (with ``alpha``) as gradients of the scores' sums."""
    if alpha is not None:
        signed = tl.load(alpha + e * HEADS + head, known, 0)
        delta = tl.load(deltas + row * HEADS + head, known, 0)
        kept = factor_of_edge(bits, e, known, head, SCALE, HEADS, ACC)
        products = tl.abs(signed) * (kept * products - delta)
        products = tl.where(signed > 0, products, products * tl.full([1, 1], SLOPE, ACC))
    return products


@triton.jit
def wide_dots(
    a, a_base, b, b_base, valid, column, tiles,
    SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Products of rows of ``a`` and ``b`` per head, a tuple of ``[ROWS]``, added up tile after tile.

    The bases ``[ROWS, 1, 1]`` are those of all heads; with ``SHARED`` the heads of ``b`` meet one row of ``a``.
    """
    totals = ()
    for _ in tl.static_range(HEADS):
        totals = totals + (tl.zeros([ROWS], ACC),)  # noqa: RUF005
    tile = 0
    while tile < tiles:
        at = tile * BLOCK + column
        inside = valid & (at < WIDTH)
        more = ()
        if SHARED:
            rows = tl.load(a + a_base + at, inside, 0).to(ACC)
        for head in tl.static_range(HEADS):
            if not SHARED:
                rows = tl.load(a + a_base + head * WIDTH + at, inside, 0).to(ACC)
            other = tl.load(b + b_base + head * WIDTH + at, inside, 0).to(ACC)
            more = more + (totals[head] + dots(rows, other),)  # noqa: RUF005
        totals = more
        tile += 1
    return totals


@triton.jit(do_not_specialize=["n", "tiles"])
def _edge_products(
    indptr, indices, x, grad, alpha, deltas, bits, out, n, tiles,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, SHARED: tl.constexpr, MEAN: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, DSTS: tl.constexpr,
    EDGES: tl.constexpr,
):  # fmt: skip
    """``out[e, h]`` = the row of an edge's source times ``grad[row of e, h]``.

    With signed coefficients ``alpha`` ``[E, H]`` and ``deltas`` ``[num_dst, H]``: the gradients of the scores' sums.
    A program takes all edges of ``DSTS`` destinations, ``EDGES`` at a time, whosever they are: no tile is half empty.
    Rows of several ``tiles`` are added up tile after tile; ``MEAN`` divides their products by the degree.
    """
    i = tl.program_id(0).to(tl.int64) * DSTS
    ends = tl.load(indptr + tl.minimum(i + 1 + tl.arange(0, DSTS), n))[None, :]
    first, last = tl.load(indptr + i), tl.load(indptr + tl.minimum(i + DSTS, n))
    column = lanes(BLOCK, LANES)
    e = first + tl.arange(0, EDGES)
    following = tl.load(indices + e, e < last, 0)  # a tile ahead: the ids are there when their rows are read
    while first < last:
        e = first + tl.arange(0, EDGES)
        valid = e < last
        row = i + tl.sum((e[:, None] >= ends).to(tl.int64), 1)
        source = following.to(tl.int64)[:, None, None]
        following = tl.load(indices + e + EDGES, e + EDGES < last, 0)
        reader, inside = row[:, None, None], valid[:, None, None] & (column < WIDTH)
        if tiles is not None:
            every = wide_dots(
                x, source * (WIDTH if SHARED else HEADS * WIDTH), grad, reader * (HEADS * WIDTH), valid[:, None, None],
                column, tiles, SHARED, HEADS, WIDTH, ACC, BLOCK, EDGES,
            )  # fmt: skip
        elif SHARED:
            rows = tl.load(x + source * WIDTH + column, inside, 0).to(ACC)
        for head in tl.static_range(HEADS):
            if tiles is not None:
                product = every[head]
            else:
                if not SHARED:
                    rows = tl.load(x + (source * HEADS + head) * WIDTH + column, inside, 0).to(ACC)
                g = tl.load(grad + (reader * HEADS + head) * WIDTH + column, inside, 0).to(ACC)
                product = dots(rows, g)
            if MEAN:
                degree = tl.load(indptr + row + 1, valid, 1) - tl.load(indptr + row, valid, 0)
                product = product / degree.to(ACC)
            value = _score_grads(
                product[None, :], alpha, deltas, bits, e[None, :], row[None, :], valid[None, :],
                tl.full([1, 1], head, tl.int32), SLOPE, SCALE, HEADS, ACC,
            )  # fmt: skip
            tl.store(out + e[None, :] * HEADS + head, value, valid[None, :])
        first += EDGES


@triton.jit(do_not_specialize=["n"])
def _edge_products_dense(
    indptr, indices, x, grad, alpha, deltas, bits, out, n,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, TALL: tl.constexpr, DSTS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """``_edge_products`` of shared rows on tensor cores, in TF32: rows times the gradients of ``DSTS`` destinations.

    All products but those with the own destination's are thrown away; a gradient is read once, not once per edge.
    """
    i = tl.program_id(0).to(tl.int64) * DSTS
    ends = tl.load(indptr + tl.minimum(i + 1 + tl.arange(0, DSTS), n))[None, :]
    first, last = tl.load(indptr + i), tl.load(indptr + tl.minimum(i + DSTS, n))
    column = tile_columns(0, BLOCK)
    reader, of = tl.arange(0, DSTS * TALL) // TALL, tl.arange(0, DSTS * TALL) % TALL
    used = (i + reader < n) & (of < HEADS)
    at = ((i + reader) * HEADS + of)[:, None] * WIDTH + column
    g = tl.load(grad + at, used[:, None] & (column < WIDTH) & (first < last), 0)
    head, one = tl.arange(0, TALL)[None, :], tl.arange(0, DSTS)[None, :, None]
    while first < last:
        e = first + tl.arange(0, EDGES)[:, None]
        own = tl.sum((e >= ends).to(tl.int32), 1, keep_dims=True)
        source = tl.load(indices + e, e < last, 0).to(tl.int64)
        rows = tl.load(x + source * WIDTH + column, (e < last) & (column < WIDTH), 0)
        every = tl.dot(rows, tl.trans(g), input_precision="tf32", out_dtype=ACC)
        mine = tl.where(own[:, :, None] == one, tl.reshape(every, [EDGES, DSTS, TALL]), 0)
        known = (e < last) & (head < HEADS)
        value = _score_grads(tl.sum(mine, 1), alpha, deltas, bits, e, i + own, known, head, SLOPE, SCALE, HEADS, ACC)
        tl.store(out + e * HEADS + head, value, known)
        first += EDGES


def tiles_of(width: int, block: int) -> int | None:
    """Tiles of a row of several ones; ``None`` for one, which kernels are compiled for."""
    return cdiv(width, block) if width > block else None


def lane_columns(width: int, *values: Tensor) -> dict[str, int]:
    """Columns of a row's tile, and of the part of it that threads side by side read: 128 bytes."""
    block = max(16, row_tile(width))
    return {"BLOCK": block, "LANES": min(block, 128 // max(2, min(4, values[0].element_size())))}


def _edge_tiles(width: int, numbers: int) -> list[tune.Config]:
    """Destinations of a program, edges of a tile whose rows have so many ``numbers``, and warps; the default first."""
    most = max(1, 8192 // numbers)
    tried = ((2, 8, 512), (8, 8, 512), (16, 8, 1024), (16, 16, 512))
    configs = [
        {"DSTS": dsts, "EDGES": min(edges, most), "num_warps": max(1, min(8, min(edges, most) * numbers // per_warp))}
        for dsts, edges, per_warp in tried
    ]
    return distinct(configs, width)


def _dense_tiles(tall: int) -> list[tune.Config]:
    """The same for products on tensor cores: at least 16 gradients."""
    tried = ((4, 32, 4), (4, 16, 2))
    return [
        {"dense": 1, "DSTS": max(dsts, 16 // tall), "EDGES": edges, "num_warps": warps} for dsts, edges, warps in tried
    ]


def edge_products(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, out: Tensor, alpha: Tensor | None = None,
    deltas: Tensor | None = None, slope: float = 1.0, bits: Tensor | None = None, scale: float = 1.0,
    mean: bool = False,
) -> None:  # fmt: skip
    """Fills ``out`` ``[E, H]`` up to the last edge; see the kernel. ``x`` ``[N, H, F]`` or ``[N, 1, F]``."""
    n, heads, width = grad.shape
    edges, columns, shared = indices.numel(), lane_columns(width, x), shares_rows(x, out)
    operands = indptr, indices, x, grad, alpha, deltas, bits, out, n
    settings = {"SLOPE": slope, "SCALE": scale, "HEADS": heads, "WIDTH": width, "ACC": accumulator(x, grad)}
    tall, candidates = power_of_two(heads), _edge_tiles(width, columns["BLOCK"])
    tiles = tiles_of(width, columns["BLOCK"])
    exact = x.dtype == torch.float32 and not products_in_tf32()
    dense = shared and not mean and x.dtype == grad.dtype and x.dtype != torch.float64 and not exact and width <= 256
    if dense:
        candidates = [*candidates, *_dense_tiles(tall)]
    in_warps = shared and alpha is None and fits(n, edges, x[:, 0], heads, held=1)
    if in_warps:
        candidates = [*warp_grids(x.device, (28, 16, 56)), *candidates]

    def launch(config: tune.Config) -> None:
        if "GRID" in config:
            warp_products(indptr, indices, x[:, 0], grad, out, mean, config["GRID"])
            return
        grid = (cdiv(n, config["DSTS"]),)
        if "dense" in config:
            config = {name: value for name, value in config.items() if name != "dense"}
            _edge_products_dense[grid](*operands, **settings, BLOCK=columns["BLOCK"], TALL=tall, **config)
        else:
            _edge_products[grid](*operands, tiles, **settings, SHARED=shared, MEAN=mean, **columns, **config)

    forms, sizes = (shared, alpha is not None, dense, in_warps), (tune.size_class(n), tune.size_class(edges))
    shape = (x.dtype, heads, width, *forms, *sizes)
    work = (n + edges) * heads * width * x.element_size()
    launch(tune.choose("edge_products", shape, candidates, launch, work, x.device))
