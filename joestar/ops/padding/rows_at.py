"""``joestar::rows_at``, ``joestar::like_first`` and ``joestar::scatter_valid``: reads from what may be empty, or of
rows of the batch alone, writes of valid entries only."""

import torch
from torch import Tensor

from joestar.ops.registry import compose


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` ``[n, ...]``; rows of 0 where ``x`` has none, as an empty set of edges has in front of its loops."""
    if isinstance(x.shape[0], int) and x.shape[0] == 0:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    return torch.index_select(x, 0, index)


def like_first(index: Tensor, count: Tensor) -> Tensor:
    """``index`` ``[n, ...]`` with every entry behind the first ``count`` as the first one is."""
    valid = (torch.arange(index.shape[0], device=index.device) < count).reshape(-1, *[1] * (index.dim() - 1))
    return torch.where(valid, index, index[:1])


def scatter_valid(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool, count: Tensor
) -> Tensor:
    """``x.scatter_reduce(dim, index, source, reduce)`` of the first ``count`` entries of the source along ``dim``.

    The others go to a row of their own; an id behind the last row is an error, also that of this row.
    """
    rows = x.shape[dim]
    shape = [-1 if d == dim else 1 for d in range(source.dim())]
    valid = (torch.arange(source.shape[dim], device=x.device) < count).reshape(shape)
    extended = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    index = torch.where(valid, torch.where(index == rows, rows + 1, index), rows)
    return extended.scatter_reduce(dim, index, source, reduce, include_self=include_self).narrow(dim, 0, rows)


compose("rows_at(Tensor x, Tensor index) -> Tensor", rows_at)
compose("like_first(Tensor index, Tensor count) -> Tensor", like_first)
compose(
    "scatter_valid(Tensor x, int dim, Tensor index, Tensor source, str reduce, bool include_self, Tensor count)"
    " -> Tensor", scatter_valid,
)  # fmt: skip
