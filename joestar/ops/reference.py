"""Plain PyTorch implementations of every op: the ground truth of the tests, and what runs on devices without a kernel.

Conventions (see ``docs/architecture.md``): a ragged set has a bound (the size of its tensor) and a count (the true
number); valid entries are a prefix; rows past the count have degree 0. ``num_edges`` or ``num_src`` of -1 asks for
exactly the size that is needed. The count an op returns is the true demand and may exceed the bound (an overflow).
"""

import torch
from torch import Tensor

from joestar.ops.hashing import bounded, draw, key_state, row_state

OffsetsIndicesCount = tuple[Tensor, Tensor, Tensor]


# --- sampling -------------------------------------------------------------------------------------------------------


def _offsets(degrees: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64, device=degrees.device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    count = indptr[-1].clone()
    return (indptr if capacity < 0 else indptr.clamp(max=capacity)), count


def _size(indptr: Tensor, capacity: int) -> int:
    return int(indptr[-1]) if capacity < 0 else capacity


def edge_dst(indptr: Tensor, num_edges: int, like: Tensor) -> Tensor:
    """Row of each edge ``[num_edges]`` in the dtype of ``like``; 0 past the last valid edge."""
    position = torch.arange(num_edges, device=indptr.device)
    row = torch.searchsorted(indptr, position, right=True) - 1
    return torch.where(position < indptr[-1], row, 0).to(like.dtype)


def _degrees_of(indptr: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    rows = rows.to(torch.int64)
    degrees = indptr[rows + 1] - indptr[rows]
    return torch.where(torch.arange(rows.numel(), device=rows.device) < count, degrees, 0)


def _picked_degrees(degrees: Tensor, k: int, replace: bool) -> Tensor:
    if k < 0:
        return degrees
    return torch.where(degrees > 0, k, 0) if replace else degrees.clamp(max=k)


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
    sub, needed = _offsets(_picked_degrees(degrees, k, replace), size)
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
    num_edges: int,
) -> OffsetsIndicesCount:  # fmt: skip
    """Up to ``k`` in-neighbours of every destination: ``A[:, dsts].rowwise_sample(k)`` (thesis table 5.3)."""
    sub, positions, count = _sample_positions(indptr, dsts, dsts, dst_count, k, replace, key, site, num_edges)
    return sub, _take(indices, positions, dsts), count


def sample_eids(
    indptr: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int
) -> Tensor:
    """CSC positions of the edges that ``sample_cols`` picks, recomputed: int64 ``[num_edges]``, 0 in the padding."""
    return _sample_positions(indptr, dsts, dsts, dst_count, k, replace, key, site, num_edges)[1].clamp(min=0)


def slice_cols(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, num_edges: int) -> OffsetsIndicesCount:
    """All in-edges of every destination, ``A[:, dsts]``; sources keep their global ids."""
    key = torch.zeros(3, dtype=torch.int64, device=indptr.device)
    return sample_cols(indptr, indices, dsts, dst_count, -1, False, key, 0, num_edges)


def rowwise_sample(
    indptr: Tensor, indices: Tensor, row_ids: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int
) -> OffsetsIndicesCount:
    """Up to ``k`` edges of every row of a sliced matrix; row ``i`` hashes as node ``row_ids[i]``."""
    rows = torch.arange(row_ids.numel(), device=row_ids.device)
    everything = torch.tensor(row_ids.numel(), device=row_ids.device)
    sub, positions, count = _sample_positions(indptr, rows, row_ids, everything, k, replace, key, site, num_edges)
    return sub, _take(indices, positions, row_ids), count


def compact(
    dsts: Tensor, dst_count: Tensor, sub_indptr: Tensor, sub_indices: Tensor, num_nodes: int, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Local ids for the sources of a sampled set: (srcs, local indices, count), destinations first."""
    edges = int(sub_indptr[-1])
    seen = torch.cat([dsts[: int(dst_count.clamp(max=dsts.numel()))], sub_indices[:edges]])
    num_dst = seen.numel() - edges
    order = torch.arange(seen.numel(), device=seen.device)
    first = torch.full((num_nodes,), seen.numel(), dtype=torch.int64, device=seen.device)
    first.scatter_reduce_(0, seen.to(torch.int64), order, "amin")
    keep = (first[seen.to(torch.int64)] == order) | (order < num_dst)
    position = torch.cumsum(keep, 0) - 1
    count = keep.sum()
    kept = seen[keep]
    local = position[first[sub_indices[:edges].to(torch.int64)]].to(sub_indices.dtype)
    size = kept.numel() if num_src < 0 else num_src
    srcs = (kept[:1] if kept.numel() else sub_indices.new_zeros(1)).expand(size).clone()
    srcs[: kept.numel()] = kept[:size]
    full = sub_indices.new_zeros(sub_indices.numel())
    full[:edges] = torch.where(local < size, local, 0)
    return srcs, full, count


# --- computation ----------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _like(values: Tensor, target: Tensor) -> Tensor:
    """Appends dimensions to ``values`` until it broadcasts over ``target``."""
    return values.reshape(values.shape + (1,) * (target.dim() - values.dim()))


def _edges(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(sources, destinations) of the valid edges, int64."""
    count = int(indptr[-1])
    src = indices[:count].to(torch.int64)
    return src, edge_dst(indptr, count, src)


def _messages(x: Tensor, weight: Tensor | None, src: Tensor) -> Tensor:
    message = _wide(x)[src]
    return message if weight is None else message * _like(_wide(weight)[: src.numel()], message)


def _per_weight(product: Tensor, weight: Tensor) -> Tensor:
    """``product`` ``[E, ...]`` summed over the dimensions that a weight ``[E]`` or ``[E, H]`` spans."""
    spanned = list(range(weight.dim(), product.dim()))
    return product.sum(spanned) if spanned else product


def _per_degree(grad: Tensor, indptr: Tensor, reduce: str) -> Tensor:
    if reduce != "mean":
        return grad
    return grad / _like((indptr[1:] - indptr[:-1]).clamp(min=1).to(grad.dtype), grad)


def spmm(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e of d of weight[e] * x[indices[e]]``; an empty row gives 0."""
    src, dst = _edges(indptr, indices)
    message = _messages(x, weight, src)
    out = message.new_zeros((indptr.numel() - 1, *message.shape[1:]))
    if reduce in ("sum", "mean"):
        out = _per_degree(out.index_add(0, dst, message), indptr, reduce)
    else:
        how = {"max": "amax", "min": "amin"}[reduce]
        out = out.scatter_reduce(0, _like(dst, message).expand_as(message), message, how, include_self=False)
    return out.to(x.dtype)


def spmm_grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for ``x``: the transposed product, summed per source in edge order."""
    src, dst = _edges(indptr, indices)
    message = _messages(_per_degree(_wide(grad), indptr, reduce), weight, dst)
    out = message.new_zeros((num_src, *message.shape[1:]))
    return out.index_add(0, src, message).to(grad.dtype)


def spmm_grad_weight(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, weight_like: Tensor, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for the edge weights, in the shape of ``weight_like``."""
    src, dst = _edges(indptr, indices)
    product = _wide(x)[src] * _per_degree(_wide(grad), indptr, reduce)[dst]
    out = product.new_zeros(weight_like.shape)
    out[: src.numel()] = _per_weight(product, weight_like)
    return out.to(weight_like.dtype)


def spmm_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm`` (max or min), shared evenly among ties."""
    src, dst = _edges(indptr, indices)
    message = _messages(x, weight, src).to(y.dtype)
    chosen = (message == y[dst]).to(_wide(grad).dtype)
    ties = torch.zeros_like(_wide(y)).index_add(0, dst, chosen).clamp(min=1)
    share = chosen * (_wide(grad) / ties)[dst]
    through = share if weight is None else share * _like(_wide(weight)[: src.numel()], share)
    grad_x = torch.zeros_like(_wide(x)).index_add(0, src, through).to(x.dtype)
    if weight is None:
        return grad_x, None
    grad_weight = share.new_zeros(weight.shape)
    grad_weight[: src.numel()] = _per_weight(share * _wide(x)[src], weight)
    return grad_x, grad_weight.to(weight.dtype)


def sddmm(indptr: Tensor, indices: Tensor, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
    """Edge values of ``lhs`` (sources) and ``rhs`` (destinations): add, sub, mul, div, dot, copy_lhs, copy_rhs."""
    src, dst = _edges(indptr, indices)
    left = None if lhs is None else lhs[src]
    right = None if rhs is None else rhs[dst]
    if op == "dot":
        value = (_wide(left) * _wide(right)).sum(-1).to(torch.promote_types(left.dtype, right.dtype))
    elif op in ("copy_lhs", "copy_rhs"):
        value = left if op == "copy_lhs" else right
    else:
        value = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](left, right)
    out = value.new_zeros((indices.numel(), *value.shape[1:]))
    out[: src.numel()] = value
    return out


def scatter_src(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """Sum of edge values per source ``[num_src, ...]``, in edge order."""
    src, _ = _edges(indptr, indices)
    value = _wide(e)[: src.numel()]
    return value.new_zeros((num_src, *value.shape[1:])).index_add(0, src, value).to(e.dtype)


def scatter_dst(indptr: Tensor, e: Tensor) -> Tensor:
    """Sum of edge values per destination ``[num_dst, ...]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = _wide(e)[: dst.numel()]
    return value.new_zeros((indptr.numel() - 1, *value.shape[1:])).index_add(0, dst, value).to(e.dtype)


def edge_softmax(indptr: Tensor, s: Tensor) -> Tensor:
    """Softmax of edge values over the in-edges of each destination, ``[E]`` or ``[E, H]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = _wide(s)[: dst.numel()]
    rows = (indptr.numel() - 1, *value.shape[1:])
    index = _like(dst, value).expand_as(value)
    top = value.new_full(rows, -torch.inf).scatter_reduce(0, index, value, "amax")
    power = torch.exp(value - top[dst])
    total = value.new_zeros(rows).index_add(0, dst, power)
    out = value.new_zeros(s.shape)
    out[: dst.numel()] = power / total[dst]
    return out.to(s.dtype)


def edge_softmax_grad(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``edge_softmax``: ``out * (grad - sum over the row of out * grad)``."""
    product = _wide(out) * _wide(grad)
    dst = edge_dst(indptr, out.shape[0], indptr)
    result = product - _wide(out) * scatter_dst(indptr, product)[dst]
    valid = torch.arange(out.shape[0], device=out.device) < indptr[-1]
    return torch.where(_like(valid, result), result, 0).to(out.dtype).contiguous()


# --- structure ------------------------------------------------------------------------------------------------------


def add_self_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly one self-loop per destination, at the end of its row; existing loops are dropped. ``[E + num_dst]``.

    Rows past ``dst_count`` are padding and stay empty.
    """
    num_dst = indptr.numel() - 1
    src, dst = _edges(indptr, indices)
    keep = src != dst
    degrees = torch.zeros(num_dst, dtype=torch.int64, device=indptr.device).index_add(0, dst, keep.long())
    real = torch.arange(num_dst, device=indptr.device) < dst_count
    degrees = degrees + real
    new_indptr, _ = _offsets(degrees, -1)
    before = torch.cumsum(keep, 0) - 1 + dst
    out = indices.new_zeros(indices.numel() + num_dst)
    out[before[keep]] = src[keep].to(indices.dtype)
    loops = torch.nonzero(real).flatten()
    out[new_indptr[1:][loops] - 1] = loops.to(indices.dtype)
    return new_indptr, out


def out_degrees(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    """Edges leaving every source, int64 ``[num_src]``."""
    src, _ = _edges(indptr, indices)
    return torch.zeros(num_src, dtype=torch.int64, device=indptr.device).index_add(0, src, torch.ones_like(src))


# --- fused ----------------------------------------------------------------------------------------------------------


def sample_aggregate(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    x: Tensor, reduce: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``spmm`` over ``sample_cols`` straight from the full table ``x`` ``[N, D]``: (y ``[num_dst, D]``, edge count)."""
    sub, picked, count = sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, -1)
    return spmm(sub, picked, x, None, reduce), count
