"""Fused kernels on the CPU."""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_values, require
from joestar.kernels.cpu_spmm import REDUCE


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, ...]``: (y ``[n_dst, ...]``, edge count).

    The same bits as the two calls; the sample is never stored.
    """
    indptr, indices, dsts = check_offsets(indptr), check_ids(indices, "indices"), check_ids(dsts, "dsts")
    require(indices.dtype == dsts.dtype, "node ids of one dtype", f"{indices.dtype} and {dsts.dtype}")
    x, count = check_values(x, "features"), int(dst_count)
    y = x.new_empty((dsts.numel(), *x.shape[1:]))
    width = y.numel() // max(1, dsts.numel()) if dsts.numel() else 0
    key = key.contiguous()
    total = _native.sample_aggregate(indptr, indices, dsts, count, k, replace, key, site, x, width, REDUCE[reduce], y)
    return y, torch.scalar_tensor(total, dtype=torch.int64)
