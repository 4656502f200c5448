"""Picks of rows as positions in a structure: what sampling ops share."""

import torch
from torch import Tensor

from joestar.ops.hashing import bounded, draw, key_state, row_state
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


def sample_positions(
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


def take(indices: Tensor, positions: Tensor, pad: Tensor) -> Tensor:
    """``indices`` at the positions; where a position is -1, the first id of ``pad``."""
    if not positions.numel():
        return indices.new_empty(0)
    fill = pad[:1].to(indices.dtype) if pad.numel() else indices.new_zeros(1)
    if not indices.numel():
        return fill.expand(positions.numel()).clone()
    return torch.where(positions >= 0, indices[positions.clamp(min=0)], fill)
