"""What hidden rows of a macro-batch over partitions take of the host, measured before anything is made for good."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from joestar.stages.exchange import exchanged_rows, rows_of
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import HistoryRows
from joestar.stages.partitions import PartitionBatch
from joestar.stages.slots import Slots

PROBED = 1 << 30
"""Most bytes of the tables that are written to and read for a try: more than caches have."""
TIMES = 3


def seconds_of_rows(
    widths: Sequence[int], dtype: torch.dtype, rows: Sequence[int], pulls: Sequence[float], pushes: Sequence[float],
    pinned: bool = False,
) -> float:  # fmt: skip
    """Seconds in which a macro-batch's hidden rows are written, with what was there kept, and read, by all threads.

    Args:
        widths, dtype: of the tables; rows: that they will have. pulls, pushes: rows of a macro-batch. All per layer.
        pinned: whether they are read into page-locked memory.
    """
    size = sum(count * width * dtype.itemsize for count, width in zip(rows, widths, strict=True))
    share = min(1.0, PROBED / max(1, size))
    layers = zip(widths, rows, pulls, pushes, strict=True)
    return sum(
        _seconds_of_layer(width, dtype, max(1, int(count * share)), reads, writes, pinned)
        for width, count, reads, writes in layers
        if count
    )


def _seconds_of_layer(width: int, dtype: torch.dtype, rows: int, pulls: float, pushes: float, pinned: bool) -> float:
    """As ``seconds_of_rows``, of a table of so many rows."""
    generator = torch.Generator().manual_seed(0)
    store = HistoryStore(rows, [width], torch.arange(rows, device="cpu"), dtype=dtype, pinned=pinned)
    read, written = (max(1, min(int(number), rows)) for number in (pulls, pushes))
    order = torch.randperm(rows, generator=generator, device="cpu")
    values, best = torch.zeros(written, width, dtype=dtype, device="cpu"), None
    for number in range(TIMES):
        start = order[number * written % rows :]
        ids = [(start if len(start) >= count else order)[:count].sort().values for count in (written, read)]
        took = _tried(store, *ids, values, number)
        best = took if best is None else tuple(map(min, best, took))
    return best[0] * pushes / written + best[1] * pulls / read


def _tried(store: HistoryStore, pushed: Tensor, pulled: Tensor, values: Tensor, now: int) -> tuple[float, float]:
    """Seconds of writing and of reading."""
    start = time.perf_counter()
    store.push(0, pushed, values, now, replaced=store.room_for(0, pushed), once=True)
    between = time.perf_counter()
    store.pull(0, pulled, now)
    return between - start, time.perf_counter() - between


def seconds_to_prepare(macro: PartitionBatch, rows: HistoryRows, reuse: bool) -> float:
    """Seconds in which a macro-batch that was picked is made ready: slots, places of hidden rows, copies.

    Args:
        rows: which nodes have a hidden row. reuse: whether slots keep their rows.
    """
    slots = Slots(macro.ids[:0], 2 * macro.num_nodes + 1, rows.num_nodes, reuse)
    start = time.perf_counter()
    taken = slots.take(macro.ids, lambda size, dtype: torch.empty(size, dtype=dtype, device="cpu"))
    rows_of(macro, taken.slots, 0, *exchanged_rows(macro, rows.tables))
    for given in (macro.indptr, macro.indices, macro.seeds):
        given.clone()
    return time.perf_counter() - start
