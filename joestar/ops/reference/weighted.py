"""Weighted and collective sampling by exponential races, and rows of a slice (thesis table 5.3)."""

import torch
from torch import Tensor

from joestar.ops.hashing import absorb, draw, key_state, row_state
from joestar.ops.race import NEVER, race_key
from joestar.ops.reference.sampling import hashed
from joestar.ops.reference.structure import edge_dst, offsets


def _fitted(values: Tensor, size: int) -> Tensor:
    """``values`` cut or filled up with 0 to ``size`` entries; as they are for -1."""
    if size < 0:
        return values
    out = values.new_zeros(size)
    out[: values.numel()] = values[:size]
    return out


def _winners(key: Tensor, row: Tensor, start: Tensor, k: int) -> Tensor:
    """Flags of the ``k`` smallest keys of every row (all that may win for -1), ties by position."""
    if k < 0:
        return key < NEVER
    by_key = torch.argsort(key, stable=True)
    order = by_key[torch.argsort(row[by_key], stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=key.device)
    return (rank - start[row] < k) & (key < NEVER)


def _first_of_rows(key: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Position of the smallest key of every row, the first among equals; the number of keys where none may win."""
    best = key.new_full((num_rows,), NEVER).scatter_reduce(0, row, key, "amin")
    candidate = (key == best[row]) & (key < NEVER)
    position = torch.where(candidate, torch.arange(key.numel(), device=key.device), key.numel())
    return key.new_full((num_rows,), key.numel()).scatter_reduce(0, row, position, "amin")


def weighted_sample(
    indptr: Tensor, weight: Tensor, row_ids: Tensor, row_count: Tensor, sliced: bool, k: int, replace: bool,
    key: Tensor, site: int, num_edges: int, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row by weight: (sub_indptr, positions of the edges int64 ``[num_edges]``, count).

    Row ``i`` is column ``row_ids[i]``, or column ``i`` of a slice; it hashes as node ``row_ids[i]``. Without
    replacement, edges come in ascending order; with, in the order of the picks. Edges of weight 0, negative or NaN are
    never picked. Exponential races: Efraimidis and Spirakis (2006), "Weighted random sampling with a reservoir".

    Args:
        weight: float32 ``[E]``, one per edge of (indptr); k: -1 takes every edge of positive weight.
    """
    num_rows, device = row_ids.numel(), indptr.device
    rows = torch.arange(num_rows, device=device) if sliced else row_ids.to(torch.int64)
    degrees = torch.where(torch.arange(num_rows, device=device) < row_count, indptr[rows + 1] - indptr[rows], 0)
    start, total = offsets(degrees, -1)
    row = edge_dst(start, int(total), start)
    rank = torch.arange(row.numel(), device=device) - start[row]
    position = indptr[rows][row] + rank
    a, b = (lane[row] for lane in row_state(key_state(key, site), hashed(row_ids, node_ids)))
    weight = weight[position]
    if replace and k >= 0:
        draws = [race_key(draw(*absorb(a, b, j), rank), weight) for j in range(k)]
        picks = [_first_of_rows(keys, row, num_rows) for keys in draws]
        picked = torch.stack(picks, 1) if picks else row.new_empty(num_rows, 0)
        won = picked < row.numel()
        picked, picked_degrees = position[picked[won]], won.sum(1)
    else:
        won = _winners(race_key(draw(a, b, rank), weight), row, start, k)
        picked = position[won]
        picked_degrees = torch.zeros_like(degrees).index_add(0, row, won.long())
    sub, count = offsets(picked_degrees, num_edges)
    return sub, _fitted(picked, num_edges), count


def collective_sample(
    sub_indptr: Tensor, sub_indices: Tensor, weight: Tensor | None, num_nodes: int, k: int, key: Tensor, site: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` distinct sources of a slice, together: (node ids ``[k]`` in ascending order, their number).

    Candidates are the sources of valid edges; ``weight`` is float32 ``[num_nodes]``, ``None`` if all are as likely.
    Padding repeats the first node (0 if there is none). gSampler's ``collective_sample``, thesis table 5.3. Nodes race,
    and settle ties, as what they hash as: their entries in ``node_ids`` ``[num_nodes]``, without themselves.
    """
    candidates = torch.unique(sub_indices[: int(sub_indptr[-1])].to(torch.int64))
    if node_ids is not None:
        candidates = candidates[torch.argsort(node_ids[candidates])]
    a, b = row_state(key_state(key, site), hashed(candidates, node_ids))
    keys = race_key(draw(a, b, 0), None if weight is None else weight[candidates])
    everyone = torch.zeros_like(candidates)
    chosen = candidates[_winners(keys, everyone, everyone[:1], k)].sort().values
    nodes = (chosen[:1] if chosen.numel() else chosen.new_zeros(1)).expand(k).clone()
    nodes[: chosen.numel()] = chosen
    return nodes.to(sub_indices.dtype), torch.full((), chosen.numel(), dtype=torch.int64, device=key.device)


def slice_rows(
    sub_indptr: Tensor, sub_indices: Tensor, row_ids: Tensor, srcs: Tensor, src_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges whose source is among ``srcs[:src_count]``: (new_indptr, positions int64 ``[num_edges]``, count).

    ``A[rows, :]`` of a matrix with columns ``row_ids``, which are not read. Positions are ascending.
    """
    wanted = srcs[: int(src_count.clamp(max=srcs.numel()))]
    total = int(sub_indptr[-1])
    kept = torch.isin(sub_indices[:total], wanted)
    row = edge_dst(sub_indptr, total, sub_indptr)
    degrees = torch.zeros_like(sub_indptr[1:]).index_add(0, row, kept.long())
    indptr, count = offsets(degrees, num_edges)
    return indptr, _fitted(torch.nonzero(kept).flatten(), num_edges), count
