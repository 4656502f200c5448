"""``joestar::weighted_sample``: picks of edges by weight, as winners of exponential races (thesis table 5.3)."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.hashing import absorb, draw, key_state, row_state
from joestar.ops.race import NEVER, race_key
from joestar.ops.registry import DRAWS, HASHED, Makes, define_structural
from joestar.ops.sampling.edge_dst import edge_dst, offsets
from joestar.ops.sampling.sample_cols import hashed


def fitted(values: Tensor, size: int) -> Tensor:
    """``values`` cut or filled up with 0 to ``size`` entries; as they are for -1."""
    if size < 0:
        return values
    out = values.new_zeros(size)
    out[: values.numel()] = values[:size]
    return out


def winners(key: Tensor, row: Tensor, start: Tensor, k: int) -> Tensor:
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
    key: Tensor, site: int, num_edges: int, node_ids: Tensor | None = None, ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row by weight: (sub_indptr, positions of the edges int64 ``[num_edges]``, count).

    Row ``i`` is column ``row_ids[i]``, or column ``i`` of a slice; it hashes as node ``row_ids[i]``. Without
    replacement, edges come in ascending order; with, in the order of the picks. Edges of weight 0, negative or NaN are
    never picked. Exponential races: Efraimidis and Spirakis (2006), "Weighted random sampling with a reservoir".

    Args:
        weight: float32 ``[E]``, one per edge of (indptr); k: -1 takes every edge of positive weight.
        ranks: int32 ``[E]``, what every edge draws by; ``None`` for its position in its row. A part of a row whose
            ranks are positions in the whole one has the whole one's picks, if it holds them.
    """
    num_rows, device = row_ids.numel(), indptr.device
    rows = torch.arange(num_rows, device=device) if sliced else row_ids.to(torch.int64)
    degrees = torch.where(torch.arange(num_rows, device=device) < row_count, indptr[rows + 1] - indptr[rows], 0)
    start, total = offsets(degrees, -1)
    row = edge_dst(start, int(total), start)
    rank = torch.arange(row.numel(), device=device) - start[row]
    position = indptr[rows][row] + rank
    a, b = (lane[row] for lane in row_state(key_state(key, site), hashed(row_ids, node_ids)))
    weight, drawn = weight[position], rank if ranks is None else ranks[position].to(rank.dtype)
    if replace and k >= 0:
        draws = [race_key(draw(*absorb(a, b, j), drawn), weight) for j in range(k)]
        picks = [_first_of_rows(keys, row, num_rows) for keys in draws]
        picked = torch.stack(picks, 1) if picks else row.new_empty(num_rows, 0)
        won = picked < row.numel()
        picked, picked_degrees = position[picked[won]], won.sum(1)
    else:
        won = winners(race_key(draw(a, b, drawn), weight), row, start, k)
        picked = position[won]
        picked_degrees = torch.zeros_like(degrees).index_add(0, row, won.long())
    sub, count = offsets(picked_degrees, num_edges)
    return sub, fitted(picked, num_edges), count


def _fake(indptr, weight, row_ids, row_count, sliced, k, replace, key, site, num_edges, node_ids=None, ranks=None):
    sub_indptr = indptr.new_empty((row_ids.shape[0] + 1,))
    return sub_indptr, indptr.new_empty((shapes.bound(num_edges),)), shapes.count(indptr)


define_structural(
    "weighted_sample(Tensor indptr, Tensor weight, Tensor row_ids, Tensor row_count, bool sliced, "
    f"{DRAWS}, SymInt num_edges, {HASHED}, Tensor? ranks=None) -> (Tensor, Tensor, Tensor)",
    weighted_sample, fake=_fake,
    cpu="cpu_weighted", cuda="gpu_weighted", makes=Makes("num_edges", rows="row_ids"), padded_ids="graph",
)  # fmt: skip
