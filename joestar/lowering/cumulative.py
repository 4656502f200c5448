"""Batch norms without momentum, which average over all batches: PyTorch's code asks the host for their number."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.torch_private import BatchNorm


@contextlib.contextmanager
def cumulative_averages() -> Iterator[None]:
    """While a program is traced, ``nn.BatchNorm1d(momentum=None)`` divides by the number of batches on the device."""
    plain = BatchNorm.forward

    def forward(self, input: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.running_mean is None or input.dim() != 2:
            return plain(self, input)
        return _cumulative(self, input)

    BatchNorm.forward = forward
    try:
        yield
    finally:
        BatchNorm.forward = plain


def _cumulative(norm: BatchNorm, x: Tensor) -> Tensor:
    norm.num_batches_tracked.add_(1)
    count = torch.full((), x.shape[0], dtype=torch.int64, device=x.device)
    y, mean, var = torch.ops.joestar.masked_batch_norm(x, norm.weight, norm.bias, count, norm.eps)
    for buffer, statistic, least in ((norm.running_mean, mean, 1), (norm.running_var, var, 2)):
        moved = torch.ops.joestar.cumulative_average(buffer, statistic, norm.num_batches_tracked, count, least)
        buffer.copy_(moved)
    return y
