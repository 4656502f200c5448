"""What a training step does besides the program: taking its batch, and noting what came of it."""

import torch
from torch import Tensor


def take_batch(order: Tensor, num_seeds: Tensor, key: Tensor, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Batch ``key[2]`` of the seeds: (seeds ``[size]``, their true number, 0-d int64).

    Args:
        order: ids ``[capacity]``, the first ``num_seeds`` (0-d int64) are this epoch's; key: int64 ``[3]``;
        batch: seeds per step; size: of the result, at least ``batch``; it is filled up with the batch's first seed.
    """
    first = key[2] * batch
    count = (num_seeds - first).clamp(0, batch)
    slot = torch.arange(size, device=order.device)
    position = torch.where(slot < count, first + slot, first).clamp(max=order.numel() - 1)
    return order[position], count


def finish_step(
    key: Tensor, flag: Tensor, losses: Tensor, history: Tensor, progress: Tensor, offset: Tensor, loss: Tensor,
    ok: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Notes loss and counts of step ``key[2]`` and moves on, if ``ok``; else raises the sticky flag and stays.

    Args:
        key: int64 ``[3]``; flag: 0-d bool; losses: float32 ``[capacity]``, written at ``offset + key[2]``; history:
            int64 ``[steps, n]``; progress: int64 ``[2]``, becomes (flag, step); offset: 0-d int64. All are changed in
            place but ``offset``.
        loss: 0-d; ok: 0-d bool, false while the flag is set; counts: int64 ``[n]``.
    """
    row = key[2].clone().view(1)
    kept = torch.where(ok, loss.detach().to(losses.dtype), losses.index_select(0, row + offset)[0])
    losses.index_copy_(0, row + offset, kept.view(1))
    if history.shape[1]:
        history.index_copy_(0, row, torch.where(ok, counts, history.index_select(0, row)[0]).view(1, -1))
    flag.copy_(~ok)
    key[2] += ok
    progress[0], progress[1] = flag, key[2]


def overflow(counts: list[Tensor], bounds: list[int], flag: Tensor) -> tuple[Tensor, Tensor]:
    """(true counts int64 ``[n]``, ok): ok is false while the sticky flag is set or any count exceeds its bound."""
    if not counts:
        return torch.zeros(0, dtype=torch.int64, device=flag.device), ~flag
    stacked = torch.stack(counts)
    exceeded = counts[0] > bounds[0]
    for count, bound in zip(counts[1:], bounds[1:], strict=True):
        exceeded = exceeded | (count > bound)
    return stacked, ~(flag | exceeded)
