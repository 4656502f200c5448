"""Segment programs on the GPU: softmax in one pass over a destination's edges, no value per edge but a result's stored.

A program of the kernel holds a tile of destinations and goes over their edges, some of which are loaded before the
first is used. The largest score so far, the sum of exponentials and the weighted sum are kept relative to each other
(as in FlashAttention), so degrees have no limit. The gradients are in ``gpu_segment_grad``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, on_device
from joestar.kernels.gpu_segment_steps import (
    TAIL,
    checked,
    columns,
    described,
    edge_leaves,
    fill_behind,
    held_leaves,
    leaf_values,
    prepared,
    run_steps,
    store_tile,
    tile,
    tile_of,
    tiles_of,
    zeros,
)
from joestar.kernels.gpu_spmm import row_edges
from joestar.kernels.gpu_tiles import accumulator
from joestar.kernels.segment_program import FULL, SegmentProgram, dtype_of


@triton.jit
def _reduced(
    values, valid, sums, tops, totals,
    WEIGHED: tl.constexpr, SCORES: tl.constexpr, VALUES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(``sums``, ``tops``, ``totals``) with one edge more. ``WEIGHED``: see ``_results``."""
    new_sums, new_tops, new_totals = (), (), ()
    for r in tl.static_range(len(VALUES)):
        value = tl.where(valid, values[VALUES[r]], 0)
        if WEIGHED[r] >= 0:
            top, total = tops[WEIGHED[r]], totals[WEIGHED[r]]
            score = tl.where(valid, values[SCORES[r]], float("-inf"))
            higher = tl.maximum(top, score + tl.zeros_like(top), propagate_nan=tl.PropagateNan.ALL)
            least = higher == float("-inf")  # before the first edge whose score is larger
            power = tl.where(least, 0, tl.exp(score - higher))
            shrink = tl.where(least, 1, tl.exp(top - higher))
            new_sums = new_sums + (sums[r] * shrink + power * value,)  # noqa: RUF005
            new_tops = new_tops + (higher,)  # noqa: RUF005
            new_totals = new_totals + (total * shrink + power,)  # noqa: RUF005
        elif WEIGHED[r] == -2:
            new_sums = new_sums + (sums[r],)  # noqa: RUF005
        else:
            new_sums = new_sums + (sums[r] + value,)  # noqa: RUF005
    return new_sums, new_tops, new_totals


