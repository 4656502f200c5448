"""Segment programs inside Triton kernels: leaves are loaded and steps run for a tile ``[rows, heads, columns]``.

A program reaches a kernel as tuples that are constants of its compilation: ``KINDS`` (of leaves), ``PLACES`` (each
leaf's first tensor), ``COLUMNS`` (of narrow features), ``STRIDES`` (between rows), ``NAMES``, ``READ`` (three values a
step) and ``NUMBERS``. Values that are the same for all columns of a head, or for all heads, have 1 there, and steps
spread them. Rows of one end, ``OWN``, are held in registers while a tile goes over its edges; so are vectors and
narrow weights.
"""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import check_ids, check_offsets, fill_tail, power_of_two
from joestar.kernels.gpu_pointwise import pointwise_step
from joestar.kernels.gpu_tiles import check_values, column_block, tile_configs
from joestar.kernels.segment_program import BESIDE, SegmentProgram, check_segment, groups_of, tensors_apart
from joestar.kernels.segment_steps import Step, operands
from joestar.kernels.tune import Config

TAIL = 128
"""Zeros behind the last edge that a program writes at a time."""
_WIDEST = 256
"""Columns of a tile, but where one head has more."""


def described(kinds: Sequence[str], tensors: Sequence[Tensor], steps: tuple[Step, ...], names: Sequence[str]) -> dict:
    """The constants of a kernel that runs ``steps`` over leaves of ``kinds``, loaded as ``names``.

    "none" loads nothing; ``features`` are those of a narrow leaf whose value is not read.
    """
    groups = groups_of(kinds, tensors)
    read = [(*operands(step), operands(step)[0], operands(step)[0])[:3] for step in steps]
    return {
        "KINDS": tuple(names),
        "PLACES": tuple(sum(map(len, groups[:leaf])) for leaf in range(len(groups))),
        "COLUMNS": tuple(group[0].shape[1] if len(group) > 1 else 0 for group in groups),
        "STRIDES": strides(group[0] for group in groups),
        "NAMES": tuple(step[0] for step in steps),
        "READ": tuple(value for values in read for value in values),
        "NUMBERS": tuple(float((*step, 0.0)[1 + len(operands(step))]) for step in steps),
    }


def strides(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers between the rows of matrices, 0 of anything else."""
    return tuple(tensor.stride(0) if tensor.dim() == 2 else 0 for tensor in tensors)


def rows_in_place(kind: str, tensor: Tensor) -> Tensor:
    """A leaf's tensor as kernels read it: rows of either end may be some columns of wider ones."""
    fits = kind in BESIDE and tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] <= 1)
    return tensor if fits else tensor.contiguous()


