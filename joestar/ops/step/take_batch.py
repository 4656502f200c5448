"""``joestar::take_batch``: what a step begins with."""

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


define(
    "take_batch(Tensor order, Tensor run, Tensor key, int size) -> (Tensor, Tensor)", take_batch,
    fake=lambda order, run, key, size: (order.new_empty((size,)), shapes.count(order)), gradient=NO_GRADIENT,
    padding=Padding.REFUSED, cuda="gpu_step",
)  # fmt: skip
