"""Fused ops, as what they fuse."""

from torch import Tensor

from joestar.ops.reference.computation import spmm
from joestar.ops.reference.sampling import sample_cols


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, D]``: (y ``[num_dst, D]``, edge count)."""
    sub, picked, count = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, -1)
    return spmm(sub, picked, x, None, reduce), count
