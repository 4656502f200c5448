"""Structures with one self-loop per row: of local ids, of a block, of a sample with global ids."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC, DSTS, define_structural
from joestar.ops.sampling.edge_dst import edge_dst, offsets, valid_edges


def add_self_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly one self-loop per destination, at the end of its row; existing loops are dropped. ``[E + num_dst]``.

    Rows past ``dst_count`` are padding and stay empty.
    """
    num_dst = indptr.numel() - 1
    src, dst = valid_edges(indptr, indices)
    keep = src != dst
    degrees = torch.zeros(num_dst, dtype=torch.int64, device=indptr.device).index_add(0, dst, keep.long())
    real = torch.arange(num_dst, device=indptr.device) < dst_count
    degrees = degrees + real
    new_indptr, _ = offsets(degrees, -1)
    before = torch.cumsum(keep, 0) - 1 + dst
    out = indices.new_zeros(indices.numel() + num_dst)
    out[before[keep]] = src[keep].to(indices.dtype)
    loops = torch.nonzero(real).flatten()
    out[new_indptr[1:][loops] - 1] = loops.to(indices.dtype)
    return new_indptr, out


def block_self_loops(
    indptr: Tensor, indices: Tensor, sources: Tensor, dsts: Tensor, dst_count: Tensor, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_self_loops`` of a block, whose loops are found by global ids, and its out-degrees.

    Args:
        indices: local source of each edge; sources: its global id, ``[num_edges]``; dsts: ids of the destinations.
        num_src: number of sources; 0 if out-degrees are not wanted.

    Returns:
        (offsets, local sources ``[num_edges + num_dst]``, int64 ``[num_src]``: edges leaving every source, loops too).
    """
    row = edge_dst(indptr, indices.numel(), indices)
    loop = sources == torch.index_select(dsts, 0, row) if dsts.numel() else torch.zeros_like(sources, dtype=torch.bool)
    looped = torch.ops.joestar.add_self_loops(indptr, torch.where(loop, row, indices), dst_count)
    degrees = torch.ops.joestar.out_degrees(*looped, num_src) if num_src else indptr.new_empty(0)
    return *looped, degrees


def sampled_self_loops(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """``add_self_loops`` of a sample that nobody numbered: edges and loops by global ids.

    Args:
        indices: global id of each edge's source, ``[num_edges]``; dsts: ids of the destinations.

    Returns:
        (offsets, global sources ``[num_edges + num_dst]``, 0 behind the last edge).
    """
    n, out_indptr = dsts.numel(), torch.zeros_like(indptr)
    out = indices.new_zeros(indices.numel() + n)
    if not n:
        return out_indptr, out
    row = edge_dst(indptr, indices.numel(), indices).long()
    kept = (torch.arange(row.numel(), device=row.device) < indptr[-1]) & (indices != dsts[row])
    real = torch.arange(n, device=row.device) < dst_count
    torch.cumsum(torch.bincount(row[kept], minlength=n) + real, 0, out=out_indptr[1:])
    place = torch.cumsum(kept, 0) - 1 + torch.minimum(row, dst_count)  # behind a loop of every earlier row
    out[place[kept]] = indices[kept]
    out[out_indptr[1:][real] - 1] = dsts[real]
    return out_indptr, out


def _fake(indptr, indices, dst_count):
    return torch.empty_like(indptr), indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))


def _block_fake(indptr, indices, sources, dsts, dst_count, num_src):
    looped = indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))
    return torch.empty_like(indptr), looped, indptr.new_empty((num_src,))


def _sampled_fake(indptr, indices, dsts, dst_count):
    return torch.empty_like(indptr), indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))


define_structural(
    f"add_self_loops({CSC}, Tensor dst_count) -> (Tensor, Tensor)", add_self_loops, fake=_fake, cpu="cpu_sampling",
    cuda="gpu_structure", loops="some", padded_ids="batch",
)  # fmt: skip
define_structural(
    f"block_self_loops({CSC}, Tensor sources, {DSTS}, SymInt num_src) -> (Tensor, Tensor, Tensor)", block_self_loops,
    fake=_block_fake, cpu="cpu_sampling", cuda="gpu_structure", loops="some", padded_ids="batch",
)  # fmt: skip
define_structural(
    f"sampled_self_loops({CSC}, {DSTS}) -> (Tensor, Tensor)", sampled_self_loops, fake=_sampled_fake,
    cpu="cpu_sampling", cuda="gpu_structure", loops="some", padded_ids="graph",
)  # fmt: skip
