"""Gradients of aggregation on the GPU.

The gradient for ``x`` adds up in any order (over lists of edges, ``gpu_links``): its last bits change between runs.
``spmm_grad_x_transposed`` and ``scatter_src_transposed`` order the edges by source first and add up in edge order; they
take over under ``torch.use_deterministic_algorithms(True)``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.determinism import is_deterministic
from joestar.kernels.gpu_edges import edge_dots
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, require
from joestar.kernels.gpu_links import gathered_grad
from joestar.kernels.gpu_shared_grad import shared_dots, shared_rows_grad
from joestar.kernels.gpu_spmm import aggregate, row_edges, transposed
from joestar.kernels.gpu_structure import edge_dst
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    heads_and_width,
    row_size,
    row_tile,
    tile_columns,
    tile_rows,
)
from joestar.kernels.layout import message_shape, shares_rows, wide_dtype


@op
def spmm_grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of ``spmm`` (sum or mean) for ``x`` ``[num_src, ...]``, in the dtype of ``grad``.

    ``shared``: the heads of ``grad`` ``[num_dst, H, ...]`` read one row; the result is ``[num_src, 1, ...]``.
    """
    if is_deterministic():
        return spmm_grad_x_transposed(indptr, indices, grad, weight, num_src, reduce, shared)
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, weight=weight)
    if shared:
        return shared_rows_grad(indptr, indices, grad, weight, num_src, reduce == "mean")
    return gathered_grad(indptr, indices, grad, num_src, weight, reduce)[0]


