"""``joestar::slice_rows``: the edges of a slice that come from given nodes."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import Makes, define_structural
from joestar.ops.sampling.edge_dst import edge_dst, offsets
from joestar.ops.sampling.weighted_sample import fitted


def slice_rows(
    sub_indptr: Tensor, sub_indices: Tensor, row_ids: Tensor, srcs: Tensor, src_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges whose source is among ``srcs[:src_count]``: (new_indptr, positions int64 ``[num_edges]``, count).

    ``A[rows, :]`` of a matrix with columns ``row_ids``, which are not read. Positions are ascending.
    """
    wanted = srcs[: int(src_count.clamp(max=srcs.numel()))]
    total = int(sub_indptr[-1])
    kept = torch.isin(sub_indices[:total], wanted)
    row = edge_dst(sub_indptr, total, sub_indptr)
    degrees = torch.zeros_like(sub_indptr[1:]).index_add(0, row, kept.long())
    indptr, count = offsets(degrees, num_edges)
    return indptr, fitted(torch.nonzero(kept).flatten(), num_edges), count


def _fake(sub_indptr, sub_indices, row_ids, srcs, src_count, num_edges):
    return (
        sub_indptr.new_empty(sub_indptr.shape),
        sub_indptr.new_empty((shapes.bound(num_edges),)),
        shapes.count(sub_indptr),
    )


define_structural(
    "slice_rows(Tensor sub_indptr, Tensor sub_indices, Tensor row_ids, Tensor srcs, Tensor src_count,"
    " SymInt num_edges) -> (Tensor, Tensor, Tensor)", slice_rows, fake=_fake, cpu="cpu_weighted", cuda="gpu_weighted",
    makes=Makes("num_edges", rows="row_ids"), padded_ids="batch",
)  # fmt: skip