def prepared(kinds: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as kernels read them: narrow weights transposed, ``[K, W]``."""
    groups = zip(kinds, groups_of(kinds, tensors), strict=True)
    return tuple(
        tensor.t().contiguous() if "narrow" in kind and place == 1 else tensor
        for kind, group in groups
        for place, tensor in enumerate(group)
    )


def tile_of(program: SegmentProgram, width: int, heads: int) -> dict:
    """How rows are cut: ``HEADS`` of ``HEAD_WIDTH`` columns, ``TALL`` of them in a tile, each padded to ``BLOCK``."""
    if not program.has_heads:
        block = column_block(width)
        heads = -(-width // block)
        return {"HEADS": heads, "HEAD_WIDTH": min(width, block), "WIDTH": width, "TALL": 1, "BLOCK": block}
    head_width = width // heads
    block = power_of_two(head_width)
    tall = max(1, min(power_of_two(heads), _WIDEST // block))
    return {"HEADS": heads, "HEAD_WIDTH": head_width, "WIDTH": width, "TALL": tall, "BLOCK": block}


def tiles_of(sizes: dict, bytes_per_value: int, across: bool = False) -> list[Config]:
    """``tile_configs`` of what ``tile_of`` gives; for a head wider than a tile, first so many warps as hold it.

    Args:
        across: whether columns are added up, which warps that share a row exchange: those of one warp come first.
    """
    columns_of_tile = sizes["TALL"] * sizes["BLOCK"]
    tiles = tile_configs(columns_of_tile, bytes_per_value)
    if columns_of_tile > _WIDEST:
        return [{"ROWS": 1, "num_warps": min(8, columns_of_tile // _WIDEST)}, *tiles]
    return sorted(tiles, key=lambda config: across and config["num_warps"] > 1)


def checked(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int
) -> tuple[SegmentProgram, list[Tensor], int]:
    """(program, a tensor of every leaf's own, W); ``ValueError`` unless the arguments fit."""
    check_offsets(indptr)
    check_ids(indices)
    parsed = SegmentProgram.parse(program)
    groups = zip(parsed.leaves, groups_of(parsed.leaves, tensors_apart(parsed, leaves)), strict=True)
    leaves = [rows_in_place(kind, tensor) for kind, group in groups for tensor in group]
    width = check_segment(parsed, leaves, heads, indptr.numel() - 1, indices.numel())
    for leaf in leaves:
        if leaf.dtype != torch.int32:
            check_values(leaves=leaf)
    return parsed, leaves, width


@triton.jit
def tile(ROWS: tl.constexpr):
    """Rows of this program's tile, ``[ROWS, 1, 1]``."""
    return tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]


@triton.jit
def columns(
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr
):
    """(heads ``[1, TALL, 1]``, columns ``[1, TALL, BLOCK]``, which of them there are)."""
    head = tl.program_id(1) * TALL + tl.arange(0, TALL)[None, :, None]
    lane = tl.arange(0, BLOCK)[None, None, :]
    column = head * HEAD_WIDTH + lane
    return head, column, (head < HEADS) & (lane < HEAD_WIDTH) & (column < WIDTH)


@triton.jit
def run_steps(values, inside, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, ACC: tl.constexpr):
    """``values`` of the leaves, then of the steps."""
    for k in tl.static_range(len(NAMES)):
        values = values + (_step(values, inside, NAMES, READ, NUMBERS, k, ACC),)  # noqa: RUF005
    return values


@triton.jit
def _step(
    values, inside, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):
    NAME: tl.constexpr = NAMES[K]
    if NAME == "dot":
        return tl.sum(tl.where(inside, values[READ[3 * K]] * values[READ[3 * K + 1]], 0), 2, keep_dims=True)
    elif NAME == "total":
        return tl.sum(tl.where(inside, values[READ[3 * K]], 0), 2, keep_dims=True)
    elif NAME == "spread":
        return tl.where(inside, values[READ[3 * K]], 0)
    else:
        return pointwise_step(values, NAMES, READ, NUMBERS, K, ACC)


@triton.jit
def _degree(indptr, row, used):
    """How many edges a destination has, 1 where not ``used``."""
    return tl.load(indptr + row + 1, used, 1) - tl.load(indptr + row, used, 0)


@triton.jit
def _held_leaf(
    leaves, i, head, column, used, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, L: tl.constexpr,
    OWN: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What stays the same for all edges of rows ``i``: a tuple per leaf, weights before the bias."""
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    STRIDE: tl.constexpr = STRIDES[L]
    leaf = leaves[PLACES[L]]
    held = ()
    if KIND == "vector":
        held = held + (tl.load(leaf + column, inside, 0).to(ACC),)  # noqa: RUF005
    elif KIND == "vector_head":
        held = held + (tl.load(leaf + head, head < HEADS, 0).to(ACC),)  # noqa: RUF005
    elif KIND == OWN:
        at = leaf + i.to(tl.int64) * STRIDE + column
        held = held + (tl.load(at, used & inside, 0).to(ACC),)  # noqa: RUF005
    elif KIND == OWN + "_head":
        at = leaf + i.to(tl.int64) * HEADS + head
        held = held + (tl.load(at, used & (head < HEADS), 0).to(ACC),)  # noqa: RUF005
    elif KIND == OWN + "_row":
        lane = column - head * HEAD_WIDTH
        held = held + (tl.load(leaf + i.to(tl.int64) * HEAD_WIDTH + lane, used & inside, 0).to(ACC),)  # noqa: RUF005
    elif KIND == "degree" and OWN == "dst":
        held = held + (_degree(leaf, i, used).to(ACC),)  # noqa: RUF005
    elif KIND == "narrow" or KIND == "narrow_plain":
        at = tl.program_id(2) * WIDTH + column + 0 * i  # as if they were rows, to be where rows are; the id is 0
        for k in tl.static_range(COUNT):
            held = held + (tl.load(leaves[PLACES[L] + 1] + at + k * WIDTH, inside, 0).to(ACC),)  # noqa: RUF005
        if KIND == "narrow":
            held = held + (tl.load(leaves[PLACES[L] + 2] + at, inside, 0).to(ACC),)  # noqa: RUF005
    return held


@triton.jit
def held_leaves(
    leaves, i, head, column, used, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, OWN: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``_held_leaf`` of all; rows ``i`` ``[ROWS, 1, 1]`` are read where ``used``."""
    held = ()
    for leaf in tl.static_range(len(KINDS)):
        own = _held_leaf(
            leaves, i, head, column, used, inside, KINDS, PLACES, COLUMNS, STRIDES, leaf, OWN, HEADS, HEAD_WIDTH,
            WIDTH, ACC,
        )  # fmt: skip
        held = held + (own,)  # noqa: RUF005
    return held


@triton.jit
def _edge_leaf(
    leaves, e, other, valid, head, column, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, L: tl.constexpr,
    OWN: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What an edge ``e`` ``[ROWS, 1, 1]`` brings along, its other end being row ``other``: a tuple per leaf."""
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    STRIDE: tl.constexpr = STRIDES[L]
    leaf = leaves[PLACES[L]]
    known = valid & (head < HEADS)
    loaded = ()
    if KIND == OWN or KIND == OWN + "_head" or KIND == OWN + "_row" or (KIND == "degree" and OWN == "dst"):
        loaded = ()
    elif KIND == "src_row":
        lane = tl.arange(0, BLOCK)[None, None, :]
        loaded = loaded + (tl.load(leaf + other * HEAD_WIDTH + lane, valid & (lane < HEAD_WIDTH), 0),)  # noqa: RUF005
    elif KIND == "src" or KIND == "dst":
        loaded = loaded + (tl.load(leaf + other * STRIDE + column, valid & inside, 0),)  # noqa: RUF005
    elif KIND == "src_head" or KIND == "dst_head":
        loaded = loaded + (tl.load(leaf + other * HEADS + head, known, 0),)  # noqa: RUF005
    elif KIND == "edge":
        loaded = loaded + (tl.load(leaf + e * WIDTH + column, valid & inside, 0),)  # noqa: RUF005
    elif KIND == "edge_head":
        loaded = loaded + (tl.load(leaf + e * HEADS + head, known, 0),)  # noqa: RUF005
    elif KIND == "bits":
        WORDS: tl.constexpr = (HEADS + 31) // 32
        word = tl.load(leaf + e * WORDS + head % WORDS, known, 0)
        loaded = loaded + ((word >> (head // WORDS)) & 1,)  # noqa: RUF005
    elif KIND == "gates":
        GROUPS: tl.constexpr = (HEAD_WIDTH + 7) // 8
        lane = tl.arange(0, BLOCK)[None, None, :]
        at = leaf + (e * HEADS + head) * GROUPS + lane // 8
        loaded = loaded + ((tl.load(at, valid & inside, 0).to(tl.int32) >> (lane % 8)) & 1,)  # noqa: RUF005
    elif KIND == "scalar":
        loaded = loaded + (tl.load(leaf + e, valid, 0),)  # noqa: RUF005
    elif KIND == "degree":
        loaded = loaded + (_degree(leaf, other, valid),)  # noqa: RUF005
    elif KIND == "narrow" or KIND == "narrow_plain" or KIND == "features":
        for k in tl.static_range(COUNT):
            loaded = loaded + (tl.load(leaf + e * COUNT + k, valid, 0),)  # noqa: RUF005
    return loaded


@triton.jit
def edge_leaves(
    leaves, e, other, valid, head, column, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, OWN: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``_edge_leaf`` of all, in the dtype of the leaves; 0 where not ``valid``."""
    loaded = ()
    for leaf in tl.static_range(len(KINDS)):
        own = _edge_leaf(
            leaves, e, other, valid, head, column, inside, KINDS, PLACES, COLUMNS, STRIDES, leaf, OWN, HEADS,
            HEAD_WIDTH, WIDTH, BLOCK,
        )  # fmt: skip
        loaded = loaded + (own,)  # noqa: RUF005
    return loaded


@triton.jit
def _leaf_value(
    held, loaded, KINDS: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr, OWN: tl.constexpr, ACC: tl.constexpr
):
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    OF_ROW: tl.constexpr = KIND == OWN or KIND == OWN + "_head" or KIND == OWN + "_row"
    if KIND == "vector" or KIND == "vector_head" or OF_ROW or (KIND == "degree" and OWN == "dst"):
        return held[L][0]
    elif KIND == "narrow" or KIND == "narrow_plain":
        value = loaded[L][0].to(ACC) * held[L][0]
        for k in tl.static_range(1, COUNT):
            value += loaded[L][k].to(ACC) * held[L][k]
        if KIND == "narrow":
            value += held[L][COUNT]
        return value
    elif KIND == "none" or KIND == "features":
        return tl.zeros([1, 1, 1], ACC)
    else:
        return loaded[L][0].to(ACC)


@triton.jit
def leaf_values(held, loaded, KINDS: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr, ACC: tl.constexpr):
    """The values of the leaves for a tile of edges."""
    values = ()
    for leaf in tl.static_range(len(KINDS)):
        values = values + (_leaf_value(held, loaded, KINDS, COLUMNS, leaf, OWN, ACC),)  # noqa: RUF005
    return values


@triton.jit
def zeros(
    SIZES: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """A tile of ``VALUE`` for each of ``SIZES``: 2 has a column each, 1 a number per head."""
    sums = ()
    for s in tl.static_range(len(SIZES)):
        if SIZES[s] == 2:
            sums = sums + (tl.full([ROWS, TALL, BLOCK], VALUE, ACC),)  # noqa: RUF005
        else:
            sums = sums + (tl.full([ROWS, TALL, 1], VALUE, ACC),)  # noqa: RUF005
    return sums


@triton.jit
def fill_behind(
    out, last, num_edges, SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros behind the last edge in what has a number per column (``SIZE`` 2) or head of every edge."""
    size = num_edges.to(tl.int64)
    if SIZE == 2:
        fill_tail(out, last * WIDTH, size * WIDTH, 0, BLOCK)
    else:
        fill_tail(out, last * HEADS, size * HEADS, 0, BLOCK)


@triton.jit
def store_tile(
    out, row, value, mask, head, column, inside, SIZE: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr
):
    """Stores rows ``row`` ``[ROWS, 1, 1]`` of a tile where ``mask``; ``STRIDE``: of rows with columns."""
    if SIZE == 2:
        tl.store(out + row * STRIDE + column, value.to(out.dtype.element_ty), mask & inside)
    else:
        tl.store(out + row * HEADS + head, value.to(out.dtype.element_ty), mask & (head < HEADS))


@triton.jit
def added(sums, values, loaded, valid, SUMMED: tl.constexpr, TIMES: tl.constexpr, RESULTS: tl.constexpr):
    """``sums`` plus the gradients of the leaves ``SUMMED``, times their feature ``TIMES`` unless that is -1."""
    more = ()
    for s in tl.static_range(len(SUMMED)):
        value = tl.where(valid, values[RESULTS[SUMMED[s]]], 0)
        if TIMES[s] >= 0:
            value = value * loaded[SUMMED[s]][TIMES[s]].to(value.dtype)
        more = more + (sums[s] + value,)  # noqa: RUF005
    return more
