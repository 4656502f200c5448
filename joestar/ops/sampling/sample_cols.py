"""Picks of in-edges: of nodes (``joestar::sample_cols``), of rows of a slice (``joestar::rowwise_sample``).

``joestar::slice_cols`` makes the slice. ``joestar::sample_eids`` draws the numbers of the edges again.
"""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.hashing import bounded, draw, key_state, row_state
from joestar.ops.registry import CSC, DRAWS, DSTS, HASHED, Makes, define_structural
from joestar.ops.sampling.edge_dst import edge_dst, offsets

OffsetsIndicesCount = tuple[Tensor, Tensor, Tensor]


def _size(indptr: Tensor, capacity: int) -> int:
    return int(indptr[-1]) if capacity < 0 else capacity


def _degrees_of(indptr: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    rows = rows.to(torch.int64)
    degrees = indptr[rows + 1] - indptr[rows]
    return torch.where(torch.arange(rows.numel(), device=rows.device) < count, degrees, 0)


def _picked_degrees(degrees: Tensor, k: int, replace: bool) -> Tensor:
    if k < 0:
        return degrees
    return torch.where(degrees > 0, k, 0) if replace else degrees.clamp(max=k)


def hashed(nodes: Tensor, node_ids: Tensor | None) -> Tensor:
    """What nodes hash as: themselves, or their entries in ``node_ids`` ``[num_nodes]``."""
    return nodes if node_ids is None else node_ids[nodes.to(torch.int64)]


def _picks(degrees: Tensor, nodes: Tensor, k: int, replace: bool, key: Tensor, site: int) -> Tensor:
    """Positions within each row, ``[n, k]``; only the first ``_picked_degrees`` of a row are meaningful."""
    a, b = row_state(key_state(key, site), nodes)
    slots = torch.arange(k, device=nodes.device).expand(nodes.numel(), k).clone()
    for j in range(k):
        word = draw(a, b, j)
        if replace:
            slots[:, j] = bounded(word, degrees)
            continue
        top = degrees - k + j
        pick = bounded(word, (top + 1).clamp(min=1))
        repeated = (slots[:, :j] == pick[:, None]).any(1)
        slots[:, j] = torch.where(degrees > k, torch.where(repeated, top, pick), j)
    return slots


def _sample_positions(
    indptr: Tensor, rows: Tensor, nodes: Tensor, count: Tensor, k: int, replace: bool, key: Tensor, site: int, size: int
) -> OffsetsIndicesCount:
    """CSC positions of the picks of every row: (sub_indptr, positions, count)."""
    degrees = _degrees_of(indptr, rows, count)
    sub, needed = offsets(_picked_degrees(degrees, k, replace), size)
    num_edges = _size(sub, size)
    row = edge_dst(sub, num_edges, sub)
    slot = torch.arange(num_edges, device=sub.device) - sub[row]
    if k >= 0 and num_edges and rows.numel():
        slot = _picks(degrees, nodes, k, replace, key, site)[row, slot.clamp(0, max(k - 1, 0))] if k else slot
    valid = torch.arange(num_edges, device=sub.device) < sub[-1]
    start = indptr[rows.to(torch.int64)][row] if rows.numel() else row
    return sub, torch.where(valid, start + slot, -1), needed


def _take(indices: Tensor, positions: Tensor, pad: Tensor) -> Tensor:
    """``indices`` at the positions; where a position is -1, the first id of ``pad``."""
    if not positions.numel():
        return indices.new_empty(0)
    fill = pad[:1].to(indices.dtype) if pad.numel() else indices.new_zeros(1)
    if not indices.numel():
        return fill.expand(positions.numel()).clone()
    return torch.where(positions >= 0, indices[positions.clamp(min=0)], fill)


def sample_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    num_edges: int, node_ids: Tensor | None = None,
) -> OffsetsIndicesCount:  # fmt: skip
    """Up to ``k`` in-neighbours of every destination: ``A[:, dsts].rowwise_sample(k)`` (thesis table 5.3).

    A node hashes as its entry in ``node_ids`` ``[num_nodes]``, without as itself.
    """
    nodes = hashed(dsts, node_ids)
    sub, positions, count = _sample_positions(indptr, dsts, nodes, dst_count, k, replace, key, site, num_edges)
    return sub, _take(indices, positions, dsts), count


def sample_eids(
    indptr: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSC positions of the edges that ``sample_cols`` picks, recomputed: int64 ``[num_edges]``, 0 in the padding."""
    nodes = hashed(dsts, node_ids)
    return _sample_positions(indptr, dsts, nodes, dst_count, k, replace, key, site, num_edges)[1].clamp(min=0)


def _fake(indptr, indices, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return shapes.edges(indices, dsts, num_edges)


def _eids_fake(indptr, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return dsts.new_empty((shapes.bound(num_edges),), dtype=torch.int64)


def slice_cols(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, num_edges: int) -> OffsetsIndicesCount:
    """All in-edges of every destination, ``A[:, dsts]``; sources keep their global ids."""
    key = torch.zeros(3, dtype=torch.int64, device=indptr.device)
    return sample_cols(indptr, indices, dsts, dst_count, -1, False, key, 0, num_edges)


def rowwise_sample(
    indptr: Tensor, indices: Tensor, row_ids: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> OffsetsIndicesCount:  # fmt: skip
    """Up to ``k`` edges of every row of a sliced matrix; row ``i`` hashes as node ``row_ids[i]``."""
    rows = torch.arange(row_ids.numel(), device=row_ids.device)
    everything = torch.tensor(row_ids.numel(), device=row_ids.device)
    nodes = hashed(row_ids, node_ids)
    sub, positions, count = _sample_positions(indptr, rows, nodes, everything, k, replace, key, site, num_edges)
    return sub, _take(indices, positions, row_ids), count


def _rowwise_fake(indptr, indices, row_ids, k, replace, key, site, num_edges, node_ids=None):
    return shapes.edges(indices, row_ids, num_edges)


define_structural(
    f"sample_cols({CSC}, {DSTS}, {DRAWS}, SymInt num_edges, {HASHED}) -> (Tensor, Tensor, Tensor)", sample_cols,
    fake=_fake, cpu="cpu_sampling", cuda="gpu_sampling", makes=Makes("num_edges", rows="dsts"), padded_ids="batch",
)  # fmt: skip
define_structural(
    f"sample_eids(Tensor indptr, {DSTS}, {DRAWS}, SymInt num_edges, {HASHED}) -> Tensor", sample_eids, fake=_eids_fake,
    cpu="cpu_sampling", cuda="gpu_sampling", padded_ids="graph",
)  # fmt: skip
define_structural(
    f"slice_cols({CSC}, {DSTS}, SymInt num_edges) -> (Tensor, Tensor, Tensor)", slice_cols,
    fake=lambda indptr, indices, dsts, dst_count, num_edges: shapes.edges(indices, dsts, num_edges), cpu="cpu_sampling",
    cuda="gpu_sampling", makes=Makes("num_edges", rows="dsts"), padded_ids="batch",
)  # fmt: skip
define_structural(
    f"rowwise_sample({CSC}, Tensor row_ids, {DRAWS}, SymInt num_edges, {HASHED}) -> (Tensor, Tensor, Tensor)",
    rowwise_sample, fake=_rowwise_fake, cpu="cpu_sampling", cuda="gpu_sampling",
    makes=Makes("num_edges", rows="row_ids"), padded_ids="batch",
)  # fmt: skip
