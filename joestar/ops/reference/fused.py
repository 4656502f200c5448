"""Fused ops, as what they fuse."""

import torch
from torch import Tensor

from joestar.kernels.layout import cat_width
from joestar.ops.reference.computation import spmm, spmm_grad_x
from joestar.ops.reference.sampling import sample_cols


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, D]``: (y ``[num_dst, D]``, edge count)."""
    sub, picked, count = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, -1)
    return spmm(sub, picked, x, None, reduce), count


def sample_aggregate_self(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` and the destinations' own rows ``x[dsts]``: (y, own, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce)
    return y, x[dsts.to(torch.int64)], count


def sample_aggregate_cat(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[aggregated rows, own rows, 1, 0, ...]`` side by side, for one GEMM: (``[num_dst, cat_width(D)]``, edge count).

    The column of ones multiplies the bias, which is a column of the joined weights; ``x`` ``[N, D]``.
    """
    y, own, count = sample_aggregate_self(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce)
    return _joined(y, own), count


def _joined(y: Tensor, own: Tensor) -> Tensor:
    width = y.shape[1]
    out = y.new_zeros((y.shape[0], cat_width(width)))
    out[:, :width], out[:, width : 2 * width], out[:, 2 * width] = y, own, 1
    return out


def aggregate_cat(indptr: Tensor, indices: Tensor, x: Tensor, reduce: str) -> Tensor:
    """``[sum or mean over in-edges, x[i], 1, 0, ...]`` for every destination: ``[num_dst, cat_width(D)]``.

    Args:
        x: ``[num_src, D]``, destinations first; reduce: ``"sum"`` or ``"mean"``.
    """
    return _joined(spmm(indptr, indices, x, None, reduce), x[: indptr.numel() - 1])


def aggregate_cat_grad(
    indptr: Tensor, indices: Tensor, grad: Tensor, num_src: int, width: int, reduce: str, y: Tensor | None, scale: float
) -> Tensor:
    """Gradient of ``aggregate_cat`` for ``x`` ``[num_src, width]``.

    Args:
        grad: ``[num_dst, cat_width(width)]``; y: if given, ``x`` was the result ``y`` of ReLU and dropout, and the
            gradient goes through both: times ``scale`` where ``y > 0``, else 0.
    """
    total = spmm_grad_x(indptr, indices, grad[:, :width].contiguous(), None, num_src, reduce)
    total[: grad.shape[0]] += grad[:, width : 2 * width]
    return total if y is None else torch.where(y > 0, total * scale, torch.zeros_like(total))


def dropout_aggregate_cat(
    x: Tensor, bits: Tensor, p: float, indptr: Tensor, indices: Tensor, reduce: str
) -> tuple[Tensor, Tensor]:
    """ReLU and dropout, then ``aggregate_cat`` of the result ``y``: (y, joined rows)."""
    y = torch.ops.joestar.dropout_apply(x, bits, p, True)
    return y, torch.ops.joestar.aggregate_cat(indptr, indices, y, reduce)


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Matrices ``[rows, k]`` and vectors ``[rows]`` side by side, then zeros: ``[rows, width]``.

    Joins weights and bias of several products into one; every part gets a contiguous gradient of its own.
    """
    columns = [part if part.dim() == 2 else part[:, None] for part in parts]
    left = width - sum(part.shape[1] for part in columns)
    return torch.cat([*columns, columns[0].new_zeros((columns[0].shape[0], left))], 1)
