"""Sampling on the GPU: the picks of ``joestar.ops.reference``, bit for bit, in two launches.

The first adds up the picked degrees of blocks of rows; in the second every program adds up the sums before its own,
picks its rows' edges in registers, one row per thread, and writes them. Bounds of -1 read the total back in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.compile_ahead import is_compiling, together
from joestar.kernels.gpu_hash import UNROLLED, hashed, key_state, pick_tile, picks, row_state
from joestar.kernels.gpu_launch import (
    block_sums,
    cdiv,
    check_ids,
    check_key,
    check_node_ids,
    check_offsets,
    fill_tail,
    find_row,
    op,
    power_of_two,
    preceding,
    require,
    rows_per_block,
    warps_for,
)

_INTEGERS = ["n", "k", "site", "blocks", "num_edges"]


@triton.jit
def row_extent(indptr, rows, count, i, n, SLICED: tl.constexpr):
    """(first edge, degree, id) of rows ``i``; degree 0 from the count on. Without ``count`` all ``n`` are valid."""
    valid = i < n
    node = tl.load(rows + i, valid, 0).to(tl.int64)
    row = i.to(tl.int64) if SLICED else node
    if count is not None:
        valid = valid & (i < tl.load(count))
    start = tl.load(indptr + row, valid, 0)
    return start, tl.load(indptr + row + 1, valid, 0) - start, node


@triton.jit
def picked_degree(degree, k, REPLACE: tl.constexpr):
    """How many edges a row yields; ``k`` of -1 is all."""
    some = tl.where(degree > 0, k, 0).to(tl.int64) if REPLACE else tl.minimum(degree, k)
    return tl.where(k < 0, degree, some)


@triton.jit(do_not_specialize=_INTEGERS)
def _row_sums(indptr, rows, count, sums, n, k, SLICED: tl.constexpr, REPLACE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    _, degree, _ = row_extent(indptr, rows, count, i, n, SLICED)
    tl.store(sums + block, tl.sum(picked_degree(degree, k, REPLACE), 0))


@triton.jit(do_not_specialize=_INTEGERS)
def _offsets_and_picks(
    indptr, indices, rows, count, key, site, node_ids, sums, blocks, sub_indptr, out, total_out, n, num_edges,
    K: tl.constexpr, REPLACE: tl.constexpr, SLICED: tl.constexpr, WIDE: tl.constexpr,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets of a block of rows, cut at ``num_edges``, and (``K >= 0``) their picks: ids, or positions if ``indices``
    is ``None``; then a share of the padding."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    start, degree, node = row_extent(indptr, rows, count, i, n, SLICED)
    picked = picked_degree(degree, K, REPLACE)
    before, total = preceding(sums, block, blocks, ADDED)
    end = before + tl.cumsum(picked, 0)
    begin = end - picked
    if sub_indptr is not None:
        tl.store(sub_indptr + 1 + i, tl.minimum(end, num_edges), i < n)
        if block == 0:
            tl.store(sub_indptr, tl.zeros((), tl.int64))
            tl.store(total_out, total)
    if K > 0:
        a, b = key_state(key, site)
        a, b = row_state(a, b, hashed(node_ids, node))
        if WIDE == 0:
            slots = picks(a, b, degree, K, REPLACE)
            values = ()
            for j in tl.static_range(K):
                position = start + slots[j]
                if indices is not None:
                    position = tl.load(indices + position, (j < picked) & (begin + j < num_edges), 0)
                values = values + (position,)  # noqa: RUF005
            for j in tl.static_range(K):
                tl.store(out + begin + j, values[j], (j < picked) & (begin + j < num_edges))
        else:
            slots = pick_tile(a[:, None], b[:, None], degree[:, None], K, WIDE, REPLACE)
            j = tl.arange(0, WIDE)[None, :]
            place = begin[:, None] + j
            mask = (j < picked[:, None]) & (place < num_edges)
            value = start[:, None] + slots
            if indices is not None:
                value = tl.load(indices + value, mask, 0)
            tl.store(out + place, value, mask)
    if K >= 0:
        pad = tl.zeros((), tl.int64)
        if indices is not None:
            pad = tl.load(rows).to(tl.int64)
        fill_tail(out, total, num_edges.to(tl.int64), pad, BLOCK)


@triton.jit(do_not_specialize=_INTEGERS)
def _slice_edges(
    indptr, indices, rows, sub_indptr, out, n, num_edges, SLICED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """All edges of every row, edge by edge; the padding is the first row's id."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = e < tl.load(sub_indptr + n)
    row = find_row(sub_indptr, n, tl.where(valid, e, 0), STEPS)
    source = row if SLICED else tl.load(rows + row, valid, 0).to(tl.int64)
    position = tl.load(indptr + source, valid, 0) + e - tl.load(sub_indptr + row, valid, 0)
    if indices is not None:
        position = tl.where(valid, tl.load(indices + position, valid, 0), tl.load(rows))
    tl.store(out + e, tl.where(valid, position, 0) if indices is None else position, e < num_edges)


