"""``joestar::mask_rows`` and ``joestar::only_valid``: padded entries replaced.

``count`` is, here and in the other files, the 0-d int64 number of valid entries along a padded dimension.
"""

import torch
from torch import Tensor

from joestar.ops.registry import Padding, compose


def mask_rows(x: Tensor, count: Tensor, dim: int, value) -> Tensor:
    """``x`` with every slice at position >= ``count`` along ``dim`` replaced by ``value``."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    valid = (torch.arange(x.shape[dim], device=x.device) < count).reshape(shape)
    return torch.where(valid, x, torch.full((), value, dtype=x.dtype, device=x.device))


def only_valid(x: Tensor) -> Tensor:
    """A copy of ``x``; in a padded program its padded entries are 0 (``lowering.rules.rowwise``)."""
    return x.clone()


compose("mask_rows(Tensor x, Tensor count, int dim, Scalar value) -> Tensor", mask_rows)
compose("only_valid(Tensor x) -> Tensor", only_valid, padding=Padding.RULE)
