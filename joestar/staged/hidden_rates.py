"""What hidden rows of a macro-batch over partitions take of the host, measured before anything is made for good."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from joestar.stages.history import HistoryStore
from joestar.stages.partitions import PartitionBatch
from joestar.stages.slots import Slots

PROBED = 1 << 30
"""Most bytes of the tables that are written to and read for a try: more than caches have."""
TIMES = 3


def seconds_of_rows(
    widths: Sequence[int], dtype: torch.dtype, rows: int, pulls: float, pushes: float, pinned: bool = False
) -> float:
    """Seconds in which a macro-batch's hidden rows are written, with what was there kept, and read, by all threads.

    Args:
        widths, dtype: of the tables; rows: that they will have. pulls, pushes: rows of a macro-batch per layer.
        pinned: whether they are read into page-locked memory.
    """
    if not rows:
        return 0.0
    some = max(1, min(rows, PROBED // (sum(widths) * dtype.itemsize)))
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(some, device="cpu")
    store = HistoryStore(some, widths, every, dtype=dtype, pinned=pinned)
    read, written = (max(1, min(int(number), some)) for number in (pulls, pushes))
    order = torch.randperm(some, generator=generator, device="cpu")
    values = [torch.zeros(written, width, dtype=dtype, device="cpu") for width in widths]
    best = None
    for number in range(TIMES):
        start = order[number * written % some :]
        ids = [(start if len(start) >= count else order)[:count].sort().values for count in (written, read)]
        took = _tried(store, *ids, values, number)
        best = took if best is None else tuple(map(min, best, took))
    return best[0] * pushes / written + best[1] * pulls / read


def _tried(store: HistoryStore, pushed: Tensor, pulled: Tensor, values: list[Tensor], now: int) -> tuple[float, float]:
    """Seconds of writing and of reading."""
    start = time.perf_counter()
    for layer, given in enumerate(values):
        store.push(layer, pushed, given, now, replaced=store.room_for(layer, pushed), once=True)
    between = time.perf_counter()
    for layer in range(len(values)):
        store.pull(layer, pulled, now)
    return between - start, time.perf_counter() - between


def seconds_to_prepare(macro: PartitionBatch, has_row: Tensor, num_nodes: int, reuse: bool) -> float:
    """Seconds in which a macro-batch that was picked is made ready: slots of its nodes, masks, copies.

    Args:
        has_row: bool ``[num_nodes]``, of a hidden row. reuse: whether slots keep their rows.
    """
    slots = Slots(macro.ids[:0], 2 * macro.num_nodes + 1, num_nodes, reuse)
    start = time.perf_counter()
    taken = slots.take(macro.ids, lambda size, dtype: torch.empty(size, dtype=dtype, device="cpu"))
    kept = macro.inner & has_row[macro.ids.to(torch.int64)]
    for mask in (macro.halo, kept):
        _ = int(mask.sum()), macro.ids[mask], taken.slots[mask]
    for given in (macro.indptr, macro.indices, macro.seeds):
        given.clone()
    return time.perf_counter() - start
