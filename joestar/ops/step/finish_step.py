"""``joestar::finish_step``: what a step ends with."""

import torch
from torch import Tensor

from joestar.ops.registry import NO_GRADIENT, Padding, define


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
    "finish_step(Tensor(a!) key, Tensor(b!) flag, Tensor(c!) losses, Tensor run, Tensor loss, Tensor ok) -> ()",
    finish_step, fake=lambda key, flag, losses, run, loss, ok: None, gradient=NO_GRADIENT, padding=Padding.REFUSED,
    cuda="gpu_step",
)  # fmt: skip
