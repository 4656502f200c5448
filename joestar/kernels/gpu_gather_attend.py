"""Graph attention over rows of a table on the GPU: in one pass where all fits a warp, else in several.

``gpu_attend_rows`` has the first. The passes of the second each read every row once and hold little. Forward: the
products of the edges' rows and the heads' vectors, the softmax of these, then the weighted sums. Backward, with what
the softmax takes off known beforehand: the products of the edges' rows and their destinations' gradients, then the sums
of rows times these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_attend_rows import attend_rows, attend_rows_grad
from joestar.kernels.gpu_edge_products import (
    check_bits,
    check_edge_scores,
    dots,
    edge_products,
    factor_of_edge,
    lane_columns,
    lanes,
    tiles_of,
    wide_dots,
)
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, on_device, op, power_of_two, require
from joestar.kernels.gpu_row_sums import row_sums
from joestar.kernels.gpu_shared import shared_sum
from joestar.kernels.gpu_spmm import row_edges, scatter_dst
from joestar.kernels.gpu_tiles import accumulator, check_values, distinct, row_tile, tile_columns, tile_rows
from joestar.kernels.gpu_warp_rows import fits


def _row_tiles(width: int, numbers: int) -> list[tune.Config]:
    """Rows of a tile, of so many ``numbers`` each, and warps; the default first."""
    most = max(1, 8192 // numbers)
    configs = [
        {"ROWS": min(rows, most), "num_warps": max(1, min(8, min(rows, most) * numbers // per_warp))}
        for rows, per_warp in ((16, 512), (32, 1024), (32, 512), (8, 512))
    ]
    return distinct(configs, width)


@triton.jit(do_not_specialize=["n", "tiles"])
def _row_products(
    table, ids, vectors, out, n, tiles,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``out[i, h]`` = ``table[ids[i]]`` times ``vectors[h]``; rows of several ``tiles`` are added up one by one.

    Without ``ids``, of row ``i``.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = lanes(BLOCK, LANES)
    source = (i if ids is None else tl.load(ids + i, i < n, 0).to(tl.int64))[:, None, None]
    if tiles is not None:
        valid = (i < n)[:, None, None]
        every = wide_dots(
            table, source * WIDTH, vectors, 0 * source, valid, column, tiles, True, HEADS, WIDTH, ACC, BLOCK, ROWS
        )
        for head in tl.static_range(HEADS):
            tl.store(out + i * HEADS + head, every[head].to(out.dtype.element_ty), i < n)
    else:
        inside = (i < n)[:, None, None] & (column < WIDTH)
        rows = tl.load(table + source * WIDTH + column, inside, 0).to(ACC)
        for head in tl.static_range(HEADS):
            vector = tl.load(vectors + head * WIDTH + column + 0 * source, inside, 0).to(ACC)
            tl.store(out + i * HEADS + head, dots(rows, vector).to(out.dtype.element_ty), i < n)


@triton.jit(do_not_specialize=["n", "tiles"])
def _row_dots(a, b, out, n, tiles, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """``out[i]`` = row ``i`` of ``a`` times that of ``b``, in so many ``tiles``."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile_columns(0, BLOCK)
    mask = (i < n) & (column < WIDTH)
    left = tl.load(a + i * WIDTH + column, mask, 0).to(ACC)
    right = tl.load(b + i * WIDTH + column, mask, 0).to(ACC)
    products = left * right
    if tiles is not None:
        tile = 1
        while tile < tiles:
            at = tile * BLOCK + column
            mask = (i < n) & (at < WIDTH)
            left = tl.load(a + i * WIDTH + at, mask, 0).to(ACC)
            products += left * tl.load(b + i * WIDTH + at, mask, 0).to(ACC)
            tile += 1
    tl.store(out + i, tl.sum(products, 1, keep_dims=True), i < n)


