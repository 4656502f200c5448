"""``joestar::slice_cols``: all in-edges of given nodes."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import CSC, DSTS, NO_GRADIENT, Makes, Padding, define
from joestar.ops.sampling.positions import OffsetsIndicesCount
from joestar.ops.sampling.sample_cols import sample_cols


def slice_cols(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, num_edges: int) -> OffsetsIndicesCount:
    """All in-edges of every destination, ``A[:, dsts]``; sources keep their global ids."""
    key = torch.zeros(3, dtype=torch.int64, device=indptr.device)
    return sample_cols(indptr, indices, dsts, dst_count, -1, False, key, 0, num_edges)


define(
    f"slice_cols({CSC}, {DSTS}, SymInt num_edges) -> (Tensor, Tensor, Tensor)", slice_cols,
    fake=lambda indptr, indices, dsts, dst_count, num_edges: shapes.edges(indices, dsts, num_edges),
    gradient=NO_GRADIENT, padding=Padding.SAFE, cpu="cpu_sampling", cuda="gpu_sampling",
    makes=Makes("num_edges", rows="dsts"), padded_ids="batch",
)  # fmt: skip
