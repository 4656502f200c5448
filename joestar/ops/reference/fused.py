"""Fused ops, as what they fuse."""

import itertools

import torch
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.kernels.layout import cat_width
from joestar.ops.reference.computation import spmm, spmm_grad_x
from joestar.ops.reference.dropout import dropout_apply
from joestar.ops.reference.sampling import sample_cols


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, D]``: (y ``[num_dst, D]``, edge count)."""
    sub, picked, count = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, -1, node_ids)
    return spmm(sub, picked, x, None, reduce), count


def sample_aggregate_self(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` and the destinations' own rows ``x[dsts]``: (y, own, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return y, x[dsts.to(torch.int64)], count


def sample_aggregate_cat(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str, ones: bool = True, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[aggregated rows, own rows, 1, 0, ...]`` side by side, for one GEMM: (``[num_dst, cat_width(D)]``, edge count).

    The column of ones multiplies the bias, which is a column of the joined weights; ``x`` ``[N, D]``. Without ``ones``
    it is left out: ``[num_dst, cat_width(D, False)]``.
    """
    y, own, count = sample_aggregate_self(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return _joined(y, own, ones), count


def _joined(y: Tensor, own: Tensor, ones: bool) -> Tensor:
    width = y.shape[1]
    out = y.new_zeros((y.shape[0], cat_width(width, ones)))
    out[:, :width], out[:, width : 2 * width] = y, own
    if ones:
        out[:, 2 * width] = 1
    return out


def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str) -> Tensor:
    """``[sum or mean of z over in-edges, z[i]]`` for every destination ``i``: ``[num_dst, 2 D]``.

    Args:
        x: ``[num_src, D]``, destinations first; reduce: ``"sum"`` or ``"mean"``.
        bits: if given (``dropout_bits``), ``z`` is ``x * scale`` where ``x`` is positive and its bit is set, else 0:
            ReLU and dropout, whose result is never stored. Without, ``z`` is ``x``.
    """
    z = x if bits is None else _activated(x, bits, x, scale)
    return torch.cat([spmm(indptr, indices, z, None, reduce), z[: indptr.numel() - 1]], 1)


def _activated(value: Tensor, bits: Tensor, x: Tensor, scale: float) -> Tensor:
    return torch.where(x > 0, dropout_apply(value, bits, 0.0, False) * scale, torch.zeros_like(value)).contiguous()


def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, bits: Tensor | None, scale: float, reduce: str
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, 2 D]``."""
    width = x.shape[1]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, x.shape[0], reduce)
    total[: grad.shape[0]] += grad[:, width:]
    return total if bits is None else _activated(total, bits, x, scale)


def aggregate_rows(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor | None,
    scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Sum or mean of ``weight[e] * z`` over in-edges, plus ``own * z[i]``, for every destination ``i``.

    Args:
        x: ``[num_src, D]``, destinations first; weight: ``[num_edges]``; own: one entry, ``[1]``; reduce: ``"sum"`` or
            ``"mean"``. bits, scale: what ``z`` is, as in ``aggregate_cat``.
    """
    z = x if bits is None else _activated(x, bits, x, scale)
    y = spmm(indptr, indices, z, weight, reduce)
    return y if own is None else (y + own * z[: indptr.numel() - 1]).to(x.dtype)


def aggregate_rows_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None,
    bits: Tensor | None, scale: float, reduce: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``aggregate_rows`` for ``x`` ``[num_src, D]``; ``grad`` ``[num_dst, D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, x.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]] += (own * grad).to(total.dtype)
    return total if bits is None else _activated(total, bits, x, scale)


