"""Fused kernels on the CPU."""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_values, require
from joestar.kernels.cpu_dropout import gated_dropout
from joestar.kernels.cpu_spmm import REDUCE, spmm, spmm_grad_x
from joestar.kernels.layout import cat_width


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


def sample_aggregate_self(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` and the destinations' own rows ``x[dsts]``: (y, own, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce)
    return y, torch.index_select(x, 0, dsts), count


def sample_aggregate_cat(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[aggregated rows, own rows, 1, 0, ...]`` side by side: (``[num_dst, cat_width(D)]``, edge count)."""
    y, own, count = sample_aggregate_self(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce)
    return _joined(y, own), count


def _joined(y: Tensor, own: Tensor) -> Tensor:
    width = y.shape[1]
    out = y.new_empty((y.shape[0], cat_width(width)))
    out[:, :width], out[:, width : 2 * width] = y, own
    out[:, 2 * width], out[:, 2 * width + 1 :] = 1, 0
    return out


def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str) -> Tensor:
    """``[sum or mean of z over in-edges, z[i]]``, ``[num_dst, 2 D]``; with ``bits`` ``z`` is ReLU and dropout of x."""
    z = x if bits is None else gated_dropout(x, bits, x, scale)
    return torch.cat([spmm(indptr, indices, z, None, reduce), z[: indptr.numel() - 1]], 1)


def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, 2 D]``."""
    width = x.shape[1]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, x.shape[0], reduce)
    total[: grad.shape[0]] += grad[:, width:]
    return total if bits is None else gated_dropout(total, bits, x, scale)
