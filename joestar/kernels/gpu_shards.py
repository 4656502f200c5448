"""Rows of a table whose parts lie in the memories of several GPUs, read where they are by one Triton kernel.

Addresses come from a table on the device: one per shard, and behind them that of the hot rows. Rows are dealt out in
stripes: ``STRIPE`` rows on end belong to one owner, the next to the next.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, check_ids, multiprocessors, on_device, require
from joestar.kernels.layout import power_of_two

_WARPS, _NARROW_WARPS = 32, 8
"""Of a program whose threads read 16 bytes at a time, and of others, whose threads need more registers."""
_THREAD = 64
"""Bytes that a thread has under way."""
SHARE = 4
"""Of so many multiprocessors one reads rows, with all its threads: 2 MB are under way, enough for the links, and the
others are free for the step that computes meanwhile: its products were seen to wait for multiprocessors where nothing
else runs (docs/benchmarks-history.md)."""
_WORDS = (torch.int32, torch.int16, torch.int8)
_WIDEST = 2048
"""Bytes of a row that a tile holds at most."""
_VECTOR = 16
"""Bytes that a thread reads at a time, where rows begin at multiples of them."""


@triton.jit
def _addresses(pointers, slot_of, ids, i, n, WORLD: tl.constexpr, STRIPE: tl.constexpr):
    """Where rows are that ids name: (address of their owner's shard or of the hot rows, number among its rows)."""
    node = tl.load(ids + i, i < n, 0).to(tl.int64)
    stripe = node // STRIPE
    owner = stripe % WORLD
    row = stripe // WORLD * STRIPE + node % STRIPE
    if slot_of is not None:
        slot = tl.load(slot_of + node, i < n, -1).to(tl.int64)
        owner = tl.where(slot < 0, owner, WORLD)
        row = tl.where(slot < 0, row, slot)
    return tl.load(pointers + owner, i < n, 0), row


@triton.jit(do_not_specialize=["n"])
def _gather_shards(
    pointers, slot_of, ids, out, n, WORLD: tl.constexpr, STRIPE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Every row is read once, from the hot rows of this device if they hold it, else from its owner; by few programs,
    which take tiles in turns."""
    step = tl.num_programs(0).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    tiles = ((n + ROWS - 1) // ROWS).to(tl.int64) * PARTS
    i = tile // PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    address, row = _addresses(pointers, slot_of, ids, i, n, WORLD, STRIPE)
    while tile < tiles:
        column = (tile % PARTS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (i < n) & (column < WIDTH)
        base = address.to(tl.pointer_type(out.dtype.element_ty))
        base = tl.multiple_of(base, [ALIGNED, ALIGNED])  # it was loaded: without this no 16 bytes at a time
        value = tl.load(base + row * WIDTH + column, mask, 0)
        place = out + i * WIDTH + column
        tile += step
        i = tile // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # the next tile's places arrive with this one's rows
        address, row = _addresses(pointers, slot_of, ids, i, n, WORLD, STRIPE)
        tl.store(place, value, mask)


@on_device
def gather_shards(
    shards: list[Tensor], pointers: Tensor, stripe: int, cache: Tensor | None, slot_of: Tensor | None, ids: Tensor
) -> Tensor:
    """``table[ids]`` of a table in shards; see ``joestar.ops.dense.gather_shards``.

    Args:
        shards: one per owner, ``[rows, ...]``, contiguous, as this device sees them.
        pointers: int64 ``[len(shards) + 1]``: their addresses, and that of ``cache``.
        stripe: rows in a row of one owner. cache: ``[H, ...]``; slot_of: int32 ``[N]``. ids: int32 or int64 ``[n]``.

    Returns:
        ``[n, ...]`` in the shards' dtype.
    """
    check_ids(ids)
    first, world = shards[0], len(shards)
    right = pointers.dtype == torch.int64 and pointers.numel() == world + 1
    require(right, f"int64 addresses [{world + 1}]", f"{pointers.dtype} {list(pointers.shape)}")
    require((cache is None) == (slot_of is None), "hot rows and slots together", "one of them")
    for shard in [*shards, *([] if cache is None else [cache])]:
        fits = shard.dtype == first.dtype and shard.shape[1:] == first.shape[1:] and shard.is_contiguous()
        require(fits, f"{first.dtype} rows {list(first.shape[1:])}", f"{shard.dtype} {list(shard.shape)}")
    out = first.new_empty((ids.numel(), *first.shape[1:]))
    if out.numel() == 0:
        return out
    size = out[0].numel() * out.element_size()
    word = next(word for word in _WORDS if size % word.itemsize == 0)
    width = size // word.itemsize
    block = min(power_of_two(width), _WIDEST // word.itemsize)
    aligned = math.gcd(size, _VECTOR)
    warps = _WARPS if aligned == _VECTOR else _NARROW_WARPS
    rows = max(1, warps * 32 * _THREAD // (block * word.itemsize))
    parts = cdiv(width, block)
    programs = max(1, multiprocessors(out.device) // SHARE) * (_WARPS // warps)
    grid = (min(programs, cdiv(ids.numel(), rows) * parts),)
    hot = slot_of if cache is not None and cache.numel() else None
    _gather_shards[grid](
        pointers, hot, ids.contiguous(), out.view(ids.numel(), -1).view(word), ids.numel(), WORLD=world, STRIPE=stripe,
        WIDTH=width, PARTS=parts, BLOCK=block, ROWS=rows, ALIGNED=aligned, num_warps=warps,
    )  # fmt: skip
    return out
