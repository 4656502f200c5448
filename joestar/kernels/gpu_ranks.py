"""Sums over the ranks of one host in one launch, over memory that their GPUs read from one another.

Every rank has a region that all of them map: two halves for what it adds, and a number per program and rank. A program
writes its tiles into this rank's half, tells the same program of all ranks by the number of the sum, waits for their
numbers, and adds their tiles up, in the order of ranks: all have the same bits. Halves take turns, so that nobody waits
for readers: who writes a half again has heard from all of the sum in between, which they began when they had read it.

No program waits for another one of its GPU, and all of a grid fit on it at once: ranks cannot wait for one another in a
circle. Like NCCL's kernels they wait without end for a rank that is gone; the hosts find that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, on_device
from joestar.kernels.layout import power_of_two

TILE = 1024
"""Elements; sums have a multiple of them."""
PROGRAMS = 128
"""At most: no more than there are multiprocessors."""
MOST_PARTS = 64
"""A kernel has a limited number of arguments."""


@triton.jit
def _sum_ranks(
    parts, values, shares, ok, pointers, counters, out, happens, STARTS: tl.constexpr, SIZES: tl.constexpr,
    GRADIENTS: tl.constexpr, COUNT: tl.constexpr, VALUES: tl.constexpr, DECISIVE: tl.constexpr, TOTAL: tl.constexpr,
    WORDS: tl.constexpr, NUMBERS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PEERS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = out.dtype.element_ty
    number = tl.load(counters + program) + 1
    half = (number & 1) * TOTAL
    own = tl.load(pointers + RANK)
    mine = tl.multiple_of(own.to(tl.pointer_type(kind)), 16) + half
    empty = tl.load(shares + DECISIVE) == 0
    first = program * TILE
    while first < TOTAL:
        at = first + tl.arange(0, TILE)
        for i in tl.static_range(COUNT):
            if (first < STARTS[i] + SIZES[i]) & (first + TILE > STARTS[i]):
                inside = (at >= STARTS[i]) & (at < STARTS[i] + SIZES[i])
                value = tl.load(parts[i] + (at - STARTS[i]), inside, 0).to(kind)
                if i < GRADIENTS:
                    value = tl.where(empty, 0.0, value).to(kind)
                tl.store(mine + at, value, inside)
        if first == WORDS:
            for i in tl.static_range(VALUES):
                part = tl.load(shares + i + (i > 0)).to(kind)
                tl.store(mine + first + i, tl.where(part == 0, 0.0, tl.load(values[i]).to(kind) * part).to(kind))
            tl.store(mine + first + VALUES, (tl.load(ok) == 0).to(kind))
        first += step * TILE

    peer = tl.arange(0, PEERS)
    there = tl.load(pointers + peer, peer < WORLD, 0) + NUMBERS
    place = program * PEERS
    tl.debug_barrier()  # what all threads have written comes before the word of one of them
    said = tl.zeros((PEERS,), tl.int32) + number
    tl.atomic_xchg(
        there.to(tl.pointer_type(tl.int32)) + place + RANK, said, mask=peer < WORLD, sem="release", scope="sys"
    )
    heard = (own + NUMBERS).to(tl.pointer_type(tl.int32)) + place + peer
    late = tl.min(tl.atomic_add(heard, 0, mask=peer < WORLD, sem="acquire", scope="sys") - said, 0)
    while late < 0:
        late = tl.min(tl.atomic_add(heard, 0, mask=peer < WORLD, sem="acquire", scope="sys") - said, 0)
    tl.debug_barrier()

    first = program * TILE
    while first < TOTAL:
        at = first + tl.arange(0, TILE)
        total = tl.zeros((TILE,), kind)
        for rank in tl.static_range(WORLD):
            base = tl.multiple_of(tl.load(pointers + rank).to(tl.pointer_type(kind)), 16) + half
            total += tl.load(base + at, cache_modifier=".cg")
        tl.store(out + at, total)
        if first == WORDS:
            void = tl.zeros((), kind)
            for rank in tl.static_range(WORLD):
                base = tl.load(pointers + rank).to(tl.pointer_type(kind)) + half
                void += tl.load(base + first + VALUES, cache_modifier=".cg")
            tl.store(happens, (void == 0).to(tl.int8))
        first += step * TILE
    tl.store(counters + program, number)


def region_bytes(elements: int, dtype: torch.dtype, world: int) -> int:
    """Bytes that every rank shares for sums of so many elements, a multiple of ``TILE``; zeros at the beginning."""
    return 2 * elements * dtype.itemsize + 4 * PROGRAMS * power_of_two(world)


def counters(device: torch.device) -> Tensor:
    """Numbers of the sum, by program: int32 zeros."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


@on_device
def sum_ranks(
    out: Tensor, parts: list[Tensor], starts: list[int], gradients: int, values: list[Tensor], shares: Tensor,
    ok: Tensor, happens: Tensor, pointers: Tensor, counters: Tensor, rank: int, decisive: int,
) -> None:  # fmt: skip
    """``out`` becomes the sum over the ranks of what each puts into it; all call it alike, on one stream each.

    Args:
        out: ``[n]``, float32 or float64, n a multiple of ``TILE``; the last tile is that of the words if there are
            values.
        parts: contiguous, at most ``MOST_PARTS``, of any floating dtype; starts: where each begins in ``out``, at
            multiples of 16. What no part covers is undefined.
        gradients: how many of the first parts are 0 where the share of number ``decisive`` is 0, whatever they hold.
        values: V times 0-d; shares: float64 ``[1 + V]`` (at least 1); ok, happens: 0-d bool. As of
            ``joestar.ops.step.words``: values times their shares, then ``~ok``; ``happens``, written, if no rank is to
            blame.
        pointers: int64 ``[ranks]``, addresses of the regions (``region_bytes``); counters: of this rank.
    """
    world, total, values = pointers.numel(), out.numel(), tuple(values)
    words = total - TILE if values else -1
    _sum_ranks[(min(PROGRAMS, cdiv(total, TILE)),)](
        tuple(parts) or (shares,), values or (shares,), shares, ok.view(torch.int8), pointers, counters, out,
        happens.view(torch.int8), STARTS=tuple(starts), SIZES=tuple(part.numel() for part in parts),
        GRADIENTS=gradients, COUNT=len(parts), VALUES=len(values), DECISIVE=decisive, TOTAL=total, WORDS=words,
        NUMBERS=2 * total * out.element_size(), RANK=rank, WORLD=world, PEERS=power_of_two(world), TILE=TILE,
        num_warps=8,
    )  # fmt: skip
