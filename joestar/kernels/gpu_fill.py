"""Rows of tables far away: copied by id into slots, or gathered through a cache, by Triton kernels.

The source may be host memory that the GPU reads in place (``joestar.store.pinned``). The bus then sets the pace, and
ids in ascending order: address translation is several times faster for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import INTERPRETED, cdiv, check_ids, on_device, require
from joestar.kernels.layout import power_of_two

PROGRAMS = 32
"""Programs that fill rows by default: enough for the bus, and the other multiprocessors stay free for training."""
TILE_BYTES = 2**14
"""Bytes that a program reads before it writes the first."""
_WARPS = 8
_WIDEST = 2048
"""Bytes of a row that a tile holds at most."""
_SORTED_FROM = 4096
"""Ids from this number on are sorted before rows of the host are gathered."""
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["n"])
def _fill_rows(
    source, ids, slots, out, n,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out[slots[i]] = source[ids[i]]`` by few programs, which take tiles in turns: neighbours are read together."""
    step = tl.num_programs(0).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    tiles = ((n + ROWS - 1) // ROWS).to(tl.int64) * PARTS
    i = tile // PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    row = tl.load(ids + i, i < n, 0).to(tl.int64)
    slot = tl.load(slots + i, i < n, 0).to(tl.int64)
    while tile < tiles:
        column = (tile % PARTS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (i < n) & (column < WIDTH)
        value = tl.load(source + row * WIDTH + column, mask, 0)
        place = out + slot * WIDTH + column
        tile += step
        i = tile // PARTS * ROWS + tl.arange(0, ROWS)[:, None]  # the next tile's ids arrive with this one's rows
        row = tl.load(ids + i, i < n, 0).to(tl.int64)
        slot = tl.load(slots + i, i < n, 0).to(tl.int64)
        tl.store(place, value.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["n"])
def _gather_cached(
    source, cache, slot_of, ids, places, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """``out[places[i]] = cache[slot_of[ids[i]]]`` where that slot is not negative, else ``source[ids[i]]``."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(ids + i, i < n, 0).to(tl.int64)
    place = i.to(tl.int64)
    if places is not None:
        place = tl.load(places + i, i < n, 0).to(tl.int64)
    mask = (i < n) & (column < WIDTH)
    if slot_of is not None:
        slot = tl.load(slot_of + row, i < n, 0).to(tl.int64)
        far = tl.load(source + row * WIDTH + column, mask & (slot < 0), 0)
        near = tl.load(cache + slot * WIDTH + column, mask & (slot >= 0), 0)
        value = tl.where(slot < 0, far, near)
    else:
        value = tl.load(source + row * WIDTH + column, mask, 0)
    tl.store(out + place * WIDTH + column, value, mask)


def _rows_as(tables: list[Tensor], word: torch.dtype | None) -> list[Tensor]:
    """Tables as matrices of their rows, of ``word`` if given, in place."""
    flat = [table.view(table.shape[0], -1) for table in tables]
    return [table if word is None else table.view(word) for table in flat]


def _word(tables: list[Tensor]) -> torch.dtype:
    """The widest integer in which rows can be moved as they are: 16-byte accesses are made of four."""
    size = tables[0][0].numel() * tables[0].element_size()
    for word in (torch.int32, torch.int16):
        if size % word.itemsize == 0 and all(table.data_ptr() % word.itemsize == 0 for table in tables):
            return word
    return torch.int8


def _tile(width: int, bytes_per_value: int) -> tuple[int, int]:
    """(columns of a tile, rows of a tile)."""
    block = min(power_of_two(width), _WIDEST // bytes_per_value)
    return block, max(1, TILE_BYTES // (block * bytes_per_value))


def _check(source: Tensor, others: dict[str, Tensor]) -> None:
    for name, table in {"source": source, **others}.items():
        require(table.dim() > 0 and table.is_contiguous(), f"{name} contiguous [rows, ...]", f"{list(table.shape)}")
        same = table.shape[1:] == source.shape[1:] and table.device == source.device
        require(
            same, f"{name} with rows {list(source.shape[1:])} on {source.device}", f"{list(table.shape)} {table.device}"
        )


@on_device
def fill_rows(source: Tensor, ids: Tensor, slots: Tensor, out: Tensor, programs: int | None = None) -> None:
    """``out[slots[i]] = source[ids[i]]`` on the current stream.

    Args:
        source: ``[N, ...]``, memory of the device or a view of page-locked host memory; contiguous.
        ids: int32 or int64 ``[n]``, best in ascending order. slots: int32 or int64 ``[n]``, each slot once.
        out: ``[K, ...]`` with rows of the same shape; of the same dtype, or both floating-point: rows are converted.
        programs: how many run at a time, ``PROGRAMS`` by default; the GPU's other multiprocessors stay free.
    """
    _check(source, {"out": out})
    check_ids(ids), check_ids(slots)
    ids, slots = ids.contiguous(), slots.contiguous()
    require(ids.shape == slots.shape and ids.dim() == 1, "one slot for every id", f"{list(ids.shape)} {slots.shape}")
    converts = source.dtype != out.dtype
    require(not converts or {source.dtype, out.dtype} <= set(_FLOATS), f"rows of {source.dtype}", f"{out.dtype}")
    n = ids.numel()
    if n == 0 or out.numel() == 0 or source.numel() == 0:
        return
    source, out = _rows_as([source, out], None if converts else _word([source, out]))
    width = source.shape[1]
    block, rows = _tile(width, max(source.element_size(), out.element_size()))
    parts = cdiv(width, block)
    grid = (max(1, min(programs or PROGRAMS, cdiv(n, rows) * parts)),)
    _fill_rows[grid](source, ids, slots, out, n, WIDTH=width, PARTS=parts, BLOCK=block, ROWS=rows, num_warps=_WARPS)


@on_device
def gather_stored(table: Tensor, cache: Tensor | None, slot_of: Tensor | None, ids: Tensor) -> Tensor:
    """``table[ids]``, rows with a slot read from ``cache`` instead.

    Args:
        table: ``[N, ...]``, a view of page-locked host memory or memory of the device; contiguous.
        cache: ``[H, ...]`` of the same rows and dtype, on the device, or ``None``. slot_of: int32 ``[N]``, the row of
            the cache in which a node is, or -1; ``None`` without a cache.
        ids: int32 or int64 ``[n]``; many are sorted first, the result has their order.

    Returns:
        ``[n, ...]`` in ``table``'s dtype.
    """
    _check(table, {} if cache is None else {"cache": cache})
    check_ids(ids)
    require((cache is None) == (slot_of is None), "cache and slots together", "one of them")
    if cache is not None:
        require(cache.dtype == table.dtype, f"a cache of {table.dtype}", f"{cache.dtype}")
        right = slot_of.dtype == torch.int32 and slot_of.shape == table.shape[:1]
        require(right, f"slots int32 [{table.shape[0]}]", f"{slot_of.dtype} {list(slot_of.shape)}")
    out = table.new_empty((ids.numel(), *table.shape[1:]))
    if out.numel() == 0:
        return out
    places = None
    if ids.numel() >= _SORTED_FROM and not INTERPRETED:
        ids, places = torch.sort(ids)
    _gather(table, cache, slot_of, ids.contiguous(), places, out)
    return out


def _gather(table, cache, slot_of, ids, places, out) -> None:
    tables = [table, out] if cache is None or cache.numel() == 0 else [table, out, cache]
    word = _word(tables)
    table, out, *rest = _rows_as(tables, word)
    cache = rest[0] if rest else None
    width = table.shape[1]
    block, rows = _tile(width, word.itemsize)
    grid = (cdiv(ids.numel(), rows), cdiv(width, block))
    slots = slot_of if cache is not None else None
    _gather_cached[grid](
        table, cache, slots, ids, places, out, ids.numel(), WIDTH=width, BLOCK=block, ROWS=rows, num_warps=_WARPS
    )
