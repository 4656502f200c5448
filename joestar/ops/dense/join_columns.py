"""``joestar::join_columns``: weights and biases of several products as one, and back; several joints at once, too."""

import itertools

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define, define_gradient

ops = torch.ops.joestar


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Matrices ``[rows, k]`` and vectors ``[rows]`` side by side, then zeros: ``[rows, width]``.

    Joins weights and bias of several products into one; every part gets a contiguous gradient of its own.
    """
    columns = [part if part.dim() == 2 else part[:, None] for part in parts]
    left = width - sum(part.shape[1] for part in columns)
    return torch.cat([*columns, columns[0].new_zeros((columns[0].shape[0], left))], 1)


def split_columns(joined: Tensor, widths: list[int]) -> list[Tensor]:
    """The parts of ``join_columns``, contiguous; a width of 0 is a vector."""
    parts, first = [], 0
    for width in widths:
        part = joined[:, first : first + width] if width else joined[:, first]
        parts.append(part.clone(memory_format=torch.contiguous_format))
        first += width or 1
    return parts


def join_columns_all(
    parts: list[Tensor], counts: list[int], widths: list[int], dtype: str | None = None
) -> list[Tensor]:
    """Several ``join_columns``: the first of ``counts[0]`` parts to ``widths[0]`` columns, and so on.

    With ``dtype`` (``"bfloat16"``) they are converted on the way.
    """
    parts = [part if dtype is None else part.to(getattr(torch, dtype)) for part in parts]
    ends = itertools.accumulate(counts)
    return [
        join_columns(parts[end - count : end], width) for end, count, width in zip(ends, counts, widths, strict=True)
    ]


def split_columns_all(
    joined: list[Tensor], counts: list[int], widths: list[int], dtype: str | None = None
) -> list[Tensor]:
    """The parts of ``join_columns_all``, contiguous: ``widths`` are those of all parts, 0 is a vector.

    With ``dtype`` they are converted on the way.
    """
    joined = [matrix if dtype is None else matrix.to(getattr(torch, dtype)) for matrix in joined]
    ends = itertools.accumulate(counts)
    groups = (widths[end - count : end] for end, count in zip(ends, counts, strict=True))
    return [part for matrix, group in zip(joined, groups, strict=True) for part in split_columns(matrix, group)]


def _split_fake(joined, widths):
    rows = joined.shape[0]
    return [joined.new_empty((rows, width) if width else (rows,)) for width in widths]


def _all_fake(parts, counts, widths, dtype=None):
    firsts = (parts[end - count] for end, count in zip(itertools.accumulate(counts), counts, strict=True))
    return [
        first.new_empty((first.shape[0], width), dtype=dtype and getattr(torch, dtype))
        for first, width in zip(firsts, widths, strict=True)
    ]


def _split_all_fake(joined, counts, widths, dtype=None):
    owners = [matrix for matrix, count in zip(joined, counts, strict=True) for _ in range(count)]
    return [
        matrix.new_empty(
            (matrix.shape[0], width) if width else (matrix.shape[0],), dtype=dtype and getattr(torch, dtype)
        )
        for matrix, width in zip(owners, widths, strict=True)
    ]


def _setup(ctx, inputs, output):
    ctx.widths = [part.shape[1] if part.dim() == 2 else 0 for part in inputs[0]]


def _backward(ctx, grad):
    return ops.split_columns(grad, ctx.widths), None


def _all_setup(ctx, inputs, output):
    ctx.counts, ctx.dtype = inputs[1], str(inputs[0][0].dtype).removeprefix("torch.")
    ctx.widths = [part.shape[1] if part.dim() == 2 else 0 for part in inputs[0]]


def _all_backward(ctx, grads):
    """Gradients of matrices that nobody reads are zeros here."""
    dtype = ctx.dtype if any(grad.dtype != getattr(torch, ctx.dtype) for grad in grads) else None
    return ops.split_columns_all(grads, ctx.counts, ctx.widths, dtype), *[None] * (len(ctx.needs_input_grad) - 1)


define(
    "join_columns(Tensor[] parts, int width) -> Tensor", join_columns,
    fake=lambda parts, width: parts[0].new_empty((parts[0].shape[0], width)), gradient=(_setup, _backward),
    padding=Padding.SAFE, dissolved=("cpu", "cuda"),
)  # fmt: skip
define_gradient(
    "split_columns(Tensor joined, int[] widths) -> Tensor[]", split_columns, fake=_split_fake, cuda="gpu_join",
    dissolved=("cpu",),
)  # fmt: skip
define(
    "join_columns_all(Tensor[] parts, int[] counts, int[] widths, str? dtype=None) -> Tensor[]", join_columns_all,
    fake=_all_fake, gradient=(_all_setup, _all_backward), padding=Padding.SAFE, cuda="gpu_join", dissolved=("cpu",),
)  # fmt: skip
define_gradient(
    "split_columns_all(Tensor[] joined, int[] counts, int[] widths, str? dtype=None) -> Tensor[]", split_columns_all,
    fake=_split_all_fake, cuda="gpu_join", dissolved=("cpu",),
)  # fmt: skip
