"""Fused kernels on the CPU."""

import math

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_node_ids, check_offsets, check_values, require
from joestar.kernels.cpu_dropout import gated_dropout
from joestar.kernels.cpu_spmm import REDUCE, spmm, spmm_grad_x, spmm_into
from joestar.kernels.dropout import positive_bits
from joestar.kernels.layout import cat_width


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, ...]``: (y ``[n_dst, ...]``, edge count).

    The same bits as the two calls; the sample is never stored.
    """
    y = x.new_empty((dsts.numel(), *x.shape[1:]))
    return y, _into(y, 0, indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)


def _into(y, stride, indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids) -> Tensor:
    """Fills ``y``, whose rows are joined ones of ``stride`` columns if that is not 0; the edge count."""
    indptr, indices, dsts = check_offsets(indptr), check_ids(indices, "indices"), check_ids(dsts, "dsts")
    require(indices.dtype == dsts.dtype, "node ids of one dtype", f"{indices.dtype} and {dsts.dtype}")
    x, count, width = check_values(x, "features"), int(dst_count), math.prod(x.shape[1:])
    key, how, hashed = key.contiguous(), REDUCE[reduce], check_node_ids(node_ids, indptr.numel() - 1)
    draws = k, replace, key, site
    total = _native.sample_aggregate(indptr, indices, dsts, count, *draws, x, width, how, y, stride, hashed)
    return torch.scalar_tensor(total, dtype=torch.int64, device="cpu")


def sample_aggregate_self(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` and the destinations' own rows ``x[dsts]``: (y, own, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return y, torch.index_select(x, 0, dsts), count


def sample_aggregate_cat(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, ones: bool = True, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[aggregated rows, own rows, 1, 0, ...]`` side by side: (``[num_dst, cat_width(D)]``, edge count).

    Without ``ones`` a copy up to column ``cat_width(D, False)``.
    """
    width, stride = x.shape[1], cat_width(x.shape[1])
    y = x.new_empty((dsts.numel(), stride))
    count = _into(y, stride, indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    if not ones:
        y = y[:, : cat_width(width, False)].contiguous()
        y[:, 2 * width :] = 0
    return y, count


def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str) -> Tensor:
    """``[sum or mean of z over in-edges, z[i]]``, ``[num_dst, 2 D]``; with ``bits`` ``z`` is ReLU and dropout of x."""
    z, width, rows = x if bits is None else gated_dropout(x, bits, x, scale), x.shape[1], indptr.numel() - 1
    y = x.new_empty((rows, 2 * width))
    spmm_into(y, indptr, indices, z, reduce)
    y[:, width:].copy_(z[:rows])
    return y


def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, 2 D]``."""
    width = x.shape[1]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, x.shape[0], reduce)
    total[: grad.shape[0]].add_(grad[:, width:])
    return total if bits is None else gated_dropout(total, bits, x, scale)


def aggregate_rows(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Weighted sum or mean of z over in-edges, plus ``own * z[i]``: ``[num_dst, D]``; see ``joestar.ops.reference``."""
    z = x if bits is None else gated_dropout(x, bits, x, scale)
    y = spmm(indptr, indices, z, weight, reduce)
    return y if own is None else y.addcmul_(z[: indptr.numel() - 1], own.to(y.dtype))


def aggregate_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``aggregate_rows`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, x.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]].addcmul_(grad, own.to(total.dtype))
    return total if bits is None else gated_dropout(total, bits, x, scale)


def aggregate_cat_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor, scale: float, reduce: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``aggregate_cat`` of ``x + bias``, and int32 ``[num_src, ceil(D / 32)]``: which entries of it are in z."""
    x = x if bias is None else x + bias
    return aggregate_cat(indptr, indices, x, bits, scale, reduce), positive_bits(x, bits)


def aggregate_cat_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, kept: Tensor, scale: float, reduce: str, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of ``aggregate_cat_kept``: for ``x`` ``[num_src, D]`` and, if ``biased``, for the bias ``[D]``."""
    width = grad.shape[1] // 2
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, kept.shape[0], reduce)
    total[: grad.shape[0]].add_(grad[:, width:])
    return _with_sum(gated_dropout(total, kept, None, scale), biased)


def _with_sum(rows: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    return rows, rows.sum(0) if biased else rows.new_empty(0)


def aggregate_rows_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor, scale: float,
    reduce: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``aggregate_rows`` of ``x + bias``, and int32 ``[num_src, ceil(D / 32)]``: which entries of it are in z."""
    x = x if bias is None else x + bias
    return aggregate_rows(indptr, indices, x, weight, own, bits, scale, reduce), positive_bits(x, bits)


def aggregate_rows_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, own: Tensor | None, kept: Tensor,
    scale: float, reduce: str, biased: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_rows_kept`` for ``x`` ``[num_src, D]`` and, if ``biased``, for the bias ``[D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, kept.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]].addcmul_(grad, own.to(total.dtype))
    return _with_sum(gated_dropout(total, kept, None, scale), biased)


def sample_aggregate_own(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, own: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` plus ``own * x[dsts]``: (y, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return y.addcmul_(torch.index_select(x, 0, dsts), own.to(y.dtype)), count
