"""Sets of edges made of other sets: the union of hops, a set with one more loop per row, the edges of the first rows.

``joestar::merge_hops``, ``append_loops`` and ``first_rows`` serve models that see a whole sample at once
(``joestar.pyg``). They are made of plain torch operations that need no size on the host.
"""

import torch
from torch import Tensor
from torch.library import register_fake

from joestar.ops.library import LIBRARY
from joestar.ops.reference.structure import edge_dst, offsets


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


def append_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more edge per row, from the row's own node, behind its others; loops that are there stay.

    Args:
        indices: source of each edge ``[E]``; sources and rows are the same ``n`` nodes. dst_count: valid rows, 0-d.

    Returns:
        (offsets, sources ``[E + n]``, position of each edge among the old ones int64 ``[E + n]``, 0 for loops, and
        whether it is one of the new loops, bool ``[E + n]``). Padding behind the last edge is 0 and false.
    """
    n, size = indptr.numel() - 1, indices.numel() + indptr.numel() - 1
    moved = indptr + torch.minimum(torch.arange(n + 1, device=indptr.device), dst_count)
    row = edge_dst(moved, size, indptr)
    position = torch.arange(size, device=indptr.device)
    valid = position < moved[-1]
    if not n:
        return moved, indices.new_zeros(0), indptr.new_zeros(0), valid
    loop = valid & (position == torch.index_select(moved, 0, row + 1) - 1) & (row < dst_count)
    origin = torch.where(valid & ~loop, position - torch.minimum(row, dst_count), 0)
    if indices.numel():
        sources = torch.index_select(indices, 0, origin.clamp(max=indices.numel() - 1))
    else:
        sources = indices.new_zeros(size)
    sources = torch.where(loop, row.to(indices.dtype), torch.where(valid, sources, 0))
    return moved, sources, origin, loop


def first_rows(indptr: Tensor, indices: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The edges of the first ``count`` rows.

    Args:
        indptr: int64 ``[n + 1]``; indices: per edge ``[E]``; rows: anything ``[m, ...]``, ``m <= n`` is the number of
            rows of the result; count: 0-d int64, ``<= m``.

    Returns:
        (offsets ``[m + 1]``, rows from ``count`` on being empty, and the edges ``[E]``, 0 behind the last).
    """
    end = torch.index_select(indptr, 0, count.reshape(1))
    held = torch.arange(indices.shape[0], device=indices.device) < end
    return torch.minimum(indptr[: rows.shape[0] + 1], end), torch.where(held, indices, 0)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` ``[n, ...]``; rows of 0 where ``x`` has none, as an empty set of edges has in front of its loops."""
    if isinstance(x.shape[0], int) and x.shape[0] == 0:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    return torch.index_select(x, 0, index)


def scatter_valid(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool, count: Tensor
) -> Tensor:
    """``x.scatter_reduce(dim, index, source, reduce)`` of the first ``count`` entries of the source along ``dim``."""
    rows = x.shape[dim]
    shape = [-1 if d == dim else 1 for d in range(source.dim())]
    valid = (torch.arange(source.shape[dim], device=x.device) < count).reshape(shape)
    extended = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    index = torch.where(valid, index, rows)
    return extended.scatter_reduce(dim, index, source, reduce, include_self=include_self).narrow(dim, 0, rows)


LIBRARY.define(
    "merge_hops(Tensor[] indptrs, Tensor[] values, Tensor row_ids, Tensor[] starts, SymInt num_edges)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "append_loops(Tensor indptr, Tensor indices, Tensor dst_count) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "first_rows(Tensor indptr, Tensor indices, Tensor rows, Tensor count) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("first_rows", first_rows, "CompositeImplicitAutograd")
LIBRARY.define("rows_at(Tensor x, Tensor index) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    "scatter_valid(Tensor x, int dim, Tensor index, Tensor source, str reduce, bool include_self, Tensor count)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("scatter_valid", scatter_valid, "CompositeImplicitAutograd")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("merge_hops", merge_hops, _device)
    LIBRARY.impl("append_loops", append_loops, _device)
LIBRARY.impl("rows_at", rows_at, "CompositeImplicitAutograd")


@register_fake("joestar::merge_hops")
def _(indptrs, values, row_ids, starts, num_edges):
    if isinstance(num_edges, int) and num_edges < 0:
        num_edges = torch.library.get_ctx().new_dynamic_size()
    made = row_ids.new_empty((row_ids.shape[0] + 1,), dtype=torch.int64)
    return made, values[0].new_empty((num_edges,)), row_ids.new_empty((), dtype=torch.int64)


@register_fake("joestar::append_loops")
def _(indptr, indices, dst_count):
    size = (indices.shape[0] + indptr.shape[0] - 1,)
    edges = indptr.new_empty(size), indices.new_empty(size, dtype=torch.bool)
    return torch.empty_like(indptr), indices.new_empty(size), *edges
