"""Deduplication and relabelling on the GPU without synchronisation, in four launches (FastGL 4.3 asks for two).

Every node has an entry in a table of claims: ``stamp << bits | position``, claimed by an atomic minimum. The stamp
falls by one per call, so that older claims always lose; where stamps run out, the last kernel of the call clears the
table. The smallest position wins: the result has the bits of ``joestar.ops.reference.compact``, whatever the order of
the threads. Positions below 2**24 share 4 bytes with the stamp (cleared in every 127th call, 0.1 ms for 10**8 nodes);
larger sets have a table of 8 bytes per node.

A table is allocated by the first call for a number of nodes, which must not be inside a CUDA graph capture; calls that
share a table must be ordered: see ``joestar.kernels.scratch`` for which do.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.compile_ahead import is_compiling, together
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
from joestar.kernels.scratch import current_tables, release_tables

_INTEGERS = ["n", "size", "blocks", "num_edges", "num_src", "num_nodes"]
_CLEARING = 2**16
"""Entries of the table per program of the kernel that clears it."""


class Claims(NamedTuple):
    """A table of claims.

    Attributes:
        table: int32 or int64 ``[num_nodes]``; calls: int64 ``[1]``, how many calls have read their claims.
        bits: of a position; period: calls between two clearings, the number of stamps.
    """

    table: Tensor
    calls: Tensor
    bits: int
    period: int


_LAYOUTS = ((torch.int32, 24, 2**7 - 1), (torch.int64, 32, 2**30))
"""(dtype, bits of a position, stamps), the largest stamp being free: an entry of all ones loses to every claim."""


@torch.inference_mode(False)  # the table outlives the call
def claims(device: torch.device, num_nodes: int, size: int) -> Claims:
    """The table of a device for positions below ``size``, all ones where nobody has claimed."""
    dtype, bits, period = next(layout for layout in _LAYOUTS if size <= 2 ** layout[1])
    tables = current_tables(device)
    found = tables.get((device, num_nodes, dtype))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"GPU compact: expected the table of claims for {num_nodes} nodes to exist before a CUDA graph is"
                " captured, and it does not; run the step once without capture first"
            )
        table = torch.full((num_nodes,), torch.iinfo(dtype).max, dtype=dtype, device=device)
        found = Claims(table, torch.zeros(1, dtype=torch.int64, device=device), bits, period)
        tables[device, num_nodes, dtype] = found
    return found


def clearing_programs(num_nodes: int) -> int:
    """Programs of a kernel that may have to clear a table."""
    return min(512, max(1, cdiv(num_nodes, _CLEARING)))


def release_claims() -> None:
    """Frees this thread's tables; CUDA graphs captured by hand with them must not be replayed afterwards."""
    release_tables()


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
def claim(
    dsts, dst_count, sub_indptr, sub_indices, table, calls, n, size,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Claims every node seen for its first position."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    node, valid = _seen(dsts, dst_count, sub_indptr, sub_indices, position, n, size)
    stamp = PERIOD - 1 - tl.load(calls) % PERIOD
    entry = ((stamp << BITS) | position).to(table.dtype.element_ty)
    tl.atomic_min(table + node.to(tl.int64), entry, valid, sem="relaxed")


@triton.jit
def claimed(table, calls, node, valid, BITS: tl.constexpr):
    """First position of every node, int64, -1 where not valid; counts the call, for nobody else in this kernel."""
    entry = tl.load(table + node.to(tl.int64), valid, 0).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(calls, tl.load(calls) + 1)
    return tl.where(valid, entry & ((1 << BITS) - 1), -1)


@triton.jit
def clear_claims(table, calls, num_nodes, PERIOD: tl.constexpr, BLOCK: tl.constexpr):
    """All ones again, shared among the programs, if the last call took the last stamp."""
    if tl.load(calls) % PERIOD == 0:
        bits: tl.constexpr = table.dtype.element_ty.primitive_bitwidth
        fill_tail(table, 0, num_nodes.to(tl.int64), (1 << (bits - 1)) - 1, BLOCK)


@triton.jit(do_not_specialize=_INTEGERS)
def _count_first(
    dsts, dst_count, sub_indptr, sub_indices, table, calls, first, sums, n, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First position of every node seen, int32, and per block the number of rows it gives: destinations, new nodes."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    node, valid = _seen(dsts, dst_count, sub_indptr, sub_indices, position, n, size)
    winner = claimed(table, calls, node, valid, BITS)
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
def _relabel(
    first, local_of, local, table, calls, n, num_edges, num_src, num_nodes, PERIOD: tl.constexpr, BLOCK: tl.constexpr
):
    """Local ids of the edges' sources (0 in the padding and past the bound); clears the claims when it is time."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    winner = tl.load(first + n + e, e < num_edges, -1)
    own = tl.load(local_of + winner, winner >= 0, 0)
    tl.store(local + e, tl.where(own < num_src, own, 0), e < num_edges)
    clear_claims(table, calls, num_nodes, PERIOD, BLOCK)


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
    table, calls, bits, period = claims(device, num_nodes, size)
    block = min(1024, max(128, power_of_two(cdiv(size, 1024))))
    blocks, warps = cdiv(size, block), min(8, block // 32)
    if device.type == "cuda":
        every = (dsts, dst_count, sub_indptr, sub_indices, num_nodes, num_src)
        together(lambda: compact(*every), "compact", dsts.dtype, bits, block)
    seen = dsts, dst_count, sub_indptr, sub_indices
    first, local_of = torch.empty((2, size), dtype=torch.int32, device=device)
    sums = torch.empty(blocks, dtype=torch.int64, device=device)
    claim[(blocks,)](*seen, table, calls, n, size, BITS=bits, PERIOD=period, BLOCK=block, num_warps=warps)
    _count_first[(blocks,)](*seen, table, calls, first, sums, n, size, BITS=bits, BLOCK=block, num_warps=warps)
    if num_src < 0:
        num_src = size if is_compiling() else int(sums.sum())
    sums, added = block_sums(sums)
    srcs = torch.empty(num_src, dtype=sub_indices.dtype, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    local = torch.empty_like(sub_indices)
    _write_sources[(blocks,)](
        dsts, dst_count, sub_indices, first, sums, blocks, local_of, srcs, total, n, size, num_src,
        ADDED=added, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    _relabel[(max(cdiv(num_edges, block), clearing_programs(num_nodes)),)](
        first, local_of, local, table, calls, n, num_edges, num_src, num_nodes,
        PERIOD=period, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return srcs, local, total
