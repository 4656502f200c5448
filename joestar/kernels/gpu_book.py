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


@triton.jit(do_not_specialize=["num_nodes", "first", "turn"])
def _take(
    bits, slot_of, owner, since, used, free, ends, fresh, fresh_slots, num_nodes, first, turn, BLOCK: tl.constexpr
):  # fmt: skip
    """Gives free slots to needed nodes that have none, in the order of nodes; who had them has none any more."""
    node, needed, slot = _needed(bits, slot_of, num_nodes, BLOCK)
    new = needed & (slot < 0)
    number = new.to(tl.int64)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(number) + tl.cumsum(number) - number
    taken = tl.load(free + place, new, 0).to(tl.int64)
    leaving = tl.load(owner + taken, new, -1).to(tl.int64)  # not needed here, or its slot would be in use
    tl.store(slot_of + leaving, tl.full([BLOCK], -1, tl.int32), new & (leaving >= 0))
    tl.store(slot_of + node, (taken + first).to(tl.int32), new)
    tl.store(owner + taken, node.to(owner.dtype.element_ty), new)
    tl.store(since + taken, tl.zeros([BLOCK], tl.int32) + turn, new)
    tl.store(used + taken, tl.full([BLOCK], 1, tl.uint8), new)
    tl.store(fresh + place, node.to(fresh.dtype.element_ty), new)
    tl.store(fresh_slots + place, (taken + first).to(tl.int32), new)


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
    bits: Tensor, slot_of: Tensor, owner: Tensor, since: Tensor, used: Tensor, free: Tensor, counts: Tensor, first: int,
    turn: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gives ``free`` slots to marked nodes without one; (these nodes, ascending; their slots, int32).

    Args:
        owner: ids ``[pool]``, who has a slot, or -1; since: int32 ``[pool]``, the turn in which it got it.
        counts: as of ``count_nodes``.
    """
    fresh, slots = torch.empty_like(free, dtype=owner.dtype), torch.empty_like(free)
    ends = counts[2].cumsum(0)
    _take[(ends.numel(),)](
        bits, slot_of, owner, since, used, free, ends, fresh, slots, slot_of.numel(), first, turn,
        BLOCK=_NODES, num_warps=8,
    )  # fmt: skip
    return fresh, slots


@on_device
def leave_slots(slot_of: Tensor, owner: Tensor, since: Tensor, latest: int) -> None:
    """Nodes that got their slot behind turn ``latest`` have none any more."""
    _leave[(cdiv(owner.numel(), _NODES),)](slot_of, owner, since, owner.numel(), latest, BLOCK=_NODES, num_warps=8)
