"""Deduplication and relabelling on the GPU without synchronisation, in four launches (FastGL 4.3 asks for two).

Every node has an entry in a table of claims that is never cleared: an entry is ``stamp << 32 | position``, claimed by
an atomic minimum, and the stamp, kept on the device, falls by one per call, so that older claims always lose. The
smallest position wins: the result has the bits of ``joestar.ops.reference.compact``, whatever the order of the threads.

The table is allocated by the first call for a device and a number of nodes, which must not be inside a CUDA graph
capture; calls that share a table must be ordered (one stream, or events).
"""

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
    op,
    power_of_two,
    preceding,
    require,
)

_INTEGERS = ["n", "size", "blocks", "num_edges", "num_src"]
_FIRST_STAMP = 2**30
_CLAIMS: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def claims(device: torch.device, num_nodes: int) -> tuple[Tensor, Tensor]:
    """(table int64 ``[num_nodes]``, stamp int64 ``[1]``) of a device; the stamp allows 2**30 calls."""
    found = _CLAIMS.get((device, num_nodes))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"GPU compact: expected the table of claims for {num_nodes} nodes to exist before a CUDA graph is"
                " captured, and it does not; run the step once without capture first"
            )
        table = torch.full((num_nodes,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=device)
        found = table, torch.full((1,), _FIRST_STAMP, dtype=torch.int64, device=device)
        _CLAIMS[device, num_nodes] = found
    return found


def release_claims() -> None:
    """Frees every table; CUDA graphs captured with them must not be replayed afterwards."""
    _CLAIMS.clear()


@triton.jit
def _seen(dsts, dst_count, sub_indptr, sub_indices, position, n, size):
    """(node, whether it counts) at a position of the destinations followed by the edges' sources."""
    is_dst = position < n
    num_dst = tl.minimum(tl.load(dst_count), n)
    valid = (position < size) & tl.where(is_dst, position < num_dst, position - n < tl.load(sub_indptr + n))
    dst = tl.load(dsts + position, is_dst & valid, 0)
    src = tl.load(sub_indices + (position - n), (position >= n) & valid, 0)
    return tl.where(is_dst, dst, src), valid


@triton.jit(do_not_specialize=_INTEGERS)
def claim(dsts, dst_count, sub_indptr, sub_indices, table, stamp, n, size, BLOCK: tl.constexpr):
    """Claims every node seen for its first position."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    node, valid = _seen(dsts, dst_count, sub_indptr, sub_indices, position, n, size)
    tl.atomic_min(table + node.to(tl.int64), (tl.load(stamp) << 32) | position, valid, sem="relaxed")


@triton.jit(do_not_specialize=_INTEGERS)
def _count_first(
    dsts, dst_count, sub_indptr, sub_indices, table, first, sums, n, size, BLOCK: tl.constexpr
):  # fmt: skip
    """First position of every node seen, int32, and per block the number of rows it gives: destinations, new nodes."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    node, valid = _seen(dsts, dst_count, sub_indptr, sub_indices, position, n, size)
    winner = tl.load(table + node.to(tl.int64), valid, -1) & 0xFFFFFFFF
    winner = tl.where(valid, winner, -1)
    tl.store(first + position, winner.to(tl.int32), position < size)
    kept = valid & ((position < n) | (winner == position))
    tl.store(sums + block, tl.sum(kept.to(tl.int64), 0))


@triton.jit(do_not_specialize=_INTEGERS)
def _write_sources(
    dsts, dst_count, sub_indices, first, sums, blocks, local_of, srcs, total_out, n, size, num_src,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers what is kept, in order; writes the sources, and the local id of every position that is a first one."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_dst = position < n
    winner = tl.load(first + position, position < size, -1)
    kept = (winner >= 0) & (is_dst | (winner == position))
    before, total = preceding(sums, block, blocks, ADDED)
    local = before + tl.cumsum(kept.to(tl.int64), 0) - 1
    dst = tl.load(dsts + position, kept & is_dst, 0)
    node = tl.where(is_dst, dst, tl.load(sub_indices + (position - n), kept & (position >= n), 0))
    tl.store(srcs + local, node, kept & (local < num_src))
    tl.store(local_of + position, local.to(tl.int32), kept)
    if block == 0:
        tl.store(total_out, total)
    pad = tl.zeros((), tl.int64)
    if tl.load(dst_count) > 0 and n > 0:
        pad = tl.load(dsts).to(tl.int64)
    elif total > 0:
        pad = tl.load(sub_indices).to(tl.int64)
    fill_tail(srcs, total, num_src.to(tl.int64), pad, BLOCK)


@triton.jit(do_not_specialize=_INTEGERS)
def _relabel(first, local_of, local, stamp, n, num_edges, num_src, BLOCK: tl.constexpr):
    """Local ids of the edges' sources (0 in the padding and past the bound); ends the use of the stamp."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    winner = tl.load(first + n + e, e < num_edges, -1)
    own = tl.load(local_of + winner, winner >= 0, 0)
    tl.store(local + e, tl.where(own < num_src, own, 0), e < num_edges)
    if tl.program_id(0) == 0:
        tl.store(stamp, tl.load(stamp) - 1)


@op
def compact(
    dsts: Tensor, dst_count: Tensor, sub_indptr: Tensor, sub_indices: Tensor, num_nodes: int, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Local ids for the sources of a sampled set: (srcs ``[num_src]``, local indices ``[E]``, count).

    Destinations come first, each in a row of its own, then new nodes in the order of their first edge.
    """
    check_offsets(sub_indptr)
    check_ids(dsts, sub_indices)
    n, num_edges, device = dsts.numel(), sub_indices.numel(), dsts.device
    size = n + num_edges
    if size == 0:
        zeros = torch.zeros(max(num_src, 0), dtype=dsts.dtype, device=device)
        return zeros, sub_indices.clone(), torch.zeros((), dtype=torch.int64, device=device)
    require(size < 2**31, "fewer than 2**31 destinations and edges", f"{size}; sample in batches")
    table, stamp = claims(device, num_nodes)
    block = min(1024, max(128, power_of_two(cdiv(size, 1024))))
    blocks, warps = cdiv(size, block), min(8, block // 32)
    seen = dsts, dst_count, sub_indptr, sub_indices
    first, local_of = torch.empty((2, size), dtype=torch.int32, device=device)
    sums = torch.empty(blocks, dtype=torch.int64, device=device)
    claim[(blocks,)](*seen, table, stamp, n, size, BLOCK=block, num_warps=warps)
    _count_first[(blocks,)](*seen, table, first, sums, n, size, BLOCK=block, num_warps=warps)
    if num_src < 0:
        num_src = int(sums.sum())
    sums, added = block_sums(sums)
    srcs = torch.empty(num_src, dtype=sub_indices.dtype, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    local = torch.empty_like(sub_indices)
    _write_sources[(blocks,)](
        dsts, dst_count, sub_indices, first, sums, blocks, local_of, srcs, total, n, size, num_src,
        ADDED=added, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    _relabel[(max(1, cdiv(num_edges, block)),)](
        first, local_of, local, stamp, n, num_edges, num_src, BLOCK=block, num_warps=warps
    )
    return srcs, local, total
