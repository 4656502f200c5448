"""``joestar::compact``: local ids for the sources of a sampled set."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import DSTS, Makes, define_structural


def compact(
    dsts: Tensor, dst_count: Tensor, sub_indptr: Tensor, sub_indices: Tensor, num_nodes: int, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Local ids for the sources of a sampled set: (srcs, local indices, count), destinations first."""
    edges = int(sub_indptr[-1])
    seen = torch.cat([dsts[: int(dst_count.clamp(max=dsts.numel()))], sub_indices[:edges]])
    num_dst = seen.numel() - edges
    order = torch.arange(seen.numel(), device=seen.device)
    first = torch.full((num_nodes,), seen.numel(), dtype=torch.int64, device=seen.device)
    first.scatter_reduce_(0, seen.to(torch.int64), order, "amin")
    keep = (first[seen.to(torch.int64)] == order) | (order < num_dst)
    position = torch.cumsum(keep, 0) - 1
    count = keep.sum()
    kept = seen[keep]
    local = position[first[sub_indices[:edges].to(torch.int64)]].to(sub_indices.dtype)
    size = kept.numel() if num_src < 0 else num_src
    srcs = (kept[:1] if kept.numel() else sub_indices.new_zeros(1)).expand(size).clone()
    srcs[: kept.numel()] = kept[:size]
    full = sub_indices.new_zeros(sub_indices.numel())
    full[:edges] = torch.where(local < size, local, 0)
    return srcs, full, count


def _fake(dsts, dst_count, sub_indptr, sub_indices, num_nodes, num_src):
    srcs = sub_indices.new_empty((shapes.bound(num_src),))
    return srcs, torch.empty_like(sub_indices), shapes.count(sub_indices)


define_structural(
    f"compact({DSTS}, Tensor sub_indptr, Tensor sub_indices, int num_nodes, SymInt num_src)"
    " -> (Tensor, Tensor, Tensor)", compact, fake=_fake, cpu="cpu_sampling", cuda="gpu_compact", keeps_tables=True,
    makes=Makes("num_src", rows=None), padded_ids="batch",
)  # fmt: skip