def aggregate_cat_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, bits: Tensor, scale: float, reduce: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``aggregate_cat`` of ``x + bias``, and which entries its gradient flows to: (``[num_dst, 2 D]``, kept).

    Args:
        bias: ``[D]`` in the dtype of ``x``, or none.

    Returns:
        kept: int32 ``[num_src, ceil(D / 32)]``, the ``bits`` of positive entries; anything in rows that nobody reads.
    """
    x = x if bias is None else x + bias
    return aggregate_cat(indptr, indices, x, bits, scale, reduce), positive_bits(x, bits)


def aggregate_cat_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, kept: Tensor, scale: float, reduce: str, biased: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of ``aggregate_cat_kept`` for ``x`` ``[num_src, D]`` and for the bias, the sum of the rows, ``[D]``.

    ``grad`` is ``[num_dst, 2 D]``. Unless ``biased`` the second one is ``[0]``.
    """
    width, rows = grad.shape[1] // 2, kept.shape[0]
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, rows, reduce)
    total[: grad.shape[0]] += grad[:, width:]
    return _with_sum(dropout_apply(total, kept, 0.0, False) * scale, biased)


def _with_sum(rows: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    return rows, rows.sum(0) if biased else rows.new_empty(0)


def aggregate_rows_kept(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, bits: Tensor, scale: float,
    reduce: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``aggregate_rows`` of ``x + bias``, and which entries its gradient flows to: (``[num_dst, D]``, kept)."""
    x = x if bias is None else x + bias
    return aggregate_rows(indptr, indices, x, weight, own, bits, scale, reduce), positive_bits(x, bits)


def aggregate_rows_kept_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, own: Tensor | None, kept: Tensor,
    scale: float, reduce: str, biased: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``aggregate_rows_kept`` for ``x`` and the bias, as in the other; ``grad`` ``[num_dst, D]``."""
    total = spmm_grad_x(indptr, indices, grad, weight, kept.shape[0], reduce)
    if own is not None:
        total[: grad.shape[0]] += (own * grad).to(total.dtype)
    return _with_sum(dropout_apply(total, kept, 0.0, False) * scale, biased)


def sample_aggregate_own(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, own: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` plus ``own * x[dsts]``, ``own`` one entry, ``[1]``: (y, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return (y + own * x[dsts.long()]).to(x.dtype), count


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``x`` ``[n, D]`` plus ``bias`` ``[D]``, whose gradient comes from rows that are stored (``column_sums``)."""
    return x + bias


def column_sums(x: Tensor) -> Tensor:
    """Sums over the rows of ``x`` ``[n, D]``: ``[D]``."""
    return x.sum(0)


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Matrices ``[rows, k]`` and vectors ``[rows]`` side by side, then zeros: ``[rows, width]``.

    Joins weights and bias of several products into one; every part gets a contiguous gradient of its own.
    """
    columns = [part if part.dim() == 2 else part[:, None] for part in parts]
    left = width - sum(part.shape[1] for part in columns)
    return torch.cat([*columns, columns[0].new_zeros((columns[0].shape[0], left))], 1)


def split_columns(joined: Tensor, widths: list[int]) -> list[Tensor]:
    """The parts of ``join_columns``, contiguous; a width of 0 is a vector."""
    parts, first = [], 0
    for width in widths:
        part = joined[:, first : first + width] if width else joined[:, first]
        parts.append(part.clone(memory_format=torch.contiguous_format))
        first += width or 1
    return parts


def join_columns_all(parts: list[Tensor], counts: list[int], widths: list[int]) -> list[Tensor]:
    """Several ``join_columns``: the first of ``counts[0]`` parts to ``widths[0]`` columns, and so on."""
    ends = itertools.accumulate(counts)
    return [
        join_columns(parts[end - count : end], width) for end, count, width in zip(ends, counts, widths, strict=True)
    ]


def split_columns_all(joined: list[Tensor], counts: list[int], widths: list[int]) -> list[Tensor]:
    """The parts of ``join_columns_all``, contiguous: ``widths`` are those of all parts, 0 is a vector."""
    ends = itertools.accumulate(counts)
    groups = (widths[end - count : end] for end, count in zip(ends, counts, strict=True))
    return [part for matrix, group in zip(joined, groups, strict=True) for part in split_columns(matrix, group)]
