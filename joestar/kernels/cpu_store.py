"""Rows and structure on their way into an arena, on the CPU: ids are checked, rows of any dtype are moved as bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, require

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CONVERTED_BYTES = 2**22
"""Bytes of rows that are converted at a time: they stay in a cache."""


def _table(table: Tensor, name: str) -> Tensor:
    right = table.is_cpu and table.dim() > 0 and table.is_contiguous()
    require(right, f"{name} [rows, ...], contiguous, on the CPU", f"{list(table.shape)} on {table.device}")
    return table


def _row_bytes(table: Tensor) -> int:
    return table[:1].numel() * table.element_size() if table.shape[0] else 0


def _same_rows(a: Tensor, b: Tensor, name: str) -> None:
    require(a.shape[1:] == b.shape[1:], f"{name} with rows {list(a.shape[1:])}", f"{list(b.shape)}")


def gather_into(table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """``table[ids]``, into ``out`` if given: ordinary or mapped memory into a staging buffer, with all threads.

    Args:
        table: ``[N, ...]`` of any dtype, contiguous. ids: int32 or int64 ``[n]``. out: ``[n, ...]`` of its dtype.

    Raises:
        IndexError: for an id that is no row.
    """
    table, ids = _table(table, "table"), check_ids(ids, "ids")
    if out is None:
        out = table.new_empty((ids.numel(), *table.shape[1:]))
    right = out.dtype == table.dtype and out.shape[:1] == ids.shape
    require(right, f"out {table.dtype} [{ids.numel()}, ...]", f"{out.dtype} {list(out.shape)}")
    _same_rows(table, _table(out, "out"), "out")
    _native.gather_rows(table, table.shape[0], ids, out, _row_bytes(table))
    return out


def fill_rows(source: Tensor, ids: Tensor, slots: Tensor, out: Tensor, programs: int | None = None) -> None:
    """``out[slots[i]] = source[ids[i]]``; as ``gpu_fill.fill_rows``, ``programs`` aside.

    Raises:
        IndexError: for an id or a slot that is no row.
    """
    source, out = _table(source, "source"), _table(out, "out")
    ids, slots = check_ids(ids, "ids"), check_ids(slots, "slots")
    require(ids.shape == slots.shape, f"a slot for each of {ids.numel()} ids", f"{slots.numel()}")
    _same_rows(source, out, "out")
    if source.dtype == out.dtype:
        return _native.fill_rows(source, source.shape[0], ids, slots, out, out.shape[0], _row_bytes(out))
    floats = {source.dtype, out.dtype} <= set(_FLOATS)
    require(floats, f"rows of {source.dtype}", f"{out.dtype}")
    step = max(1, _CONVERTED_BYTES // max(1, _row_bytes(out)))
    for first in range(0, ids.numel(), step):
        rows = gather_into(source, ids[first : first + step]).to(out.dtype)
        places = torch.arange(rows.shape[0], device=rows.device)
        _native.fill_rows(rows, rows.shape[0], places, slots[first : first + step], out, out.shape[0], _row_bytes(out))
    return None


def gather_stored(table: Tensor, cache: Tensor | None, slot_of: Tensor | None, ids: Tensor) -> Tensor:
    """``table[ids]``, rows with a slot from ``cache``; as ``gpu_fill.gather_stored``.

    Raises:
        IndexError: for an id or a slot that is no row.
    """
    require((cache is None) == (slot_of is None), "cache and slots together", "one of them")
    if cache is None:
        return gather_into(table, ids)
    table, cache, ids = _table(table, "table"), _table(cache, "cache"), check_ids(ids, "ids")
    _same_rows(table, cache, "cache")
    require(cache.dtype == table.dtype, f"a cache of {table.dtype}", f"{cache.dtype}")
    right = slot_of.dtype == torch.int32 and slot_of.shape == table.shape[:1] and slot_of.is_cpu
    require(right, f"slots int32 [{table.shape[0]}]", f"{slot_of.dtype} {list(slot_of.shape)}")
    out = table.new_empty((ids.numel(), *table.shape[1:]))
    _native.gather_cached(table, cache, cache.shape[0], slot_of.contiguous(), ids, out, _row_bytes(table))
    return out


def marked_rows(ids: Tensor, marks: Tensor, tables: Sequence[Tensor | None], placed: bool):
    """Marked nodes and their places in some tables, found by C++ in one pass: has ``count``, ``counts`` per table of
    those with a place, ``write(values, out)`` and ``write_layer(table, ids, flags, its ids, places)``.

    Args:
        ids: int32 or int64 ``[n]``; marks: bool ``[n]``.
        tables: int32 or int16 ``[num_nodes]``, negative without a place; ``None``: every node's own number.
        placed: whether nodes without a place in any table are left out.

    Raises:
        IndexError: for a marked id that is no node.
    """
    ids = check_ids(ids, "ids")
    right = marks.shape == ids.shape and marks.dtype == torch.bool and marks.is_cpu
    require(right, f"marks bool [{ids.numel()}]", f"{marks.dtype} {list(marks.shape)}")
    for table in tables:
        fine = table is None or (
            table.dtype in (torch.int16, torch.int32) and table.dim() == 1 and table.is_cpu and table.is_contiguous()
        )
        require(fine, "places int16 or int32 [num_nodes]", f"{getattr(table, 'dtype', table)}")
    return _native.marked_rows(ids, marks.contiguous().view(torch.uint8), list(tables), placed)


def pull_hidden(
    table: Tensor, stamps: Tensor, rows: Tensor, known: Tensor | None, now: int, max_age: int | None, out: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """Hidden rows of a macro-batch into ``out``, 0 where none is to be used; one pass with all threads.

    Args:
        table: ``[N, width]``; stamps: int32 ``[N]``, negative for rows that were never pushed.
        rows: int32 or int64 ``[m]``; known: bool ``[m]``, which of them there are, ``None`` for all. now, max_age:
            macro-batches.
        out: ``[m, width]`` of the table's dtype.

    Returns:
        (usable bool ``[m]``, age int32 ``[m]``, counts: missing, too old, sum of ages, largest age).

    Raises:
        IndexError: for a known row that is not there.
    """
    table, out, rows = _table(table, "table"), _table(out, "out"), check_ids(rows, "rows")
    require(stamps.shape == table.shape[:1] and stamps.dtype == torch.int32, "int32 stamps, one per row",
            f"{stamps.dtype} {list(stamps.shape)}")  # fmt: skip
    fits = known is None or (known.shape == rows.shape and known.dtype == torch.bool)
    require(fits, "known bool, one per row asked for", f"{known.dtype} {list(known.shape)}" if not fits else "")
    known = rows.new_empty(0, dtype=torch.bool) if known is None else known.contiguous()
    right = out.dtype == table.dtype and out.shape == (rows.shape[0], *table.shape[1:])
    require(right, f"out {table.dtype} [{rows.numel()}, ...]", f"{out.dtype} {list(out.shape)}")
    usable = torch.empty(rows.shape[0], dtype=torch.bool, device="cpu")
    age = torch.empty(rows.shape[0], dtype=torch.int32, device="cpu")
    bound = -1 if max_age is None else min(max_age, 2**31 - 1)
    counts = _native.pull_hidden(
        table, stamps.contiguous(), rows, known.view(torch.uint8), now, bound, out,
        usable.view(torch.uint8), age, _row_bytes(table),
    )  # fmt: skip
    return usable, age, counts


def push_hidden(
    table: Tensor, stamps: Tensor, rows: Tensor, stored: Tensor, now: int, values: Tensor,
    replaced: tuple[Tensor, Tensor, Tensor] | None = None,
) -> int:  # fmt: skip
    """Writes hidden rows of a macro-batch into their table; one pass with all threads. How many were stored.

    Args:
        table: ``[N, width]``; stamps: int32 ``[N]``, ``now`` in rows that are written.
        rows: int32 or int64 ``[m]``; stored: bool ``[m]``, which of them are written, each row once.
        values: ``[m, width]`` of the table's dtype.
        replaced: room for what was there: ``[m, width]``, int32 ``[m]`` (0 and -1 where nothing is stored), and an
            int64 ``[1]`` that becomes 1 with the last write.

    Raises:
        IndexError: for a row that is not there; nothing was written then.
    """
    table, values, rows = _table(table, "table"), _table(values, "values"), check_ids(rows, "rows")
    require(stamps.shape == table.shape[:1] and stamps.dtype == torch.int32 and stamps.is_contiguous(),
            "int32 stamps, one per row", f"{stamps.dtype} {list(stamps.shape)}")  # fmt: skip
    require(stored.shape == rows.shape and stored.dtype == torch.bool, "stored bool, one per row given",
            f"{stored.dtype} {list(stored.shape)}")  # fmt: skip
    shape, none = (rows.shape[0], *table.shape[1:]), torch.empty(0, dtype=torch.int64, device="cpu")
    old, old_stamps, done = (none, none.to(torch.int32), none) if replaced is None else replaced
    for name, given in (("values", values), ("replaced", old)):
        if given is not none:
            right = given.dtype == table.dtype and given.shape == shape and given.is_contiguous()
            require(right, f"{name} {table.dtype} {list(shape)}", f"{given.dtype} {list(given.shape)}")
    if replaced is not None:
        right = old_stamps.shape == rows.shape and old_stamps.dtype == torch.int32 and old_stamps.is_contiguous()
        require(right, "int32 stamps, one per row given", f"{old_stamps.dtype} {list(old_stamps.shape)}")
        require(done.dtype == torch.int64 and done.numel() == 1, "an int64 number", f"{done.dtype} {list(done.shape)}")
    flags = stored.contiguous().view(torch.uint8)
    return _native.push_hidden(table, stamps, rows, flags, now, values, old, old_stamps, _row_bytes(table), done)


def row_twice(rows: Tensor, stored: Tensor, place: Tensor) -> int:
    """A place ``i`` of ``rows`` ``[m]`` whose row another place has, too, among those that are ``stored`` (bool
    ``[m]``); -1 if there is none. ``place``: int32, one per row of the table, of any values; it is written to.

    Raises:
        IndexError: for a stored row that is not there.
    """
    rows = check_ids(rows, "rows")
    require(stored.shape == rows.shape and stored.dtype == torch.bool, "stored bool, one per row given",
            f"{stored.dtype} {list(stored.shape)}")  # fmt: skip
    require(place.dtype == torch.int32 and place.is_contiguous(), "place int32", f"{place.dtype}")
    return _native.row_twice(rows, stored.contiguous().view(torch.uint8), place)


def place_structure(indptr: Tensor, indices: Tensor, slots: Tensor, out_indptr: Tensor, out_indices: Tensor,
                    table: Tensor | None = None) -> None:  # fmt: skip
    """Writes a macro-batch's structure as that of an arena; as ``gpu_place.place_structure``.

    Raises:
        IndexError: for a slot or a source that is not there. ValueError: if two rows have the same slot.
    """
    indptr, out_indptr = check_offsets(indptr), _written(check_offsets(out_indptr), out_indptr)
    indices, slots = check_ids(indices, "indices"), check_ids(slots, "slots")
    out_indices = _written(check_ids(out_indices, "out_indices"), out_indices)
    require(slots.numel() >= indptr.numel() - 1, f"a slot for each of {indptr.numel() - 1} rows", f"{slots.numel()}")
    require(out_indices.numel() >= indices.numel(), f"room for {indices.numel()} edges", f"{out_indices.numel()}")
    table = slots if table is None else check_ids(table, "table").to(slots.dtype)
    _native.place_structure(indptr, indices, slots, table, out_indptr, out_indices)


def _written(checked: Tensor, out: Tensor) -> Tensor:
    require(checked is out, "a contiguous tensor to write to", f"strides {out.stride()}")
    return out


def add_row_values(indptr: Tensor, indices: Tensor, value: Tensor, out: Tensor) -> None:
    """``out[source] += value[row]`` for every edge: int64 ``value`` ``[rows]`` and ``out`` ``[num_src]``."""
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    right = value.dtype == out.dtype == torch.int64 and value.shape == (indptr.numel() - 1,)
    require(right, f"int64 values [{indptr.numel() - 1}]", f"{value.dtype} {list(value.shape)}")
    _native.add_row_values(indptr, indices, value.contiguous(), _written(check_ids(out, "out"), out))


def take_slots(
    ids: Tensor, slot_of: Tensor, first: int, owner: Tensor, since: Tensor, keep: Tensor, used: Tensor, reuse: bool,
    hand: int, turn: int, slots: Tensor, fresh: Tensor, fresh_slots: Tensor,
) -> tuple[int, int, int]:  # fmt: skip
    """Slots for the nodes of a macro-batch: those that they have, else free ones of a pool of ``P`` behind ``first``.

    Args:
        ids: int32 or int64 ``[n]``, each once. slot_of: int32 ``[N]``, -1 for none, updated.
        owner: node in every slot of the pool or -1, ``[P]`` in the dtype of ``ids``; since: int32 ``[P]``, the turn in
            which it came; both updated. keep: uint8 ``[P]``, slots that are not free; used: uint8 ``[P]``, written:
            those that these nodes have.
        reuse: whether nodes keep slots for later macro-batches; else all but the first ``first`` slots are given anew,
            in ascending order from the pool's beginning. hand: where to look for free slots.
        slots: int32 ``[n]``, written. fresh, fresh_slots: ``[n]``, written: nodes that got a slot now come first.

    Returns:
        (nodes without a slot below ``first``, how many of them got a slot now, where to look next time); the last is
        -1 if there were too few free slots: then nothing has changed but ``used``, ``slots``.

    Raises:
        IndexError: for an id that is no node.
    """
    ids = check_ids(ids, "ids")
    for name, tensor in (("slot_of", slot_of), ("since", since), ("slots", slots), ("fresh_slots", fresh_slots)):
        right = tensor.dtype == torch.int32 and tensor.is_cpu and tensor.is_contiguous()
        require(right, f"{name} int32, on the CPU", f"{tensor.dtype} on {tensor.device}")
    right = fresh.dtype == owner.dtype == ids.dtype and owner.is_contiguous() and fresh.is_contiguous()
    require(right, f"fresh and owner {ids.dtype}", f"{fresh.dtype} and {owner.dtype}")
    right = fresh.shape == slots.shape == fresh_slots.shape == ids.shape
    require(right, f"room for {ids.numel()} nodes", f"{list(fresh.shape)} and {list(slots.shape)}")
    right = keep.dtype == used.dtype == torch.uint8 and keep.shape == used.shape == owner.shape == since.shape
    require(right, f"marks uint8 [{owner.numel()}]", f"{keep.dtype} {list(keep.shape)}, {list(used.shape)}")
    require(keep.is_contiguous() and used.is_contiguous(), "contiguous marks", f"strides {keep.stride()}")
    require(0 <= hand <= owner.numel(), f"a hand in [0, {owner.numel()}]", f"{hand}")
    return _native.take_slots(
        ids, slot_of, first, owner, since, keep, used, reuse, hand, turn, slots, fresh, fresh_slots
    )
