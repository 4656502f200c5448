"""``joestar::masked_batch_norm``, that over ranks, and running statistics."""

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


def synced_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, parts: Tensor, eps: float, rank: int,
    world: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``masked_batch_norm`` over the rows of all ranks.

    Means and squares of the ranks are put together as Chan, Golub and LeVeque do it: no digits cancel.

    Args:
        parts: ``[n]``, what every row counts for, see ``ops.step.ranks``.

    Returns:
        As ``masked_batch_norm``, and the number of rows.
    """
    dtype, columns = wide_dtype(x.dtype), x.shape[1]
    part = parts.to(dtype).unsqueeze(1)
    own = part.sum()
    valid = mask_rows(x, count, 0, 0).to(dtype)
    mean = (valid * part).sum(0) / own.clamp(min=1e-9)
    squares = ((valid - mean).square() * part).sum(0)
    everyone = torch.ops.joestar.over_ranks(torch.cat([mean, squares, own.view(1)]), rank, world)
    means, many, numbers = everyone[:, :columns], everyone[:, columns:-1], everyone[:, -1:]
    rows = numbers.sum().round()
    total = rows.clamp(min=1)
    mean = (means * numbers).sum(0) / total
    squares = (many + numbers * (means - mean).square()).sum(0)
    y = mask_rows(x - mean, count, 0, 0) * torch.rsqrt(squares / total + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.detach(), (squares / (rows - 1)).detach(), rows.detach()


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
    "synced_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor count, Tensor parts, float eps, int rank,"
    " int world) -> (Tensor, Tensor, Tensor, Tensor)",
    synced_batch_norm, padding=Padding.RULE,
)  # fmt: skip
compose(
    "running_average(Tensor buffer, Tensor statistic, float momentum, Tensor count, int least) -> Tensor",
    running_average,
)  # fmt: skip
compose(
    "cumulative_average(Tensor buffer, Tensor statistic, Tensor batches, Tensor count, int least) -> Tensor",
    cumulative_average,
)  # fmt: skip
