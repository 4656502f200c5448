"""Rows of edges, degrees and self-loops on the GPU, bit for bit the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import (
    block_sums,
    cdiv,
    check_ids,
    check_offsets,
    fill_tail,
    find_row,
    op,
    preceding,
    rows_per_block,
    warps_for,
)
from joestar.kernels.gpu_spmm import AHEAD, row_edges


@triton.jit(do_not_specialize=["n", "num_edges"])
def _edge_dst(indptr, out, n, num_edges, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = e < tl.load(indptr + n)
    row = find_row(indptr, n, tl.where(valid, e, 0), STEPS)
    tl.store(out + e, tl.where(valid, row, 0), e < num_edges)


@op
def edge_dst(indptr: Tensor, num_edges: int, like: Tensor) -> Tensor:
    """Row of each edge ``[num_edges]`` in the dtype of ``like``; 0 past the last valid edge."""
    check_offsets(indptr)
    out = torch.empty(num_edges, dtype=like.dtype, device=indptr.device)
    n = indptr.numel() - 1
    if n == 0:
        return out.zero_()
    if num_edges:
        _edge_dst[(cdiv(num_edges, 256),)](indptr, out, n, num_edges, STEPS=n.bit_length(), BLOCK=256)
    return out


@triton.jit
def _out_degrees(indptr, indices, out, n, num_edges, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = (e < num_edges) & (e < tl.load(indptr + n))
    source = tl.load(indices + e, valid, 0).to(tl.int64)
    tl.atomic_add(out + source, tl.full([BLOCK], 1, tl.int64), valid, sem="relaxed")


@op
def out_degrees(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    """Edges leaving every source, int64 ``[num_src]``, over the valid edges."""
    check_offsets(indptr)
    check_ids(indices)
    out = torch.zeros(num_src, dtype=torch.int64, device=indices.device)
    if indices.numel() and num_src:
        _out_degrees[(cdiv(indices.numel(), 256),)](
            indptr, indices, out, indptr.numel() - 1, indices.numel(), BLOCK=256
        )
    return out


@triton.jit
def _is_loop(names, own, e, i, row, mask):
    """Whether edges lead from a node to itself: by global ids where there are any, else by local ones."""
    if own is None:
        return tl.load(names + e, mask, 0) == i
    else:
        return tl.load(names + e, mask, 0) == row


@triton.jit(do_not_specialize=["n"])
def _looped_degrees(
    indptr, names, own, count, degrees, sums, out_degrees, n, num_src,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Degrees without the existing self-loops and with the new one, and their sum per block; zeros the out-degrees."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    start, end = row_edges(indptr, None, None, i, n)
    row = i
    if own is not None:
        row = tl.load(own + i, i < n, 0)
    degree = ((i < n) & (i < tl.load(count))).to(tl.int64)
    longest = tl.max(end - start, 0)
    done = tl.zeros((), tl.int64)
    while done < longest:
        for j in tl.static_range(AHEAD):
            e = start + done + j
            degree += ((e < end) & ~_is_loop(names, own, e, i, row, e < end)).to(tl.int64)
        done += AHEAD
    tl.store(degrees + i, degree, i < n)
    tl.store(sums + block, tl.sum(degree, 0))
    if out_degrees is not None:
        first = block.to(tl.int64) * BLOCK
        while first < num_src:
            at = first + tl.arange(0, BLOCK)
            tl.store(out_degrees + at, tl.zeros([BLOCK], tl.int64), at < num_src)
            first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit(do_not_specialize=["n", "size", "blocks"])
def _write_looped(
    indptr, indices, names, own, count, degrees, sums, blocks, out_indptr, out, out_degrees, n, size,
    AHEAD: tl.constexpr, ADDED: tl.constexpr, GLOBAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Edges without the existing self-loops, and the new ones, by local numbers or (``GLOBAL``) ids."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    start, end = row_edges(indptr, None, None, i, n)
    row = i
    if own is not None:
        row = tl.load(own + i, i < n, 0)
    degree = tl.load(degrees + i, i < n, 0)
    before, total = preceding(sums, block, blocks, ADDED)
    new_end = before + tl.cumsum(degree, 0)
    tl.store(out_indptr + 1 + i, new_end, i < n)
    if block == 0:
        tl.store(out_indptr, tl.zeros((), tl.int64))
    place = new_end - degree
    longest = tl.max(end - start, 0)
    one = tl.full([BLOCK], 1, tl.int64)
    done = tl.zeros((), tl.int64)
    while done < longest:
        for j in tl.static_range(AHEAD):
            e = start + done + j
            source = tl.load(indices + e, e < end, 0)
            kept = (e < end) & ~_is_loop(names, own, e, i, row, e < end)
            tl.store(out + place, source, kept)
            if out_degrees is not None:
                tl.atomic_add(out_degrees + source.to(tl.int64), one, kept, sem="relaxed")
            place += kept.to(tl.int64)
        done += AHEAD
    real = (i < n) & (i < tl.load(count))
    tl.store(out + new_end - 1, row if GLOBAL else i, real)
    if out_degrees is not None:
        tl.atomic_add(out_degrees + i, one, real, sem="relaxed")
    fill_tail(out, total, size.to(tl.int64), 0, BLOCK)


def _add_loops(indptr, indices, names, own, dst_count, out_degrees, by_id=False) -> tuple[Tensor, Tensor]:
    n, device = indptr.numel() - 1, indices.device
    size = indices.numel() + n
    if n == 0:
        return indptr.clone(), torch.zeros(size, dtype=indices.dtype, device=device)
    block = rows_per_block(n)
    blocks, warps = cdiv(n, block), warps_for(block)
    degrees = torch.empty(n, dtype=torch.int64, device=device)
    sums = torch.empty(blocks, dtype=torch.int64, device=device)
    new_indptr = torch.empty_like(indptr)
    out = torch.empty(size, dtype=indices.dtype, device=device)
    num_src = 0 if out_degrees is None else out_degrees.numel()
    _looped_degrees[(blocks,)](
        indptr, names, own, dst_count, degrees, sums, out_degrees, n, num_src,
        AHEAD=AHEAD, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    sums, added = block_sums(sums)
    _write_looped[(blocks,)](
        indptr, indices, names, own, dst_count, degrees, sums, blocks, new_indptr, out, out_degrees, n, size,
        AHEAD=AHEAD, ADDED=added, GLOBAL=by_id, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return new_indptr, out


@op
def add_self_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly one self-loop per destination, at the end of its row; existing loops are dropped. ``[E + num_dst]``.

    Rows past ``dst_count`` are padding and stay empty.
    """
    check_offsets(indptr)
    check_ids(indices)
    return _add_loops(indptr, indices, indices, None, dst_count, None)


@op
def block_self_loops(
    indptr: Tensor, indices: Tensor, sources: Tensor, dsts: Tensor, dst_count: Tensor, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_self_loops`` of a block, whose loops are found by global ids; also the out-degrees, int64 ``[num_src]``."""
    check_offsets(indptr)
    check_ids(indices, sources)
    check_ids(dsts)
    out_degrees = torch.empty(num_src, dtype=torch.int64, device=indices.device)
    if indptr.numel() == 1:
        out_degrees.zero_()
    counted = out_degrees if num_src else None
    return *_add_loops(indptr, indices, sources, dsts, dst_count, counted), out_degrees


@op
def sampled_self_loops(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """``add_self_loops`` of a sample whose edges and destinations are global ids: so are the loops."""
    check_offsets(indptr)
    check_ids(indices, dsts)
    return _add_loops(indptr, indices, indices, dsts, dst_count, None, True)
