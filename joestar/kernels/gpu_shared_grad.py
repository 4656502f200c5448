"""Gradients of sums of rows that several heads share, on the GPU: those of the weights, and those of the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_edge_products import edge_products
from joestar.kernels.gpu_launch import cdiv
from joestar.kernels.gpu_links import link_edges, per_degree
from joestar.kernels.gpu_tiles import accumulator, column_block, row_size, tile_columns, tile_configs, tile_rows
from joestar.kernels.layout import wide_dtype


@triton.jit(do_not_specialize=["num_src"])
def _gather_shared(
    heads, links, weight, grad, out, num_src,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[s]`` = the sum of ``weight[e, h] * grad[row of e, h]`` over heads and the list of edges of source ``s``."""
    s = tile_rows(ROWS)
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    total = tl.zeros([ROWS, BLOCK], ACC)
    e = tl.load(heads + s, s < num_src, -1).to(tl.int64)
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        row = link & 0xFFFFFFFF
        for h in tl.static_range(HEADS):
            g = tl.load(grad + (row * HEADS + h) * WIDTH + column, (e >= 0) & inside, 0).to(ACC)
            total += g * tl.load(weight + e * HEADS + h, e >= 0, 0).to(ACC)
        e = link >> 32
    at = out + s.to(tl.int64) * WIDTH + column
    tl.store(at, total.to(out.dtype.element_ty), (s < num_src) & inside)


def shared_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor, num_src: int, mean: bool
) -> Tensor:  # fmt: skip
    """``[num_src, 1, ...]`` in the dtype of ``grad`` ``[num_dst, H, ...]``: for the rows, added up in any order.

    ``weight`` ``[E, H]``; for means it is divided by the degree.
    """
    out = grad.new_empty((num_src, 1, *grad.shape[2:]))
    if not (grad.numel() and indices.numel()):
        return out.zero_()
    edges, heads, width = indices.numel(), weight.shape[1], row_size(out)
    if mean:
        weight = per_degree(indptr, indices, weight.to(torch.promote_types(weight.dtype, wide_dtype(grad.dtype))))
    first, links = link_edges(indptr, indices, num_src)
    block = column_block(width)

    def launch(config: tune.Config) -> None:
        _gather_shared[(cdiv(num_src, config["ROWS"]), cdiv(width, block))](
            first, links, weight, grad, out, num_src,
            HEADS=heads, WIDTH=width, ACC=accumulator(grad, weight), BLOCK=block, **config,
        )  # fmt: skip

    shape = (grad.dtype, weight.dtype, heads, width, tune.size_class(num_src), tune.size_class(edges))
    work = (num_src + edges * heads) * width * grad.element_size()
    configs = tile_configs(width, grad.element_size())
    launch(tune.choose("gather_shared", shape, configs, launch, work, grad.device))
    return out


def shared_dots(indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, mean: bool, out: Tensor) -> None:
    """Fills ``out`` ``[E, H]``, which is 0 behind the last edge, with ``<x[indices[e]], grad[row of e, h]>``."""
    width = row_size(x)
    if out.numel() and grad.numel() and indices.numel():
        rows = x.reshape(-1, 1, width), grad.reshape(grad.shape[0], -1, width)
        edge_products(indptr, indices, *rows, out, mean=mean)
