"""``joestar::scatter_valid``: a scatter of valid entries only."""

import torch
from torch import Tensor

from joestar.ops.registry import compose


def scatter_valid(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool, count: Tensor
) -> Tensor:
    """``x.scatter_reduce(dim, index, source, reduce)`` of the first ``count`` entries of the source along ``dim``."""
    rows = x.shape[dim]
    shape = [-1 if d == dim else 1 for d in range(source.dim())]
    valid = (torch.arange(source.shape[dim], device=x.device) < count).reshape(shape)
    extended = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    index = torch.where(valid, index, rows)
    return extended.scatter_reduce(dim, index, source, reduce, include_self=include_self).narrow(dim, 0, rows)


compose(
    "scatter_valid(Tensor x, int dim, Tensor index, Tensor source, str reduce, bool include_self, Tensor count)"
    " -> Tensor", scatter_valid,
)  # fmt: skip
