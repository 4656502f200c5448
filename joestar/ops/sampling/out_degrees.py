"""``joestar::out_degrees``: edges that leave every source."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC, NO_GRADIENT, Padding, define
from joestar.ops.sampling.edge_dst import valid_edges


def out_degrees(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    """Edges leaving every source, int64 ``[num_src]``."""
    src, _ = valid_edges(indptr, indices)
    return torch.zeros(num_src, dtype=torch.int64, device=indptr.device).index_add(0, src, torch.ones_like(src))


define(
    f"out_degrees({CSC}, SymInt num_src) -> Tensor", out_degrees,
    fake=lambda indptr, indices, num_src: indptr.new_empty((num_src,)), gradient=NO_GRADIENT, padding=Padding.SAFE,
    cpu="cpu_sampling", cuda="gpu_structure",
)  # fmt: skip
