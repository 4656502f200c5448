"""Batch norms whose own code cannot be traced as it is: those without momentum, and those of several ranks.

Without momentum, statistics are averaged over all batches, whose number PyTorch's code asks the host for.
``nn.SyncBatchNorm`` has a collective in a function of its own; traced, it is ``joestar.synced_batch_norm``.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm

from joestar.errors import CaptureError
from joestar.ops.step.ranks import Partners, partners
from joestar.torch_private import BatchNorm


@contextlib.contextmanager
def traced_norms(alone: bool = False) -> Iterator[None]:
    """While a program is traced, batch norms have forms that can be.

    Args:
        alone: ranks work without one another, for a model that is run to see whether it runs.
    """
    plain, synced, others = BatchNorm.forward, SyncBatchNorm.forward, None if alone else partners()

    def forward(self, input: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.running_mean is None or input.dim() != 2:
            return plain(self, input)
        return _cumulative(self, input)

    unsynced = forward if alone or others is not None or not _has_own_job() else synced

    BatchNorm.forward = forward
    SyncBatchNorm.forward = unsynced if others is None else _over_ranks(others, forward)
    try:
        yield
    finally:
        BatchNorm.forward, SyncBatchNorm.forward = plain, synced


def _has_own_job() -> bool:
    """Whether the script has several processes by itself, without ``joestar.distributed.init``."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _over_ranks(others: Partners, plain: Callable) -> Callable:
    rank, world = others.rank, others.world

    def forward(self, input: Tensor) -> Tensor:
        return _synced(self, input, rank, world) if self.training else plain(self, input)

    return forward


def _cumulative(norm: BatchNorm, x: Tensor) -> Tensor:
    norm.num_batches_tracked.add_(1)
    count = torch.full((), x.shape[0], dtype=torch.int64, device=x.device)
    y, mean, var = torch.ops.joestar.masked_batch_norm(x, norm.weight, norm.bias, count, norm.eps)
    _follow(norm, mean, var, count)
    return y


def _synced(norm: SyncBatchNorm, x: Tensor, rank: int, world: int) -> Tensor:
    if x.dim() != 2:
        raise CaptureError("SyncBatchNorm on several ranks needs rows [n, C].")
    if norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
    count = torch.full((), x.shape[0], dtype=torch.int64, device=x.device)
    parts = torch.full((x.shape[0],), 1.0, dtype=torch.float64, device=x.device)  # in place of what lowering puts there
    y, mean, var, rows = torch.ops.joestar.synced_batch_norm(
        x, norm.weight, norm.bias, count, parts, norm.eps, rank, world
    )
    if norm.running_mean is not None:
        _follow(norm, mean, var, rows)
    return y


def _follow(norm: BatchNorm, mean: Tensor, var: Tensor, rows: Tensor) -> None:
    """Moves the running statistics."""
    ops, momentum = torch.ops.joestar, norm.momentum
    for buffer, statistic, least in ((norm.running_mean, mean, 1), (norm.running_var, var, 2)):
        if momentum is None:
            moved = ops.cumulative_average(buffer, statistic, norm.num_batches_tracked, rows, least)
        else:
            moved = ops.running_average(buffer, statistic, momentum, rows, least)
        buffer.copy_(moved)
