"""Slots of an arena for the nodes of a macro-batch, given on the device: ``stages.device_slots`` says who has which.

The nodes of a macro-batch are bits, one for each node of the graph. Bits and tables are read in the order of nodes, so
that what comes of them does not depend on which program is first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import ID_DTYPES, cdiv, on_device, require

_BLOCK = 1024
_NODES = 2048
"""Nodes, or slots, of a program that counts."""


@triton.jit(do_not_specialize=["n"])
def _mark(ids, bits, n, BLOCK: tl.constexpr):
    """Sets the bits of nodes; most are set already, and reading is cheaper."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    node = tl.load(ids + i, inside, 0).to(tl.int64)
    bit = tl.full([BLOCK], 1, tl.int32) << (node % 32).to(tl.int32)
    word = bits + node // 32
    tl.atomic_or(word, bit, inside & ((tl.load(word, inside, 0) & bit) == 0), sem="relaxed")


@triton.jit
def _needed(bits, slot_of, num_nodes, BLOCK: tl.constexpr):
    """(nodes of this program, whether each is needed, its slot or -1)."""
    node = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = node < num_nodes
    word = tl.load(bits + node // 32, inside, 0)
    needed = inside & (((word >> (node % 32).to(tl.int32)) & 1) != 0)
    return node, needed, tl.load(slot_of + node, needed, 0)


@triton.jit(do_not_specialize=["num_nodes", "first"])
def _count_nodes(bits, slot_of, used, counts, num_nodes, first, BLOCK: tl.constexpr):
    """Of every block: how many nodes are needed, not hot, without a slot. The slots of the others are in use."""
    _, needed, slot = _needed(bits, slot_of, num_nodes, BLOCK)
    kept = needed & (slot >= first)
    tl.store(used + (slot - first), tl.full([BLOCK], 1, tl.uint8), kept)
    fresh = tl.sum((needed & (slot < 0)).to(tl.int32))
    blocks, block = tl.num_programs(0), tl.program_id(0)
    tl.store(counts + block, tl.sum(needed.to(tl.int32)))
    tl.store(counts + blocks + block, tl.sum(kept.to(tl.int32)) + fresh)
    tl.store(counts + 2 * blocks + block, fresh)


@triton.jit
def _free(keep, used, hand, pool, BLOCK: tl.constexpr):
    """(slots of this program, ``hand`` being the first, whether nobody uses each, nor does the macro-batch before)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < pool
    slot = place + tl.load(hand)
    slot = tl.where(slot >= pool, slot - pool, slot)
    unused = inside & (tl.load(used + slot, inside, 1) == 0)
    return slot, unused, unused & (tl.load(keep + slot, inside, 1) == 0)


@triton.jit(do_not_specialize=["pool"])
def _count_free(keep, used, hand, counts, pool, BLOCK: tl.constexpr):
    """Of every block: how many slots are free, and how many are if the macro-batch before does not count."""
    _, alone, beside = _free(keep, used, hand, pool, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(beside.to(tl.int32)))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(alone.to(tl.int32)))


@triton.jit(do_not_specialize=["pool", "count"])
def _list_free(keep, used, hand, ends, out, pool, count, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    """The first ``count`` free slots; ``ends``: how many there are up to the end of every block."""
    slot, free, beside = _free(keep, used, hand, pool, BLOCK)
    if not ALONE:
        free = beside
    number = free.to(tl.int64)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(number) + tl.cumsum(number) - number
    tl.store(out + place, slot.to(tl.int32), free & (place < count))


@triton.jit(do_not_specialize=["num_nodes"])
def _list_fresh(bits, slot_of, ends, fresh, num_nodes, BLOCK: tl.constexpr):
    """Needed nodes that have no slot, in the order of nodes; ``ends``: how many there are up to the end of a block."""
    node, needed, slot = _needed(bits, slot_of, num_nodes, BLOCK)
    new = needed & (slot < 0)
    number = new.to(tl.int64)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(number) + tl.cumsum(number) - number
    tl.store(fresh + place, node.to(fresh.dtype.element_ty), new)


@triton.jit(do_not_specialize=["n", "pool", "first", "turn"])
def _give(fresh, free, slot_of, owner, since, used, hand, fresh_slots, n, pool, first, turn, BLOCK: tl.constexpr):
    """Gives each of these nodes its free slot; who had it has none any more. The search goes on behind the last one."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    node, taken = tl.load(fresh + i, inside, 0).to(tl.int64), tl.load(free + i, inside, 0).to(tl.int64)
    leaving = tl.load(owner + taken, inside, -1).to(tl.int64)  # not needed here, or its slot would be in use
    tl.store(slot_of + leaving, tl.full([BLOCK], -1, tl.int32), inside & (leaving >= 0))
    tl.store(slot_of + node, (taken + first).to(tl.int32), inside)
    tl.store(owner + taken, node.to(owner.dtype.element_ty), inside)
    tl.store(since + taken, tl.zeros([BLOCK], tl.int32) + turn, inside)
    tl.store(used + taken, tl.full([BLOCK], 1, tl.uint8), inside)
    tl.store(fresh_slots + i, (taken + first).to(tl.int32), inside)
    tl.store(hand + 0 * i, tl.where(taken + 1 == pool, 0, taken + 1), i == n - 1)


@triton.jit(do_not_specialize=["n"])
def _fill_near(table, ids, slots, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``out[slots[i]] = table[ids[i]]`` of narrow rows, converted; the ids themselves without a table."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row, slot = tl.load(ids + i, inside, 0).to(tl.int64), tl.load(slots + i, inside, 0).to(tl.int64)
    for column in tl.static_range(WIDTH):
        value = row
        if table is not None:
            value = tl.load(table + row * WIDTH + column, inside, 0)
        tl.store(out + slot * WIDTH + column, value.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["pool"])
def _leave(slot_of, owner, since, pool, latest, BLOCK: tl.constexpr):
    """Takes the slots away from nodes that got them behind turn ``latest``."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < pool
    node = tl.load(owner + slot, inside, -1).to(tl.int64)
    gone = inside & (node >= 0) & (tl.load(since + slot, inside, 0) > latest)
    tl.store(slot_of + node, tl.full([BLOCK], -1, tl.int32), gone)
    tl.store(owner + slot, tl.full([BLOCK], -1, owner.dtype.element_ty), gone)


def bits_for(num_nodes: int, device: torch.device) -> Tensor:
    """A bit for every node: int32 words, all 0."""
    return torch.zeros(cdiv(num_nodes, 32), dtype=torch.int32, device=device)


@on_device
def mark_nodes(bits: Tensor, ids: Tensor) -> None:
    """Sets the bits (int32 words) of nodes: int32 or int64 ``[n]``, in any order, any number of times each."""
    require(ids.dtype in ID_DTYPES and ids.is_contiguous(), "contiguous int32 or int64 ids", f"{ids.dtype}")
    if ids.numel():
        _mark[(cdiv(ids.numel(), _BLOCK),)](ids, bits, ids.numel(), BLOCK=_BLOCK)


@on_device
def count_nodes(bits: Tensor, slot_of: Tensor, used: Tensor, first: int) -> Tensor:
    """Counts of marked nodes, int32 ``[3, blocks]``: all, those that are not hot, those without a slot.

    Args:
        slot_of: int32 ``[N]``, slot of every node, or -1; hot nodes have those below ``first``.
        used: uint8 ``[pool]``, set to 1 where a marked node has the slot ``first + i``.
    """
    blocks = cdiv(slot_of.numel(), _NODES)
    counts = torch.empty((3, blocks), dtype=torch.int32, device=bits.device)
    _count_nodes[(blocks,)](bits, slot_of, used, counts, slot_of.numel(), first, BLOCK=_NODES, num_warps=8)
    return counts


@on_device
def count_free(keep: Tensor, used: Tensor, hand: Tensor) -> Tensor:
    """Counts of slots, int32 ``[2, blocks]``: those that are neither kept nor used, and those that are not used.

    Args:
        keep, used: uint8 ``[pool]``. hand: int64 ``[1]``, the slot at which blocks begin.
    """
    blocks = cdiv(keep.numel(), _NODES)
    counts = torch.empty((2, blocks), dtype=torch.int32, device=keep.device)
    _count_free[(blocks,)](keep, used, hand, counts, keep.numel(), BLOCK=_NODES, num_warps=8)
    return counts


@on_device
def list_free(keep: Tensor, used: Tensor, hand: Tensor, counts: Tensor, number: int, alone: bool) -> Tensor:
    """The first ``number`` free slots from ``hand`` on and around, int32; there are as many (``counts``)."""
    out = torch.empty(number, dtype=torch.int32, device=keep.device)
    ends = counts[int(alone)].cumsum(0)
    _list_free[(ends.numel(),)](
        keep, used, hand, ends, out, keep.numel(), number, ALONE=alone, BLOCK=_NODES, num_warps=8
    )
    return out


@on_device
def take_free(
    bits: Tensor, slot_of: Tensor, owner: Tensor, since: Tensor, used: Tensor, free: Tensor, counts: Tensor,
    hand: Tensor, first: int, turn: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gives ``free`` slots to marked nodes without one; (these nodes, ascending; their slots, int32).

    Args:
        owner: ids ``[pool]``, who has a slot, or -1; since: int32 ``[pool]``, the turn in which it got it.
        counts: as of ``count_nodes``. hand: int64 ``[1]``, set to the slot behind the last one.
    """
    fresh, slots = torch.empty_like(free, dtype=owner.dtype), torch.empty_like(free)
    if not free.numel():
        return fresh, slots
    ends = counts[2].cumsum(0)
    _list_fresh[(ends.numel(),)](bits, slot_of, ends, fresh, slot_of.numel(), BLOCK=_NODES, num_warps=8)
    _give[(cdiv(free.numel(), _BLOCK),)](
        fresh, free, slot_of, owner, since, used, hand, slots, free.numel(), owner.numel(), first, turn, BLOCK=_BLOCK
    )
    return fresh, slots


@on_device
def fill_near(table: Tensor | None, ids: Tensor, slots: Tensor, out: Tensor) -> None:
    """``out[slots[i]] = table[ids[i]]``, converted to ``out``'s dtype; ``out[slots[i]] = ids[i]`` without a table.

    Args:
        table: ``[N, ...]`` of few numbers a row, contiguous, memory of the device. ids, slots: int32 or int64 ``[n]``,
            contiguous, each slot once. out: ``[K, ...]``, contiguous, of real numbers or truth values, as ``table``.
    """
    right = ids.dtype in ID_DTYPES and slots.dtype in ID_DTYPES and ids.is_contiguous() and slots.is_contiguous()
    require(right and ids.shape == slots.shape, "as many contiguous ids as slots", f"{ids.dtype}, {slots.dtype}")
    width = out[:1].numel()
    same = table is None or (table.is_contiguous() and table.shape[1:] == out.shape[1:])
    require(same and out.is_contiguous() and (table is not None or width == 1), "rows alike", f"{list(out.shape)}")
    if not ids.numel() or not width:
        return
    table, out = (t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in (table, out))
    _fill_near[(cdiv(ids.numel(), _BLOCK),)](table, ids, slots, out, ids.numel(), WIDTH=width, BLOCK=_BLOCK)


@on_device
def leave_slots(slot_of: Tensor, owner: Tensor, since: Tensor, latest: int) -> None:
    """Nodes that got their slot behind turn ``latest`` have none any more."""
    _leave[(cdiv(owner.numel(), _NODES),)](slot_of, owner, since, owner.numel(), latest, BLOCK=_NODES, num_warps=8)
