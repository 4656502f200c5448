"""``joestar::sample_cols`` and ``joestar::sample_eids``: picks of in-edges, and their edges' numbers drawn again."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import CSC, DRAWS, DSTS, HASHED, NO_GRADIENT, Makes, Padding, define
from joestar.ops.sampling.positions import OffsetsIndicesCount, hashed, sample_positions, take


def sample_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    num_edges: int, node_ids: Tensor | None = None,
) -> OffsetsIndicesCount:  # fmt: skip
    """Up to ``k`` in-neighbours of every destination: ``A[:, dsts].rowwise_sample(k)`` (thesis table 5.3).

    A node hashes as its entry in ``node_ids`` ``[num_nodes]``, without as itself.
    """
    nodes = hashed(dsts, node_ids)
    sub, positions, count = sample_positions(indptr, dsts, nodes, dst_count, k, replace, key, site, num_edges)
    return sub, take(indices, positions, dsts), count


def sample_eids(
    indptr: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSC positions of the edges that ``sample_cols`` picks, recomputed: int64 ``[num_edges]``, 0 in the padding."""
    nodes = hashed(dsts, node_ids)
    return sample_positions(indptr, dsts, nodes, dst_count, k, replace, key, site, num_edges)[1].clamp(min=0)


def _fake(indptr, indices, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return shapes.edges(indices, dsts, num_edges)


def _eids_fake(indptr, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return dsts.new_empty((shapes.bound(num_edges),), dtype=torch.int64)


define(
    f"sample_cols({CSC}, {DSTS}, {DRAWS}, SymInt num_edges, {HASHED}) -> (Tensor, Tensor, Tensor)", sample_cols,
    fake=_fake, gradient=NO_GRADIENT, padding=Padding.SAFE, cpu="cpu_sampling", cuda="gpu_sampling",
    makes=Makes("num_edges", rows="dsts"), padded_ids="batch",
)  # fmt: skip
define(
    f"sample_eids(Tensor indptr, {DSTS}, {DRAWS}, SymInt num_edges, {HASHED}) -> Tensor", sample_eids, fake=_eids_fake,
    gradient=NO_GRADIENT, padding=Padding.SAFE, cpu="cpu_sampling", cuda="gpu_sampling", padded_ids="graph",
)  # fmt: skip