def _run(indptr, indices, rows, count, sliced, k, replace, key, site, num_edges, id_dtype, node_ids=None):
    """(sub_indptr, ids or positions, count); ``indices`` of ``None`` gives positions."""
    check_offsets(indptr)
    check_node_ids(node_ids, None if sliced else indptr.numel() - 1)
    if k >= 0:
        check_key(key)
    n, device = rows.numel(), rows.device
    if n == 0:
        zeros = [torch.zeros(size, dtype=torch.int64, device=device) for size in (1, max(num_edges, 0), ())]
        return zeros[0], zeros[1].to(id_dtype), zeros[2]
    if device.type == "cuda":
        every = (indptr, indices, rows, count, sliced, k, replace, key, site, num_edges, id_dtype, node_ids)
        have = (indices is None, count is None, node_ids is None)
        together(lambda: _run(*every), "sample", k, replace, sliced, id_dtype, *have, rows_per_block(n))
    replace = replace and k >= 0
    wide = power_of_two(k) if k > UNROLLED else 0
    block = max(1, 2048 // wide) if wide else rows_per_block(n)
    blocks, warps = cdiv(n, block), warps_for(max(block, wide))
    sums = torch.empty(blocks, dtype=torch.int64, device=device)
    _row_sums[(blocks,)](
        indptr, rows, count, sums, n, k, SLICED=sliced, REPLACE=replace, BLOCK=block, num_warps=warps_for(block)
    )
    if num_edges < 0:
        num_edges = n if is_compiling() else int(sums.sum())
    sums, added = block_sums(sums)
    sub_indptr = torch.empty(n + 1, dtype=torch.int64, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    out = torch.empty(num_edges, dtype=id_dtype, device=device)
    _offsets_and_picks[(blocks,)](
        indptr, indices, rows, count, key, site, node_ids, sums, blocks, sub_indptr, out, total, n, num_edges,
        K=max(k, -1), REPLACE=replace, SLICED=sliced, WIDE=wide, ADDED=added, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if k < 0 and num_edges:
        _slice_edges[(cdiv(num_edges, 256),)](
            indptr, indices, rows, sub_indptr, out, n, num_edges, SLICED=sliced, STEPS=n.bit_length(), BLOCK=256
        )
    return sub_indptr, out, total


@op
def sample_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    num_edges: int, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` in-neighbours of every destination (thesis table 5.3): offsets, global ids, count."""
    check_ids(indices, dsts)
    return _run(indptr, indices, dsts, dst_count, False, k, replace, key, site, num_edges, dsts.dtype, node_ids)


@op
def slice_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All in-edges of every destination: (sub_indptr int64 ``[num_dst + 1]``, global ids ``[num_edges]``, count)."""
    check_ids(indices, dsts)
    return _run(indptr, indices, dsts, dst_count, False, -1, False, None, 0, num_edges, dsts.dtype)


@op
def rowwise_sample(
    indptr: Tensor, indices: Tensor, row_ids: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row of a sliced matrix; row ``i`` hashes as node ``row_ids[i]``."""
    check_ids(indices, row_ids)
    require(indptr.numel() == row_ids.numel() + 1, "one row id per row", f"{row_ids.numel()} ids")
    return _run(indptr, indices, row_ids, None, True, k, replace, key, site, num_edges, row_ids.dtype, node_ids)


@op
def sample_eids(
    indptr: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSC positions of the edges that ``sample_cols`` picks, recomputed: int64 ``[num_edges]``, 0 in the padding."""
    return _run(indptr, None, dsts, dst_count, False, k, replace, key, site, num_edges, torch.int64, node_ids)[1]