@op
def spmm_grad_x_transposed(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """``spmm_grad_x``, deterministic: the edges are sorted by source, and each source gathers its own."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(grad=grad, weight=weight)
    out = grad.new_empty((num_src, *((1, *grad.shape[2:]) if shared else grad.shape[1:])))
    offsets, dst, order = transposed(indptr, indices, edge_dst(indptr, indices.numel(), indices), num_src)
    scaled = grad
    if reduce == "mean":
        degree = (indptr[1:] - indptr[:-1]).clamp(min=1).to(wide_dtype(grad.dtype))
        scaled = grad.to(wide_dtype(grad.dtype)) / degree.reshape(-1, *[1] * (grad.dim() - 1))
    weight = None if weight is None else weight[order]
    if shared:  # every head of an edge is an edge of its own
        heads = weight.shape[1]
        dst = (dst.to(torch.int64)[:, None] * heads + torch.arange(heads, device=dst.device)).reshape(-1)
        offsets, scaled, weight = offsets * heads, scaled.flatten(0, 1), weight.reshape(-1)
    aggregate(offsets, dst, scaled, weight, "sum", out)
    return out


@op
def spmm_grad_weight(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, weight_like: Tensor, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for the edge weights, in the shape and dtype of ``weight_like``."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, grad=grad, weights=weight_like)
    row = list(message_shape(x, weight_like))
    require(list(grad.shape[1:]) == row, f"a gradient with rows {row}", list(grad.shape[1:]))
    if shares_rows(x, weight_like):
        out = torch.zeros_like(weight_like)
        shared_dots(indptr, indices, x, grad, reduce == "mean", out)
        return out
    heads, width = heads_and_width(x, weight_like)
    out = torch.empty(weight_like.shape, dtype=weight_like.dtype, device=weight_like.device)
    edge_dots(indptr, indices, x, grad, heads, width, reduce == "mean", out)
    return out


@triton.jit(do_not_specialize=["n"])
def _extremum_grad(
    indptr, indices, x, weight, y, grad, grad_x, grad_weight, n, num_edges,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PER_EDGE: tl.constexpr,
):  # fmt: skip
    """Counts the messages of a row that equal its result, then gives each its share; a head per program.

    Axis 2 of the grid runs over the tiles of wide heads: ``grad_weight`` has a layer ``[E, H]`` for each. ``PER_EDGE``:
    ``grad_x`` has a row for every edge, which is written; else one for every source, which is added to.
    """
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    head = tl.program_id(1)
    part = 0 if HEAD_WIDTH <= BLOCK else tl.program_id(2)
    column = tile_columns(part, BLOCK)
    inside = column < HEAD_WIDTH
    column += head * HEAD_WIDTH
    own = i.to(tl.int64) * WIDTH + column
    result = tl.load(y + own, (start < end) & inside, 0)
    ties = tl.zeros([ROWS, BLOCK], tl.int32)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        source = tl.load(indices + e, e < end, 0).to(tl.int64)
        mask = (e < end) & inside
        message = tl.load(x + source * WIDTH + column, mask, 0).to(ACC)
        if weight is not None:
            message = message * tl.load(weight + e * HEADS + head, e < end, 0).to(ACC)
        ties += ((message.to(y.dtype.element_ty) == result) & mask).to(tl.int32)
        done += 1
    share = tl.load(grad + own, (start < end) & inside, 0).to(ACC) / tl.maximum(ties, 1).to(ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        e = start + done
        source = tl.load(indices + e, e < end, 0).to(tl.int64)
        mask = (e < end) & inside
        at = source * WIDTH + column
        value = tl.load(x + at, mask, 0).to(ACC)
        factor = tl.full([ROWS, 1], 1, ACC)
        if weight is not None:
            factor = tl.load(weight + e * HEADS + head, e < end, 0).to(ACC)
        chosen = ((value * factor).to(y.dtype.element_ty) == result) & mask
        if PER_EDGE:
            tl.store(grad_x + e.to(tl.int64) * WIDTH + column, tl.where(chosen, share * factor, 0), mask)
        else:
            tl.atomic_add(grad_x + at, share * factor, chosen, sem="relaxed")
        if weight is not None:
            for_weight = tl.sum(tl.where(chosen, share * value, 0), 1, keep_dims=True)
            layer = grad_weight
            if HEAD_WIDTH > BLOCK:
                layer += part * num_edges.to(tl.int64) * HEADS
            tl.store(layer + e * HEADS + head, for_weight.to(grad_weight.dtype.element_ty), e < end)
        done += 1


@op
def spmm_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm`` (max or min) for ``x`` and ``weight``, shared evenly among ties.

    For ``x`` by atomic additions; deterministic: by values ``[E, ...]`` that every source adds up in order. Ties are
    found by comparing messages, rounded as in the forward pass, with ``y``.
    """
    check_offsets(indptr)
    check_ids(indices)
    check_values(x=x, weight=weight, y=y, grad=grad)
    wider = weight is not None and torch.promote_types(x.dtype, weight.dtype) != x.dtype
    require(
        not wider, f"weights no wider than x, {x.dtype}, whose ties count", None if weight is None else weight.dtype
    )
    heads, width = heads_and_width(x, weight)
    ordered = is_deterministic()
    rows_of = (indices.numel(), *x.shape[1:]) if ordered else x.shape
    grad_x = torch.zeros(rows_of, dtype=wide_dtype(x.dtype), device=x.device)
    n, block = indptr.numel() - 1, row_tile(max(1, width))
    parts = cdiv(max(1, width), block)
    layers = grad_weight = None if weight is None else torch.zeros_like(weight)
    if weight is not None and parts > 1:
        layers = torch.zeros((parts, *weight.shape), dtype=wide_dtype(weight.dtype), device=x.device)
    if n and indices.numel() and grad_x.numel():
        rows = max(1, 256 // block)
        _extremum_grad[(cdiv(n, rows), heads, parts)](
            indptr, indices, x, weight, y, grad, grad_x, layers, n, indices.numel(),
            WIDTH=heads * width, HEADS=heads, HEAD_WIDTH=width, ACC=accumulator(x, weight),
            BLOCK=block, ROWS=rows, PER_EDGE=ordered, num_warps=2 if width <= 256 else 8,
        )  # fmt: skip
    if parts > 1 and layers is not None:
        grad_weight = layers.sum(0).to(weight.dtype)
    if ordered:
        grad_x = scatter_src_transposed(indptr, indices, grad_x, x.shape[0])
    return grad_x.to(x.dtype), grad_weight


@triton.jit
def _scatter_edges(indptr, indices, e, out, n, num_edges, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """``out[indices[i]] += e[i]`` over the valid edges."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # edges: more than 32 bits hold
    valid = (i < num_edges) & (i < tl.load(indptr + n))
    column = tile_columns(tl.program_id(1), BLOCK)
    source = tl.load(indices + i, valid, 0).to(tl.int64)
    value = tl.load(e + i * WIDTH + column, valid & (column < WIDTH), 0).to(out.dtype.element_ty)
    tl.atomic_add(out + source * WIDTH + column, value, valid & (column < WIDTH), sem="relaxed")


@op
def scatter_src(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """Sum of edge values ``[E, ...]`` per source ``[num_src, ...]``; atomic additions, float32 for 16-bit values."""
    if is_deterministic():
        return scatter_src_transposed(indptr, indices, e, num_src)
    check_offsets(indptr)
    check_ids(indices)
    check_values(e=e)
    out = torch.zeros((num_src, *e.shape[1:]), dtype=wide_dtype(e.dtype), device=e.device)
    width, num_edges = row_size(e), indices.numel()
    if out.numel() and num_edges:
        block = column_block(width)
        rows = max(1, 1024 // block)
        _scatter_edges[(cdiv(num_edges, rows), cdiv(width, block))](
            indptr, indices, e, out, indptr.numel() - 1, num_edges, WIDTH=width, BLOCK=block, ROWS=rows
        )
    return out.to(e.dtype)


@op
def scatter_src_transposed(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """``scatter_src``, deterministic: the edges are sorted by source, and each source adds up its own in order."""
    check_offsets(indptr)
    check_ids(indices)
    check_values(e=e)
    out = e.new_empty((num_src, *e.shape[1:]))
    offsets, _, order = transposed(indptr, indices, indices, num_src)
    aggregate(offsets, order, e, None, "sum", out)
    return out
