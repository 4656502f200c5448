"""``joestar::first_rows``: the edges of the first rows of a structure."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC, compose


def first_rows(indptr: Tensor, indices: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The edges of the first ``count`` rows.

    Args:
        indptr: int64 ``[n + 1]``; indices: per edge ``[E]``; rows: anything ``[m, ...]``, ``m <= n`` is the number of
            rows of the result; count: 0-d int64, ``<= m``.

    Returns:
        (offsets ``[m + 1]``, rows from ``count`` on being empty, and the edges ``[E]``, 0 behind the last).
    """
    end = torch.index_select(indptr, 0, count.reshape(1))
    held = torch.arange(indices.shape[0], device=indices.device) < end
    return torch.minimum(indptr[: rows.shape[0] + 1], end), torch.where(held, indices, 0)


compose(f"first_rows({CSC}, Tensor rows, Tensor count) -> (Tensor, Tensor)", first_rows)
