"""``joestar::take_batch`` and ``joestar::finish_step``: what a step begins and ends with."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import NO_GRADIENT, Padding, define


def take_batch(order: Tensor, run: Tensor, key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Batch ``key[2]`` of the seeds: (seeds ``[size]``, their true number, 0-d int64).

    Args:
        order: ids ``[capacity]``; run: int64 ``[3]`` = (number of seeds, which come first in ``order``; seeds per step,
            at most ``size``; where the run's losses begin); key: int64 ``[3]``; size: of the result, which is filled
            up with the batch's first seed.
    """
    first = key[2] * run[1]
    count = torch.minimum((run[0] - first).clamp(min=0), run[1])
    slot = torch.arange(size, device=order.device)
    position = torch.where(slot < count, first + slot, first).clamp(max=order.numel() - 1)
    return order[position], count


def finish_step(key: Tensor, flag: Tensor, losses: Tensor, run: Tensor, loss: Tensor, ok: Tensor) -> None:
    """Notes the loss of step ``key[2]`` and moves on, if ``ok``; else raises the sticky flag and stays.

    Args:
        key: int64 ``[3]``; flag: 0-d bool; losses: ``[capacity]``, written at ``run[2] + key[2]``. They are changed.
        run: as in ``take_batch``; loss: 0-d; ok: 0-d bool, false while the flag is set.
    """
    at = (key[2] + run[2]).view(1)
    kept = torch.where(ok, loss.detach().to(losses.dtype), losses.index_select(0, at)[0])
    losses.index_copy_(0, at, kept.view(1))
    flag.copy_(~ok)
    key[2] += ok


define(
    "take_batch(Tensor order, Tensor run, Tensor key, int size) -> (Tensor, Tensor)", take_batch,
    fake=lambda order, run, key, size: (order.new_empty((size,)), shapes.count(order)), gradient=NO_GRADIENT,
    padding=Padding.REFUSED, cuda="gpu_step",
)  # fmt: skip
define(
    "finish_step(Tensor(a!) key, Tensor(b!) flag, Tensor(c!) losses, Tensor run, Tensor loss, Tensor ok) -> ()",
    finish_step, fake=lambda key, flag, losses, run, loss, ok: None, gradient=NO_GRADIENT, padding=Padding.REFUSED,
    cuda="gpu_step",
)  # fmt: skip
