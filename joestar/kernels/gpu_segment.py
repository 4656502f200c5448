"""Segment programs on the GPU: softmax in one pass over a destination's edges, no value per edge but a result's stored.

A program of the kernel holds a tile of destinations and goes over their edges, some of which are loaded before the
first is used. The largest score so far, the sum of exponentials and the weighted sum are kept relative to each other
(as in FlashAttention), so degrees have no limit. The gradients are in ``gpu_segment_grad``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_bits import kept_bits, passes_relu, rows_within_warps, store_bits, unknown_bits
from joestar.kernels.gpu_launch import cdiv, on_device, require
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
from joestar.kernels.gpu_tiles import accumulator, of_columns
from joestar.kernels.segment_program import FULL, SegmentProgram, check_activated, dtype_of, width_of


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


@triton.jit
def _beside(addend, bias, row, column, known, inside, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """What is added to the rows of a result, 0 where nothing is."""
    added = tl.zeros([1, 1, 1], ACC)
    if addend is not None:
        added += tl.load(addend + row * WIDTH + column, known & inside, 0).to(ACC)
    if bias is not None:
        added += of_columns(bias, column, inside, ACC)
    return added


@triton.jit(do_not_specialize=["n", "num_edges"])
def _segment(
    indptr, indices, leaves, outs, addend, bias, bits, kept, n, num_edges, scale: tl.float64,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, NAMES: tl.constexpr,
    READ: tl.constexpr, NUMBERS: tl.constexpr, FROM_SRC: tl.constexpr, WEIGHED: tl.constexpr, SCORES: tl.constexpr,
    VALUES: tl.constexpr,
    TOPS: tl.constexpr, TOTALS: tl.constexpr, MEANS: tl.constexpr, OF_RESULTS: tl.constexpr, OF_SCORES: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, WORDS: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The results, then the largest scores and sums of exponentials, in ``outs``.

    ``TOPS``, ``TOTALS``: where in ``outs`` these of a result are; ``OF_...``: sizes, 2 with columns. Where bits are
    ``kept``, ``WORDS`` to a row, the one result is activated, see ``segment_bias_relu``: what that reads of rows is on
    its way before their edges are.
    """
    i = tile(ROWS)
    start, end = row_edges(indptr, None, None, i, n)
    head, column, inside = columns(HEADS, HEAD_WIDTH, WIDTH, TALL, BLOCK)
    held = held_leaves(
        leaves, i, head, column, start < end, inside, KINDS, PLACES, COLUMNS, STRIDES, "dst", HEADS, HEAD_WIDTH,
        WIDTH, ACC,
    )  # fmt: skip
    row, known = i.to(tl.int64), i < n
    if kept is not None:
        added = _beside(addend, bias, row, column, known, inside, WIDTH, ACC)
        holds = known & inside
        if bits is not None:
            holds = kept_bits(bits, row, column, holds, WORDS)
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
    filled = start < end
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
            if kept is not None:
                y += added
                holds = holds & passes_relu(y)
                y = tl.where(holds, y * tl.full((), scale, ACC), 0)
                store_bits(kept, row, holds, 0, known, WORDS, WORDS, BLOCK, 2)
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


@dataclass(frozen=True)
class _Epilogue:
    """What ``segment_bias_relu`` is given beside a program, and its bits; without these nothing follows."""

    bias: Tensor | None = None
    bits: Tensor | None = None
    scale: float = 1.0
    addend: Tensor | None = None
    kept: Tensor | None = None


def _reduce(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], parsed: SegmentProgram, heads: int, outs: list[Tensor],
    name: tuple[str, str], epilogue: _Epilogue,
) -> None:  # fmt: skip
    """Fills ``outs`` with the results of a program; ``name``: how the choice of settings is called, and the program."""
    width = width_of(parsed, leaves, heads)
    n, edges, dtype, kept = indptr.numel() - 1, indices.numel(), dtype_of(parsed, leaves), epilogue.kept
    results, sizes = _results(parsed), tile_of(parsed, width, heads)
    constants = described(parsed.leaves, leaves, parsed.steps, parsed.leaves)
    from_src = any(kind.startswith("src") for kind in parsed.leaves)
    settings = {
        **constants, **results, **sizes, "FROM_SRC": from_src, "ACC": accumulator(*outs), "TAIL": TAIL,
        "WORDS": 1 if kept is None else kept.shape[1],
    }  # fmt: skip
    tensors, targets = prepared(parsed.leaves, leaves), tuple(outs)
    parts = cdiv(sizes["HEADS"], sizes["TALL"])
    given = (epilogue.addend, epilogue.bias, epilogue.bits)

    def launch(config: tune.Config) -> None:
        grid = (max(1, cdiv(n, config["ROWS"])), parts)
        _segment[grid](indptr, indices, tensors, targets, *given, kept, n, edges, epilogue.scale, **settings, **config)

    kernel, program = name
    beside = () if kept is None else tuple(tensor is not None for tensor in given)
    shape = (dtype, width, heads, program.replace(" ", "_"), *beside, tune.size_class(n), tune.size_class(edges))
    few = ahead(parsed.leaves, constants, 4)
    tiles = tiles_of(sizes, dtype.itemsize, parsed.has_heads and not parsed.softmaxes)
    if kept is not None:
        tiles = rows_within_warps(tiles, sizes["BLOCK"] * dtype.itemsize)
    configs = [{**config, "AHEAD": few} for config in tiles[:3]] + [{**tiles[0], "AHEAD": 2 * few}]
    work = work_of(parsed, n, edges, width, dtype.itemsize)
    launch(tune.choose(kernel, shape, configs, launch, work, indptr.device))


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
    _reduce(indptr, indices, leaves, parsed, heads, outs, ("segment", program), _Epilogue())
    return outs


@on_device
def segment_bias_relu(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, bias: Tensor | None,
    bits: Tensor | None, scale: float, addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``joestar.ops.aggregate.segment_bias_relu``: the rows are activated while they are held."""
    indptr, indices = indptr.contiguous(), indices.contiguous()
    parsed, leaves, width = checked(indptr, indices, leaves, program, heads)
    check_activated(parsed, width)
    n, dtype = indptr.numel() - 1, dtype_of(parsed, leaves)
    words = cdiv(width, 32)
    fits = {"bias": (dtype, (width,)), "bits": (torch.int32, (n, words)), "addend": (dtype, (n, width))}
    for (what, wanted), tensor in zip(fits.items(), (bias, bits, addend), strict=True):
        right = tensor is None or (tensor.dtype, tuple(tensor.shape)) == wanted
        came = None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        require(right, f"{what} {wanted[0]} {list(wanted[1])}", came)
    bias, bits, addend = (None if tensor is None else tensor.contiguous() for tensor in (bias, bits, addend))
    out = leaves[0].new_empty((n, width), dtype=dtype)
    kept = unknown_bits(out)
    if out.numel():
        epilogue = _Epilogue(bias, bits, scale, addend, kept)
        _reduce(indptr, indices, leaves, parsed, heads, [out], ("segment_bias_relu", program), epilogue)
    return out, kept