@triton.jit(do_not_specialize=["n", "num_edges"])
def _segment(
    indptr, indices, leaves, outs, n, num_edges,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, NAMES: tl.constexpr,
    READ: tl.constexpr, NUMBERS: tl.constexpr, FROM_SRC: tl.constexpr, WEIGHED: tl.constexpr, SCORES: tl.constexpr,
    VALUES: tl.constexpr,
    TOPS: tl.constexpr, TOTALS: tl.constexpr, MEANS: tl.constexpr, OF_RESULTS: tl.constexpr, OF_SCORES: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The results, then the largest scores and sums of exponentials, in ``outs``.

    ``TOPS``, ``TOTALS``: where in ``outs`` these of a result are; ``OF_...``: sizes, 2 with columns.
    """
    i = tile(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    head, column, inside = columns(HEADS, HEAD_WIDTH, WIDTH, TALL, BLOCK)
    held = held_leaves(
        leaves, i, head, column, start < end, inside, KINDS, PLACES, COLUMNS, STRIDES, "dst", HEADS, HEAD_WIDTH,
        WIDTH, ACC,
    )  # fmt: skip
    sums = zeros(OF_RESULTS, 0, ROWS, TALL, BLOCK, ACC)
    tops = zeros(OF_SCORES, float("-inf"), ROWS, TALL, BLOCK, ACC)
    totals = zeros(OF_SCORES, 0, ROWS, TALL, BLOCK, ACC)
    longest = tl.max(end - start)
    done = tl.zeros((), tl.int64)
    while done < longest:
        loaded = ()
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = e
            if FROM_SRC:
                source = tl.load(indices + e, e < end, 0).to(tl.int64)
            leaf = edge_leaves(
                leaves,
                e,
                source,
                e < end,
                head,
                column,
                inside,
                KINDS,
                PLACES,
                COLUMNS,
                STRIDES,
                "dst",
                HEADS,
                HEAD_WIDTH,
                WIDTH,
                BLOCK,
            )
            loaded = loaded + (leaf,)  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            e = start + done + j
            valid = e < end
            values = leaf_values(held, loaded[j], KINDS, COLUMNS, "dst", ACC)
            values = run_steps(values, inside, NAMES, READ, NUMBERS, ACC)
            for r in tl.static_range(len(VALUES)):
                if WEIGHED[r] == -2:
                    store_tile(outs[r], e, values[VALUES[r]], valid, head, column, inside, OF_RESULTS[r], HEADS, WIDTH)
            sums, tops, totals = _reduced(values, valid, sums, tops, totals, WEIGHED, SCORES, VALUES, ACC)
        done += AHEAD
    row, filled = i.to(tl.int64), start < end
    known = i < n
    for r in tl.static_range(len(VALUES)):
        if WEIGHED[r] == -2:
            fill_behind(outs[r], tl.load(indptr + n), num_edges, OF_RESULTS[r], HEADS, WIDTH, TAIL)
        else:
            y = sums[r]
            if WEIGHED[r] >= 0:
                top, total = tops[WEIGHED[r]], totals[WEIGHED[r]]
                y = y / tl.where(filled, total, 1)
                top = tl.where(filled, top, 0)
                store_tile(outs[TOPS[r]], row, top, known, head, column, inside, OF_SCORES[WEIGHED[r]], HEADS, WIDTH)
                store_tile(
                    outs[TOTALS[r]], row, total, i < n, head, column, inside, OF_SCORES[WEIGHED[r]], HEADS, WIDTH
                )
            elif MEANS[r]:
                y = y / tl.maximum(end - start, 1).to(ACC)
            store_tile(outs[r], row, y, known, head, column, inside, OF_RESULTS[r], HEADS, WIDTH)


def _results(program: SegmentProgram) -> dict:
    """The constants of the reductions. ``WEIGHED``: per result its softmax, -1 for sums, -2 for values of edges."""
    softmaxes, weighed = program.softmaxes, []
    for name, *_ in program.results:
        found = sum(w >= 0 for w in weighed)
        weighed.append({"softmax": found, "edges": -2}.get(name, -1))
    return {
        "WEIGHED": tuple(weighed), "TOPS": tuple(len(weighed) + 2 * w for w in weighed),
        "TOTALS": tuple(len(weighed) + 2 * w + 1 for w in weighed),
        "SCORES": tuple(result[1] for result in program.results),
        "VALUES": tuple(result[-1] for result in program.results),
        "MEANS": tuple(int(result[0] == "mean") for result in program.results),
        "OF_RESULTS": tuple(map(program.size_of, program.results)),
        "OF_SCORES": tuple(map(program.score_size, softmaxes)),
    }  # fmt: skip


def work_of(program: SegmentProgram, n: int, edges: int, width: int, size: int) -> int:
    """Bytes that are read, roughly."""
    return (n + edges * sum(kind in ("src", "edge") for kind in program.leaves)) * width * size


def ahead(kinds: tuple[str, ...], leaves: dict, most: int) -> int:
    """Edges that are loaded before the first is used: fewer, the more each brings along."""
    rows = sum(kind in ("src", "src_row", "edge") for kind in kinds)
    numbers = sum(leaves["COLUMNS"])
    return max(1, min(most, most // max(1, rows), 4 * most // max(1, numbers)))


@on_device
def segment(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int) -> list[Tensor]:
    """See ``joestar.ops.aggregate.segment``. Sums run in edge order: the result does not change between runs."""
    indptr, indices = indptr.contiguous(), indices.contiguous()
    parsed, leaves, width = checked(indptr, indices, leaves, program, heads)
    n, edges, dtype = indptr.numel() - 1, indices.numel(), dtype_of(parsed, leaves)
    wide, like = torch.promote_types(dtype, torch.float32), leaves[0]
    results = _results(parsed)
    outs = [
        like.new_empty(
            (edges if result[0] == "edges" else n, width if size == FULL else heads),
            dtype=wide if result[0] == "softmax" else dtype,
        )
        for result, size in zip(parsed.results, results["OF_RESULTS"], strict=True)
    ]
    for size in results["OF_SCORES"]:
        outs += [like.new_empty((n, width if size == FULL else heads), dtype=wide) for _ in range(2)]
    if not (n and width):
        return [out.zero_() for out in outs]
    sizes = tile_of(parsed, width, heads)
    constants = described(parsed.leaves, leaves, parsed.steps, parsed.leaves)
    from_src = any(kind.startswith("src") for kind in parsed.leaves)
    settings = {
        **constants, **results, **sizes, "FROM_SRC": from_src, "ACC": accumulator(*outs), "TAIL": TAIL,
    }  # fmt: skip
    tensors, targets = prepared(parsed.leaves, leaves), tuple(outs)
    parts = cdiv(sizes["HEADS"], sizes["TALL"])

    def launch(config: tune.Config) -> None:
        grid = (max(1, cdiv(n, config["ROWS"])), parts)
        _segment[grid](indptr, indices, tensors, targets, n, edges, **settings, **config)

    shape = (dtype, width, heads, program.replace(" ", "_"), tune.size_class(n), tune.size_class(edges))
    few = ahead(parsed.leaves, constants, 4)
    tiles = tiles_of(sizes, dtype.itemsize, parsed.has_heads and not parsed.softmaxes)
    configs = [{**config, "AHEAD": few} for config in tiles[:3]] + [{**tiles[0], "AHEAD": 2 * few}]
    work = work_of(parsed, n, edges, width, dtype.itemsize)
    launch(tune.choose("segment", shape, configs, launch, work, indptr.device))
    return outs