@triton.jit(do_not_specialize=["n"])
def _signed_softmax(
    indptr, values, s_dst, s_edge, bits, alpha, n,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Turns ``values`` ``[E, H]``, the sources' scores, into coefficients after dropout.

    ``alpha`` ``[E, H]``: the coefficients before it, negative where the activation's slope is not 1.
    """
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    head = tl.arange(0, TALL)[None, :]
    used = (start < end) & (head < HEADS)
    own = tl.load(s_dst + i.to(tl.int64) * HEADS + head, used, 0).to(ACC)
    top = tl.full([ROWS, TALL], float("-inf"), ACC)
    total = tl.zeros([ROWS, TALL], ACC)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        mask = (e < end) & used
        z = tl.load(values + e * HEADS + head, mask, 0) + own
        if s_edge is not None:
            z += tl.load(s_edge + e * HEADS + head, mask, 0).to(ACC)
        logit = tl.where(mask, tl.where(z > 0, z, z * tl.full([1, 1], SLOPE, ACC)), float("-inf"))
        higher = tl.maximum(top, logit, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(higher == float("-inf"), 0, higher)
        total = total * tl.exp(top - safe) + tl.exp(logit - safe)
        top = higher
        done += 1
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        mask = (e < end) & used
        z = tl.load(values + e * HEADS + head, mask, 0) + own
        if s_edge is not None:
            z += tl.load(s_edge + e * HEADS + head, mask, 0).to(ACC)
        logit = tl.where(z > 0, z, z * tl.full([1, 1], SLOPE, ACC))
        value = tl.exp(logit - top) / total
        tl.store(alpha + e * HEADS + head, tl.where(z > 0, value, -value), mask)
        kept = value * factor_of_edge(bits, e, e < end, head, SCALE, HEADS, ACC)
        tl.store(values + e * HEADS + head, kept, mask)
        done += 1


def _check(indptr: Tensor, indices: Tensor, dsts: Tensor, bits: Tensor | None, heads: int) -> None:
    check_offsets(indptr)
    check_ids(indices, dsts)
    rows = indptr.numel() - 1
    require(dsts.numel() == rows, f"dsts [{rows}]", list(dsts.shape))
    check_bits(bits, indices.numel(), heads)


@on_device
def first_products(x: Tensor, n: int, vectors: Tensor) -> Tensor:
    """``[n, H]`` in the dtype of ``x`` ``[N, F]``: its first rows times every head's vector of ``[H, F]``."""
    check_values(x=x, vectors=vectors)
    right = x.dim() == 2 and vectors.dim() == 2 and x.shape[1] == vectors.shape[1] and n <= x.shape[0]
    require(right, f"at least {n} rows [N, F] and vectors [H, F]", f"{list(x.shape)} and {list(vectors.shape)}")
    return _products(x.contiguous(), None, vectors.contiguous(), x.new_empty((n, vectors.shape[0])))


def _wide_products(table: Tensor, ids: Tensor, vectors: Tensor) -> Tensor:
    """``[n, H]``, at least float32: the rows of the ids times every head's vector."""
    wide = torch.promote_types(table.dtype, torch.float32)
    return _products(table, ids, vectors, table.new_empty((ids.numel(), vectors.shape[0]), dtype=wide))


def _products(table: Tensor, ids: Tensor | None, vectors: Tensor, out: Tensor) -> Tensor:
    """Fills ``out`` ``[n, H]``, and returns it."""
    n, (heads, width) = out.shape[0], vectors.shape
    columns = lane_columns(width, table)

    def launch(config: tune.Config) -> None:
        _row_products[(cdiv(n, config["ROWS"]),)](
            table, ids, vectors, out, n, tiles_of(width, columns["BLOCK"]),
            HEADS=heads, WIDTH=width, ACC=accumulator(table), **columns, **config,
        )  # fmt: skip

    if out.numel():
        shape = (table.dtype, ids is None, heads, width, tune.size_class(n))
        work = n * width * table.element_size()
        launch(tune.choose("row_products", shape, _row_tiles(width, columns["BLOCK"]), launch, work, table.device))
    return out


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """``[n, H]``: the products of the rows of ``a`` and ``b`` ``[n, H, C]``, at least float32."""
    n, heads, width = a.shape
    out = torch.empty((n, heads), dtype=torch.promote_types(a.dtype, torch.float32), device=a.device)
    block = row_tile(max(1, width))
    rows = max(1, 2048 // block)
    _row_dots[(cdiv(n * heads, rows),)](
        a, b, out, n * heads, tiles_of(width, block),
        WIDTH=width, ACC=accumulator(a), BLOCK=block, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out


@op
def gather_attend(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, slope: float,
    bits: Tensor | None, scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(``y`` ``[num_dst, H, F]``, signed coefficients ``[E, H]``); see ``joestar.ops.gather_attend``."""
    heads, width = v_src.shape
    _check(indptr, indices, dsts, bits, heads)
    check_values(table=table, v_src=v_src, v_dst=v_dst)
    n, edges = indptr.numel() - 1, indices.numel()
    if s_edge is not None:
        check_edge_scores(s_edge, edges, heads)
    y = table.new_empty((n, heads, width))
    alpha = table.new_empty((edges, heads), dtype=torch.promote_types(table.dtype, torch.float32))
    if n and heads and fits(n, edges, table, heads):
        attend_rows(indptr, indices, dsts, table, v_src, v_dst, slope, bits, scale, s_edge, y, alpha)
    elif n and heads:
        values, s_dst = _wide_products(table, indices, v_src), _wide_products(table, dsts, v_dst)
        tall = power_of_two(heads)
        rows = max(1, 128 // tall)
        _signed_softmax[(cdiv(n, rows),)](
            indptr, values, s_dst, s_edge, bits, alpha, n,
            SLOPE=slope, SCALE=scale, HEADS=heads, ACC=accumulator(table), TALL=tall, ROWS=rows, num_warps=4,
        )  # fmt: skip
        shared_sum(indptr, indices, table.unsqueeze(1), values, False, y)
    return y, alpha


@op
def gather_attend_grad(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, alpha: Tensor, grad: Tensor, out: Tensor,
    out_grad: Tensor, slope: float, bits: Tensor | None, scale: float, of_edges: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Gradients of both vectors ``[2, H, F]``, of the edges' scores) in ``alpha``'s dtype; no atomic additions."""
    n, heads, width = grad.shape
    _check(indptr, indices, dsts, bits, heads)
    check_values(table=table, alpha=alpha, grad=grad, out=out, out_grad=out_grad)
    for_z = torch.zeros_like(alpha) if of_edges else torch.empty_like(alpha)
    for_edge = for_z if of_edges else alpha.new_empty(0)
    if not (n and heads and width):
        return alpha.new_zeros((2, heads, width)), for_edge
    if fits(n, indices.numel(), table, heads):
        return attend_rows_grad(indptr, indices, dsts, table, alpha, grad, slope, bits, scale, for_z), for_edge
    deltas = _dots(out, out_grad)
    edge_products(indptr, indices, table.unsqueeze(1), grad, for_z, alpha, deltas, slope, bits, scale)
    for_dst = scatter_dst(indptr, for_z)
    both = torch.stack((row_sums(table, indices, for_z, indptr[-1:]), row_sums(table, dsts, for_dst)))
    return both, for_edge
