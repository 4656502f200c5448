"""``joestar::edge_dst`` and ``joestar::out_degrees``: rows of edges, edges of sources; offsets of rows."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC, define_structural


def offsets(degrees: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(indptr cut at the capacity, the true total) of rows with these degrees; capacity -1 cuts nothing."""
    indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64, device=degrees.device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    count = indptr[-1].clone()
    return (indptr if capacity < 0 else indptr.clamp(max=capacity)), count


def edge_dst(indptr: Tensor, num_edges: int, like: Tensor) -> Tensor:
    """Row of each edge ``[num_edges]`` in the dtype of ``like``; 0 past the last valid edge."""
    position = torch.arange(num_edges, device=indptr.device)
    row = torch.searchsorted(indptr, position, right=True) - 1
    return torch.where(position < indptr[-1], row, 0).to(like.dtype)


def valid_edges(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(sources, destinations) of the valid edges, int64."""
    count = int(indptr[-1])
    src = indices[:count].to(torch.int64)
    return src, edge_dst(indptr, count, src)


def out_degrees(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    """Edges leaving every source, int64 ``[num_src]``."""
    src, _ = valid_edges(indptr, indices)
    return torch.zeros(num_src, dtype=torch.int64, device=indptr.device).index_add(0, src, torch.ones_like(src))


define_structural(
    "edge_dst(Tensor indptr, SymInt num_edges, Tensor like) -> Tensor", edge_dst,
    fake=lambda indptr, num_edges, like: like.new_empty((num_edges,)), cpu="cpu_sampling", cuda="gpu_structure",
    padded_ids="batch",
)  # fmt: skip
define_structural(
    f"out_degrees({CSC}, SymInt num_src) -> Tensor", out_degrees,
    fake=lambda indptr, indices, num_src: indptr.new_empty((num_src,)), cpu="cpu_sampling", cuda="gpu_structure",
)  # fmt: skip
