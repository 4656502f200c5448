"""Messages of an edge program on the GPU: no value per edge and column is ever stored (thesis 5.3.2).

A program of the kernel holds a tile of destinations and goes over their edges, some of which are loaded before the
first is used. The gradients are in ``gpu_edge_map_grad``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.edge_program import EdgeProgram, check_leaves, heads_of
from joestar.kernels.gpu_edge_steps import (
    described,
    edge_leaves,
    edges_ahead,
    held_leaves,
    leaf_values,
    prepared,
    run_steps,
)
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, fill_tail, op, power_of_two
from joestar.kernels.gpu_spmm import AHEAD, row_edges
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    row_tile,
    tile_columns,
    tile_configs,
    tile_rows,
)

TAIL = 128
"""Zeros behind the last edge that a program writes at a time."""
_WIDEST = 256


@triton.jit
def _columns_of_heads(
    part, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns ``[1, BLOCK]`` of ``TALL`` heads, each padded to a power of two; ``WIDTH`` where there is none.

    Of a head wider than a tile: those of its tile ``part // HEADS``.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    PADDED: tl.constexpr = BLOCK // TALL
    if HEAD_WIDTH > BLOCK:
        column = part // HEADS * BLOCK + lane
        return tl.where(column < HEAD_WIDTH, part % HEADS * HEAD_WIDTH + column, WIDTH)
    elif HEAD_WIDTH == PADDED:
        return part * BLOCK + lane
    else:
        head, column = part * TALL + lane // PADDED, lane % PADDED
        return tl.where((column < HEAD_WIDTH) & (head < HEADS), head * HEAD_WIDTH + column, WIDTH)


@triton.jit(do_not_specialize=["n", "num_edges"])
def _edge_map(
    indptr, indices, leaves, out, n, num_edges,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, NAMES: tl.constexpr, READ: tl.constexpr,
    NUMBERS: tl.constexpr, FROM_SRC: tl.constexpr, MEAN: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum or mean of the edges' values per destination; with ``HEADS`` the sums over columns of every edge instead."""
    i = tile_rows(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    part = tl.program_id(1)
    column = tile_columns(part, BLOCK)
    if HEADS > 0:
        column = _columns_of_heads(part, HEADS, HEAD_WIDTH, WIDTH, TALL, BLOCK)
    inside = column < WIDTH
    held = held_leaves(leaves, i, column, start < end, inside, KINDS, PLACES, COLUMNS, "dst", WIDTH, ACC)
    layer = out
    if HEADS > 0 and HEAD_WIDTH > BLOCK:
        layer += (part // HEADS) * num_edges.to(tl.int64) * HEADS
    longest = tl.max(end - start)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    done = tl.zeros((), tl.int64)
    while done < longest:
        loaded = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = e
            if FROM_SRC:
                source = tl.load(indices + e, e < end, 0).to(tl.int64)
            leaf = edge_leaves(leaves, e, source, e < end, column, inside, KINDS, PLACES, COLUMNS, "dst", WIDTH)
            loaded = loaded + (leaf,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            e = start + done + j
            values = leaf_values(held, loaded[j], KINDS, COLUMNS, "dst", ACC)
            value = run_steps(values, NAMES, READ, NUMBERS, ACC)[-1]
            if HEADS > 0:
                value = tl.where((e < end) & inside, value, tl.zeros([ROWS, BLOCK], ACC))
                per_head = tl.sum(tl.reshape(value, [ROWS, TALL, BLOCK // TALL]), 2)
                head = part * TALL + tl.arange(0, TALL)[None, :]
                if HEAD_WIDTH > BLOCK:  # a layer [E, H] of the result for every tile of a head
                    head = part % HEADS + tl.arange(0, TALL)[None, :]
                tl.store(layer + e * HEADS + head, per_head.to(out.dtype.element_ty), (e < end) & (head < HEADS))
            else:
                sums += tl.where(e < end, value, 0)
        done += AHEAD
    if HEADS > 0:
        fill_tail(layer, tl.load(indptr + n) * HEADS, num_edges.to(tl.int64) * HEADS, 0, TAIL)
    else:
        if MEAN:
            sums = sums / tl.maximum(end - start, 1).to(ACC)
        at = out + i.to(tl.int64) * WIDTH + column
        tl.store(at, sums.to(out.dtype.element_ty), (i < n) & inside)


def checked(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str
) -> tuple[EdgeProgram, int, int]:
    """(program, W, heads or 0); ``ValueError`` unless the arguments fit."""
    check_offsets(indptr)
    check_ids(indices)
    for leaf in leaves:
        check_values(leaves=leaf)
    parsed = EdgeProgram.parse(program)
    return parsed, check_leaves(parsed, leaves, indptr.numel() - 1, indices.numel(), reduce), heads_of(reduce)


def work_of(program: EdgeProgram, n: int, edges: int, width: int, size: int) -> int:
    """Bytes that are read, roughly."""
    return (n + edges * sum(kind in ("src", "edge") for kind in program.leaves)) * width * size


@op
def edge_map(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str) -> Tensor:
    """The values ``[E, W]`` of a program's edges, reduced to ``[num_dst, W]`` or ``[E, H]``, in the leaves' dtype.

    Sums run in edge order: the result does not change between runs.
    """
    parsed, width, heads = checked(indptr, indices, leaves, program, reduce)
    n, edges, like = indptr.numel() - 1, indices.numel(), leaves[0]
    out = like.new_empty((edges, heads) if heads else (n, width))
    if not out.numel():
        return out
    if not width:
        return out.zero_()
    block, tall, head_width = column_block(width), 1, width
    if heads:
        head_width = width // heads
        padded = row_tile(head_width)
        tall = max(1, min(power_of_two(heads), _WIDEST // padded)) if head_width <= padded else 1
        block = tall * padded
    parts = cdiv(heads, tall) if heads else cdiv(width, block)
    layers = cdiv(head_width, block) if heads else 1
    wide = torch.promote_types(out.dtype, torch.float32)
    target = out if layers == 1 else out.new_empty((layers, *out.shape), dtype=wide)
    settings = {
        **described(parsed, leaves, parsed.steps, parsed.leaves), "FROM_SRC": "src" in parsed.leaves,
        "MEAN": reduce == "mean", "HEADS": heads, "HEAD_WIDTH": head_width, "WIDTH": width,
        "ACC": accumulator(like), "TALL": tall, "BLOCK": block, "TAIL": TAIL,
        "AHEAD": edges_ahead(leaves, parsed, AHEAD),
    }  # fmt: skip

    operands = prepared(parsed, leaves)

    def launch(config: tune.Config) -> None:
        grid = (max(1, cdiv(n, config["ROWS"])), parts * layers)
        _edge_map[grid](indptr, indices, operands, target, n, edges, **settings, **config)

    shape = (like.dtype, width, program.replace(" ", "_"), reduce, tune.size_class(n), tune.size_class(edges))
    configs, work = tile_configs(block, like.element_size()), work_of(parsed, n, edges, width, like.element_size())
    if heads:  # sums over columns, which warps that share a row exchange
        configs.sort(key=lambda config: config["num_warps"] > 1)
    launch(tune.choose("edge_map", shape, configs, launch, work, like.device))
    return out if layers == 1 else target.sum(0).to(out.dtype)
