"""``joestar::rows_at``: a lookup in what may be empty."""

import torch
from torch import Tensor

from joestar.ops.registry import compose


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` ``[n, ...]``; rows of 0 where ``x`` has none, as an empty set of edges has in front of its loops."""
    if isinstance(x.shape[0], int) and x.shape[0] == 0:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    return torch.index_select(x, 0, index)


compose("rows_at(Tensor x, Tensor index) -> Tensor", rows_at)
