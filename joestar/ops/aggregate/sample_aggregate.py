"""``joestar::sample_aggregate`` and its forms: a sample and the sum over it in one pass, nothing stored per edge.

They read a table in place; it needs no gradient.
"""

import torch
from torch import Tensor

from joestar.kernels.layout import cat_width
from joestar.ops import shapes
from joestar.ops.aggregate.spmm import spmm
from joestar.ops.registry import CSC, DRAWS, DSTS, HASHED, define_structural
from joestar.ops.sampling.sample_cols import sample_cols

_SAMPLE = f"({CSC}, {DSTS}, {DRAWS}, Tensor x"


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


def sample_aggregate_own(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, own: Tensor, reduce: str, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sample_aggregate`` plus ``own * x[dsts]``, ``own`` one entry, ``[1]``: (y, edge count)."""
    y, count = sample_aggregate(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids)
    return (y + own * x[dsts.long()]).to(x.dtype), count


def _fake(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids=None):
    return x.new_empty((dsts.shape[0], *x.shape[1:])), shapes.count(indices)


def _self_fake(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids=None):
    rows = (dsts.shape[0], *x.shape[1:])
    return x.new_empty(rows), x.new_empty(rows), shapes.count(indices)


def _cat_fake(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, ones=True, node_ids=None):
    return x.new_empty((dsts.shape[0], cat_width(x.shape[1], ones))), shapes.count(indices)


def _own_fake(indptr, indices, dsts, dst_count, k, replace, key, site, x, own, reduce, node_ids=None):
    return x.new_empty((dsts.shape[0], *x.shape[1:])), shapes.count(indices)


define_structural(
    f"sample_aggregate{_SAMPLE}, str reduce, {HASHED}) -> (Tensor, Tensor)", sample_aggregate, fake=_fake,
    cpu="cpu_fused", cuda="gpu_fused",
)  # fmt: skip
define_structural(
    f"sample_aggregate_self{_SAMPLE}, str reduce, {HASHED}) -> (Tensor, Tensor, Tensor)", sample_aggregate_self,
    fake=_self_fake, cpu="cpu_fused", cuda="gpu_fused",
)  # fmt: skip
define_structural(
    f"sample_aggregate_cat{_SAMPLE}, str reduce, bool ones=True, {HASHED}) -> (Tensor, Tensor)", sample_aggregate_cat,
    fake=_cat_fake, cpu="cpu_fused", cuda="gpu_fused",
)  # fmt: skip
define_structural(
    f"sample_aggregate_own{_SAMPLE}, Tensor own, str reduce, {HASHED}) -> (Tensor, Tensor)", sample_aggregate_own,
    fake=_own_fake, cpu="cpu_fused", cuda="gpu_fused",
)  # fmt: skip
