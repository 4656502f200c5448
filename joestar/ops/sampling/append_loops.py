"""``joestar::append_loops``: a structure with one more loop per row, whatever is there."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC, define_structural
from joestar.ops.sampling.edge_dst import edge_dst


def append_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more edge per row, from the row's own node, behind its others; loops that are there stay.

    Args:
        indices: source of each edge ``[E]``; sources and rows are the same ``n`` nodes. dst_count: valid rows, 0-d.

    Returns:
        (offsets, sources ``[E + n]``, position of each edge among the old ones int64 ``[E + n]``, 0 for loops, and
        whether it is one of the new loops, bool ``[E + n]``). Padding behind the last edge is 0 and false.
    """
    n, size = indptr.numel() - 1, indices.numel() + indptr.numel() - 1
    moved = indptr + torch.minimum(torch.arange(n + 1, device=indptr.device), dst_count)
    row = edge_dst(moved, size, indptr)
    position = torch.arange(size, device=indptr.device)
    valid = position < moved[-1]
    if not n:
        return moved, indices.new_zeros(0), indptr.new_zeros(0), valid
    loop = valid & (position == torch.index_select(moved, 0, row + 1) - 1) & (row < dst_count)
    origin = torch.where(valid & ~loop, position - torch.minimum(row, dst_count), 0)
    if indices.numel():
        sources = torch.index_select(indices, 0, origin.clamp(max=indices.numel() - 1))
    else:
        sources = indices.new_zeros(size)
    sources = torch.where(loop, row.to(indices.dtype), torch.where(valid, sources, 0))
    return moved, sources, origin, loop


def _fake(indptr, indices, dst_count):
    size = (indices.shape[0] + indptr.shape[0] - 1,)
    edges = indptr.new_empty(size), indices.new_empty(size, dtype=torch.bool)
    return torch.empty_like(indptr), indices.new_empty(size), *edges


define_structural(
    f"append_loops({CSC}, Tensor dst_count) -> (Tensor, Tensor, Tensor, Tensor)", append_loops, fake=_fake, loops="all",
    padded_ids="batch",
)  # fmt: skip
