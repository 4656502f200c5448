"""``joestar::merge_hops``: the union of hops, for models that see a whole sample at once (``joestar.pyg``).

Made of plain torch operations that need no size on the host.
"""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import Makes, define_structural
from joestar.ops.sampling.edge_dst import offsets


def merge_hops(
    indptrs: list[Tensor], values: list[Tensor], row_ids: Tensor, starts: list[Tensor], num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of several hops as one set over the rows ``row_ids``: every row has the edges of the hop it is new in.

    Args:
        indptrs: int64 ``[n_k + 1]`` of each hop, from the seeds outwards; its rows are the first ``n_k``.
        values: what each hop has per edge (sources, positions in the graph), integers ``[e_k]``.
        row_ids: what the rows stand for, ``[n]``, of the outermost set.
        starts: 0-d int64, the first row of each hop that no earlier hop has.
        num_edges: bound of the result, -1 for exactly what is needed.

    Returns:
        (offsets ``[n + 1]``, values in row order ``[num_edges]``, 0 behind the last, and their true number).
    """
    rows = torch.arange(row_ids.numel(), device=row_ids.device)
    degrees = torch.zeros_like(rows)
    firsts, totals = [], []
    for indptr, start in zip(indptrs, starts, strict=True):
        own = indptr[1:] - indptr[:-1]
        within = rows[: own.numel()] >= start
        degrees[: own.numel()] += torch.where(within, own, 0)
        firsts.append(torch.index_select(indptr, 0, start.reshape(1)).squeeze(0))
        totals.append(indptr[-1])
    indptr, count = offsets(degrees, num_edges)
    size = int(count) if num_edges < 0 else num_edges
    position = torch.arange(size, device=row_ids.device)
    merged = values[0].new_zeros(size)
    begin = torch.zeros_like(count)
    for held, first, total in zip(values, firsts, totals, strict=True):
        end = begin + total - first
        if held.numel():
            picked = torch.index_select(held, 0, (position - begin + first).clamp(0, held.numel() - 1))
            merged = torch.where((position >= begin) & (position < end), picked, merged)
        begin = end
    return indptr, merged, count


def _fake(indptrs, values, row_ids, starts, num_edges):
    made = row_ids.new_empty((row_ids.shape[0] + 1,), dtype=torch.int64)
    return made, values[0].new_empty((shapes.bound(num_edges),)), shapes.count(row_ids)


define_structural(
    "merge_hops(Tensor[] indptrs, Tensor[] values, Tensor row_ids, Tensor[] starts, SymInt num_edges)"
    " -> (Tensor, Tensor, Tensor)", merge_hops, fake=_fake, makes=Makes("num_edges", rows="row_ids"),
    padded_ids="batch",
)  # fmt: skip
