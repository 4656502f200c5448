"""``joestar::rowwise_sample``: picks of the rows of a slice."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import CSC, DRAWS, HASHED, NO_GRADIENT, Makes, Padding, define
from joestar.ops.sampling.positions import OffsetsIndicesCount, hashed, sample_positions, take


def rowwise_sample(
    indptr: Tensor, indices: Tensor, row_ids: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> OffsetsIndicesCount:  # fmt: skip
    """Up to ``k`` edges of every row of a sliced matrix; row ``i`` hashes as node ``row_ids[i]``."""
    rows = torch.arange(row_ids.numel(), device=row_ids.device)
    everything = torch.tensor(row_ids.numel(), device=row_ids.device)
    nodes = hashed(row_ids, node_ids)
    sub, positions, count = sample_positions(indptr, rows, nodes, everything, k, replace, key, site, num_edges)
    return sub, take(indices, positions, row_ids), count


def _fake(indptr, indices, row_ids, k, replace, key, site, num_edges, node_ids=None):
    return shapes.edges(indices, row_ids, num_edges)


define(
    f"rowwise_sample({CSC}, Tensor row_ids, {DRAWS}, SymInt num_edges, {HASHED}) -> (Tensor, Tensor, Tensor)",
    rowwise_sample, fake=_fake, gradient=NO_GRADIENT, padding=Padding.SAFE, cpu="cpu_sampling", cuda="gpu_sampling",
    makes=Makes("num_edges", rows="row_ids"), padded_ids="batch",
)  # fmt: skip
