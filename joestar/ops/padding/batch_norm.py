"""``joestar::masked_batch_norm`` and its running statistics."""

import torch
from torch import Tensor

from joestar.ops.padding.mask_rows import mask_rows
from joestar.ops.registry import Padding, compose
from joestar.ops.shapes import wide_dtype


def masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-mode batch norm of ``[n, C]`` over the valid rows.

    Returns:
        (y in the dtype of ``x``, batch mean, unbiased batch variance); statistics are at least float32, as PyTorch's
        are. The variance of one row is NaN: it has none. Padded rows of y are ``bias``.
    """
    total = count.to(wide_dtype(x.dtype)).clamp(min=1)
    mean = mask_rows(x, count, 0, 0).sum(0, dtype=total.dtype) / total
    centred = mask_rows(x - mean, count, 0, 0)
    squares = (centred * centred).sum(0)
    y = centred * torch.rsqrt(squares / total + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.detach(), (squares / (count - 1)).detach()


def running_average(buffer: Tensor, statistic: Tensor, momentum: float, count: Tensor, least: int) -> Tensor:
    """A running statistic after a batch of ``count`` rows, in its own dtype.

    A batch of fewer than ``least`` rows leaves it as it is: no rows have a mean, and one row has no variance.
    """
    wide = wide_dtype(buffer.dtype)
    moved = torch.lerp(buffer.to(wide), statistic.to(wide), momentum).to(buffer.dtype)
    return torch.where(count >= least, moved, buffer)


def cumulative_average(buffer: Tensor, statistic: Tensor, batches: Tensor, count: Tensor, least: int) -> Tensor:
    """``running_average`` over all ``batches``, an integer that counts this one as well."""
    wide = wide_dtype(buffer.dtype)
    moved = torch.lerp(buffer.to(wide), statistic.to(wide), 1 / batches.to(wide)).to(buffer.dtype)
    return torch.where(count >= least, moved, buffer)


compose(
    "masked_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor count, float eps) -> (Tensor, Tensor, Tensor)",
    masked_batch_norm, padding=Padding.RULE,
)  # fmt: skip
compose(
    "running_average(Tensor buffer, Tensor statistic, float momentum, Tensor count, int least) -> Tensor",
    running_average,
)  # fmt: skip
compose(
    "cumulative_average(Tensor buffer, Tensor statistic, Tensor batches, Tensor count, int least) -> Tensor",
    cumulative_average,
)  # fmt: skip
