"""Joined weights on the GPU: columns of several matrices side by side and back, all of a step in one launch."""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, op, require

BLOCK = 512
TOGETHER = 32
"""Tensors of one launch: a kernel has a limited number of arguments."""


@triton.jit
def _columns(
    parts, joined, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, OWNER: tl.constexpr,
    BEGIN: tl.constexpr, WIDTHS: tl.constexpr, JOINED: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies parts to the columns of their matrices, and zeros to the rest; with ``SPLIT`` the other way round.

    What is copied takes the dtype of where it goes.

    Matrix ``i`` belongs to the programs from ``FIRST[i]`` on; part ``j`` are columns of matrix ``OWNER[j]``.
    """
    program = tl.program_id(0)
    for i in tl.static_range(JOINED):
        if (program >= FIRST[i]) & (program < FIRST[i + 1]):
            at = (program - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            row, column = at // WIDTH[i], at % WIDTH[i]
            valid = row < ROWS[i]
            value = tl.zeros([BLOCK], joined[i].dtype.element_ty)
            if SPLIT:
                value = tl.load(joined[i] + at, valid, 0)
            for j in tl.static_range(PARTS):
                if OWNER[j] == i:
                    inside = valid & (column >= BEGIN[j]) & (column < BEGIN[j] + WIDTHS[j])
                    place = parts[j] + row * WIDTHS[j] + (column - BEGIN[j])
                    if SPLIT:
                        tl.store(place, value.to(parts[j].dtype.element_ty), inside)
                    else:
                        value = tl.where(inside, tl.load(place, inside, 0).to(value.dtype), value)
            if not SPLIT:
                tl.store(joined[i] + at, value, valid)


@op
def join_columns_all(
    parts: list[Tensor], counts: list[int], widths: list[int], dtype: str | None = None
) -> list[Tensor]:
    """``join_columns`` of ``counts[i]`` parts each to ``widths[i]`` columns, converted to ``dtype``, in one launch."""
    groups = _grouped(parts, counts)
    for group in groups:
        same = {(part.dtype, part.shape[0]) for part in group}
        require(len(same) == 1, "parts of one dtype and number of rows", ", ".join(map(str, same)))
    made = dtype and getattr(torch, dtype)
    joined = [
        group[0].new_empty((group[0].shape[0], width), dtype=made) for group, width in zip(groups, widths, strict=True)
    ]
    _copy(groups, joined, False)
    return joined


@op
def split_columns_all(
    joined: list[Tensor], counts: list[int], widths: list[int], dtype: str | None = None
) -> list[Tensor]:
    """The parts of ``join_columns_all``, contiguous, in one launch; ``widths`` are theirs, 0 is a vector."""
    made = dtype and getattr(torch, dtype)
    groups = [
        [matrix.new_empty((matrix.shape[0], width) if width else (matrix.shape[0],), dtype=made) for width in group]
        for matrix, group in zip(joined, _grouped(widths, counts), strict=True)
    ]
    _copy(groups, joined, True)
    return [part for group in groups for part in group]


@op
def split_columns(joined: Tensor, widths: list[int]) -> list[Tensor]:
    """The parts of ``join_columns``, contiguous, in one launch; a width of 0 is a vector."""
    return split_columns_all([joined], [len(widths)], widths)


def _grouped(values: list, counts: list[int]) -> list[list]:
    """``counts[i]`` of the values each."""
    ends = list(accumulate(counts))
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _copy(groups: list[list[Tensor]], joined: list[Tensor], split: bool) -> None:
    """One launch for as many matrices as its arguments hold."""
    together, tensors = [], 0
    for pair in zip(groups, joined, strict=True):
        tensors += len(pair[0]) + 1
        if together and tensors > TOGETHER:
            _launch(together, split)
            together, tensors = [], len(pair[0]) + 1
        together.append(pair)
    if together:
        _launch(together, split)


def _launch(pairs: list[tuple[list[Tensor], Tensor]], split: bool) -> None:
    first, parts, owner, begin, widths = [0], [], [], [], []
    for i, (group, matrix) in enumerate(pairs):
        first.append(first[-1] + cdiv(matrix.numel(), BLOCK))
        columns = [part.shape[1] if part.dim() == 2 else 1 for part in group]
        parts += group
        owner += [i] * len(group)
        begin += accumulate(columns[:-1], initial=0)
        widths += columns
    if not first[-1]:
        return
    matrices = [matrix for _, matrix in pairs]
    _columns[(first[-1],)](
        tuple(parts), tuple(matrices), FIRST=tuple(first), ROWS=tuple(m.shape[0] for m in matrices),
        WIDTH=tuple(m.shape[1] for m in matrices), OWNER=tuple(owner), BEGIN=tuple(begin), WIDTHS=tuple(widths),
        JOINED=len(matrices), PARTS=len(parts), SPLIT=split, BLOCK=BLOCK,
    )  # fmt: skip
