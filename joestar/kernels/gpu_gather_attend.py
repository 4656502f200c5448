"""Graph attention over rows of a table on the GPU, in passes that each read every row once and hold little.

Forward: the products of the edges' rows and the heads' vectors, then softmax and weighted sums. Backward: the products
of the edges' rows and their destinations' gradients, the softmax's gradient, then sums of rows times edge values. One
kernel for a whole direction was slower: with the vectors, sums and rows of all heads in registers, too few programs
are on a multiprocessor to have its share of the memory's bandwidth in flight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_attend import coefficient_grads, launch_attend
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, power_of_two, require
from joestar.kernels.gpu_tiles import accumulator, check_values, tile_columns


def _row_tiles(numbers: int) -> list[tune.Config]:
    """Rows of a tile, of so many ``numbers`` each, and warps; the default first."""
    most = max(1, 8192 // numbers)
    return [
        {"ROWS": min(rows, most), "num_warps": max(1, min(8, min(rows, most) * numbers // per_warp))}
        for rows, per_warp in ((16, 512), (32, 1024), (32, 512), (8, 512), (16, 1024), (8, 256))
    ]


def _sum_tiles(numbers: int) -> list[tune.Config]:
    """Rows of a tile that is added up for every head, warps and programs; the default first."""
    most = max(1, 8192 // numbers)
    return [
        {"ROWS": min(rows, most), "num_warps": max(1, min(8, min(rows, most) * numbers // per_warp)), "GRID": grid}
        for rows, per_warp, grid in (
            (8, 1024, 1056), (8, 1024, 2112), (16, 1024, 1056), (4, 1024, 4224), (8, 2048, 2112), (16, 2048, 2112)
        )
    ]  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _row_products(
    table, ids, vectors, out, n,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[i, h]`` = ``table[ids[i]]`` times ``vectors[h]``."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile_columns(0, BLOCK)
    source = tl.load(ids + i, i < n, 0).to(tl.int64)
    rows = tl.load(table + source * WIDTH + column, (i < n) & (column < WIDTH), 0).to(ACC)
    for head in tl.static_range(HEADS):
        vector = tl.load(vectors + head * WIDTH + column, column < WIDTH, 0).to(ACC)
        tl.store(out + i * HEADS + head, tl.sum(rows * vector, 1, keep_dims=True), i < n)


@triton.jit(do_not_specialize=["n"])
def _row_sums_by(
    table, ids, weights, count, out, n,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``out[program, h]`` = its share of the sum of ``weights[i, h] * table[ids[i]]`` over the first ``count`` rows."""
    head, column = tl.arange(0, TALL)[:, None, None], tl.arange(0, BLOCK)[None, None, :]
    sums = tl.zeros([TALL, ROWS, BLOCK], ACC)
    last = n.to(tl.int64)
    if count is not None:
        last = tl.minimum(last, tl.load(count))
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < last:
        i = first + tl.arange(0, ROWS)[None, :, None]
        source = tl.load(ids + i, i < last, 0).to(tl.int64)
        rows = tl.load(table + source * WIDTH + column, (i < last) & (column < WIDTH), 0).to(ACC)
        sums += rows * tl.load(weights + i * HEADS + head, (i < last) & (head < HEADS), 0).to(ACC)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    head, column = tl.arange(0, TALL)[:, None], tile_columns(0, BLOCK)
    at = out + (tl.program_id(0).to(tl.int64) * HEADS + head) * WIDTH + column
    tl.store(at, tl.sum(sums, 1), (head < HEADS) & (column < WIDTH))


def _check(indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, bits: Tensor | None, heads: int) -> None:
    check_offsets(indptr)
    check_ids(indices, dsts)
    rows = indptr.numel() - 1
    require(dsts.numel() == rows, f"dsts [{rows}]", list(dsts.shape))
    if bits is not None:
        words = (indices.numel(), cdiv(heads, 32))
        right = bits.shape == words and bits.dtype == torch.int32
        require(right, f"bits int32 {list(words)}", f"{bits.dtype} {list(bits.shape)}")


def _products(table: Tensor, ids: Tensor, vectors: Tensor) -> Tensor:
    """``[n, H]``: the rows of the ids times every head's vector."""
    n, (heads, width) = ids.numel(), vectors.shape
    out = torch.empty((n, heads), dtype=torch.promote_types(table.dtype, torch.float32), device=table.device)
    block = power_of_two(max(1, width))

    def launch(config: tune.Config) -> None:
        _row_products[(cdiv(n, config["ROWS"]),)](
            table, ids, vectors, out, n, HEADS=heads, WIDTH=width, ACC=accumulator(table), BLOCK=block, **config
        )

    if out.numel():
        shape = (table.dtype, heads, width, tune.size_class(n))
        work = n * width * table.element_size()
        launch(tune.choose("row_products", shape, _row_tiles(block), launch, work, table.device))
    return out


def _sums(table: Tensor, ids: Tensor, weights: Tensor, count: Tensor | None) -> Tensor:
    """``[H, F]``: the sums of the rows of the ids (the first ``count`` of them) times ``weights`` ``[n, H]``."""
    (n, heads), width = weights.shape, table.shape[1]
    tall, block = power_of_two(heads), power_of_two(max(1, width))
    partial = []

    def launch(config: tune.Config) -> None:
        config = dict(config)
        grid = max(1, min(config.pop("GRID"), cdiv(n, config["ROWS"])))
        partial[:] = [weights.new_empty((grid, heads, width))]
        _row_sums_by[(grid,)](
            table, ids, weights, count, partial[0], n,
            HEADS=heads, WIDTH=width, ACC=accumulator(table), TALL=tall, BLOCK=block, **config,
        )  # fmt: skip

    if not (n and heads and width):
        return weights.new_zeros((heads, width))
    shape = (table.dtype, heads, width, tune.size_class(n))
    work = n * width * table.element_size()
    launch(tune.choose("row_sums_by", shape, _sum_tiles(tall * block), launch, work, table.device))
    return partial[0].sum(0)


@op
def gather_attend(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, slope: float,
    bits: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(``y`` ``[num_dst, H, F]``, scores ``[E, H]`` and ``[num_dst, H]``, top, total); see ``ops.gather_attend``."""
    _check(indptr, indices, dsts, table, bits, v_src.shape[0])
    check_values(table=table, v_src=v_src, v_dst=v_dst)
    s_src, s_dst = _products(table, indices, v_src), _products(table, dsts, v_dst)
    y, top, total = launch_attend(indptr, indices, s_src, s_dst, table.unsqueeze(1), slope, bits, scale, True)
    return y, s_src, s_dst, top, total


@op
def gather_attend_grad(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, s_src: Tensor, s_dst: Tensor, top: Tensor,
    total: Tensor, grad: Tensor, slope: float, bits: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Gradients of ``v_src`` and ``v_dst``, ``[2, H, F]`` in the dtype of the scores: the same sums in every run."""
    n, heads, width = grad.shape
    _check(indptr, indices, dsts, table, bits, heads)
    check_values(table=table, s_src=s_src, s_dst=s_dst, grad=grad)
    if not (n and heads and width):
        return s_src.new_zeros((2, heads, width))
    scores = s_src, s_dst
    for_src, for_dst = coefficient_grads(
        indptr, indices, scores, table.unsqueeze(1), top, total, grad, slope, bits, scale, True, None
    )
    return torch.stack((_sums(table, indices, for_src, indptr[-1:]), _sums(table, dsts, for_dst, None)))
