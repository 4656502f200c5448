"""``joestar::overflow``: whether all sets of a batch fit their bounds."""

import torch
from torch import Tensor

from joestar.ops.registry import NO_GRADIENT, Padding, define


def overflow(counts: list[Tensor], bounds: list[int], flag: Tensor) -> tuple[Tensor, Tensor]:
    """(true counts int64 ``[n]``, ok): ok is false while the sticky flag is set or any count exceeds its bound."""
    if not counts:
        return torch.zeros(0, dtype=torch.int64, device=flag.device), ~flag
    stacked = torch.stack(counts)
    exceeded = counts[0] > bounds[0]
    for count, bound in zip(counts[1:], bounds[1:], strict=True):
        exceeded = exceeded | (count > bound)
    return stacked, ~(flag | exceeded)


define(
    "overflow(Tensor[] counts, int[] bounds, Tensor flag) -> (Tensor, Tensor)", overflow, gradient=NO_GRADIENT,
    padding=Padding.REFUSED, cuda="gpu_step", dissolved=("cpu",),
    fake=lambda counts, bounds, flag: (flag.new_empty((len(counts),), dtype=torch.int64), flag.new_empty(())),
)  # fmt: skip
