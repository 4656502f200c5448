"""How fast rows and bytes move on this machine, measured once and remembered, for the planner.

The file ``bandwidth.json`` lies beside the launch settings (``tune.json``); ``JOESTAR_CACHE`` says where.
"""

import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from joestar.cache import cache_folder
from joestar.kernels import has_native
from joestar.kernels.digest import source_digest
from joestar.kernels.tune import write_beside
from joestar.store.fill import fill_rows, host_gather
from joestar.store.pinned import pinned_empty, resolved

SOURCE_BYTES = 2**29
"""Host memory that rows are gathered from; a quarter of them, about as dense as a large macro-batch takes them."""
SPARSE = (16, 64, 256)
"""One row of so many is what smaller ones, and single mini-batches, take: the fewer rows of a page, the more addresses
there are to translate."""
PEER_BYTES = 2**28
"""Memory of all ranks together that rows are read from, to see how fast that is."""
_DENSITY = 4
_REPEATS = 3
_FORMAT = 2


@dataclass(frozen=True)
class Speeds:
    """Billions of bytes per second; on a CPU, where nothing crosses a bus, copies and gathers within its memory.

    Attributes:
        row_bytes: size of the rows that were gathered.
        host_to_device, device_to_host: copies of page-locked memory.
        zero_copy: rows by ascending ids, a quarter of all, read in place by the GPU, into slots; ``every_N``: the
            same for one row of so many, 0 where it was not measured.
        device: a copy on the device, bytes read and written.
        host_gather: rows by ascending ids into page-locked memory, by the CPU's threads.
    """

    row_bytes: int
    host_to_device: float
    device_to_host: float
    zero_copy: float
    device: float
    host_gather: float
    every_16: float = 0.0
    every_64: float = 0.0
    every_256: float = 0.0

    @property
    def sparse(self) -> dict[int, float]:
        """``zero_copy`` by one row of how many is read, as far as it was measured."""
        found = {_DENSITY: self.zero_copy, **{every: getattr(self, f"every_{every}") for every in SPARSE}}
        return {every: rate for every, rate in found.items() if rate}


def speeds(device: torch.device | str | None = None, row_bytes: int = 512, again: bool = False) -> Speeds:
    """What moves how fast on this machine; measured on first use (under a second on a GPU), then read from the file.

    Args:
        device: a GPU or the CPU; by default the current GPU if there is one. row_bytes: of a row, for the gathers;
            rounded up to a multiple of 16.
        again: measure even if the file knows.
    """
    device, row_bytes = resolved(device), -(-max(row_bytes, 1) // 16) * 16
    path, name = file(), _name(device, row_bytes)
    known = _read(path)
    if not again and name in known:
        return known[name]
    found = measure(device, row_bytes)
    _store(path, {**known, name: found})
    return found


def measure(device: torch.device, row_bytes: int) -> Speeds:
    """The speeds, measured now."""
    rows = max(*SPARSE, SOURCE_BYTES // row_bytes)
    source = pinned_empty((rows, row_bytes), torch.uint8, device)
    source.host.fill_(1)
    ids = _spread(rows, _DENSITY)
    count = ids.numel()
    moved = count * row_bytes
    staging = pinned_empty((count, row_bytes), torch.uint8, device)
    near = torch.empty((count, row_bytes), dtype=torch.uint8, device=device)
    away = torch.empty_like(near)
    slots = torch.arange(count, device=device)
    timed = functools.partial(seconds_of, device)

    def host_side() -> None:
        host_gather(source.host, ids, staging.host)

    def rate(size: int, work: Callable[[], object], clock=timed) -> float:
        return size / clock(work) / 1e9

    def zero_copy(every: int) -> float:
        """What three quarters of the rows add to the first one: a launch takes as long as a good part of them here, and
        is nothing to a macro-batch."""
        there = _spread(rows, every).to(device)
        some, read = there.numel() // 4, there.numel()
        all_of_them = timed(lambda: fill_rows(source.view, there, slots[:read], near))
        few = timed(lambda: fill_rows(source.view, there[:some], slots[:some], near)) if some else 0.0
        if all_of_them - few < all_of_them / 4:  # no clock for so few
            some, few = 0, 0.0
        return (read - some) * row_bytes / (all_of_them - few) / 1e9

    gathered = rate(moved, host_side, _seconds) if has_native() else 0.0
    return Speeds(
        row_bytes=row_bytes,
        host_to_device=rate(moved, lambda: near.copy_(staging.host, non_blocking=True)),
        device_to_host=rate(moved, lambda: staging.host.copy_(near, non_blocking=True)),
        zero_copy=zero_copy(_DENSITY),
        device=rate(2 * moved, lambda: away.copy_(near)),
        host_gather=gathered,
        **{f"every_{every}": zero_copy(every) for every in SPARSE},
    )


def peer_rate(group, row_bytes: int = 512) -> float:
    """Billions of bytes per second that a rank reads from others' memory, row by row, all ranks at a time.

    Only rows of other ranks are read, as many as a quarter of the table. The smallest of the ranks' rates.
    """
    from joestar.store.sharded import STRIPE
    from joestar.store.spread import shard  # which needs this module's neighbours

    with group.board.at("joestar.store.plan_features", long=True):
        width = -(-max(row_bytes, 1) // 4)
        rows = max(STRIPE * group.world, PEER_BYTES // (4 * width))
        source = shard(torch.zeros(1, dtype=torch.float32, device="cpu").expand(rows, width))
        random = torch.Generator("cpu").manual_seed(group.rank)
        ids = torch.randint(0, rows, (max(STRIPE, rows // _DENSITY),), generator=random, device="cpu")
        ids = ids[ids // STRIPE % group.world != group.rank].to(group.device)
        group.exchange("joestar.store.plan_features (rows)")
        found = ids.numel() * width * 4 / seconds_of(group.device, lambda: source.rows(ids)) / 1e9
        met = group.exchange("joestar.store.plan_features (rates)", {"rate": found})
        if hasattr(source, "close"):
            source.close()
        return min(each["rate"] for each in met)


def _spread(rows: int, every: int) -> Tensor:
    """One row of so many, at uneven distances, ascending."""
    random = torch.Generator("cpu").manual_seed(0)
    first = torch.arange(0, rows - rows % every, every, device="cpu")
    return first + torch.randint(0, every, first.shape, generator=random, device="cpu")


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """What ``work`` takes, on a GPU between its first and last kernel on the current stream: the median of three times,
    behind a first one that is not counted."""
    return _device_seconds(work) if device.type == "cuda" else _seconds(work)


def _seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def _device_seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return max(statistics.median(times), 1e-9)


def file() -> Path:
    """Where measured speeds are kept."""
    return cache_folder() / "bandwidth.json"


def _name(device: torch.device, row_bytes: int) -> str:
    """What the speeds depend on: device, threads, code."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads = 0
    if has_native():
        from joestar.kernels.machine import num_threads

        threads = num_threads()
    return f"{what}, {threads} threads of {os.cpu_count()}, rows of {row_bytes}, {source_digest('store')}"


def _read(path: Path) -> dict[str, Speeds]:
    """What the file holds; nothing if it is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            return {}
        known = {name: Speeds(**values) for name, values in content["speeds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: found for name, found in known.items() if _sound(found)}


def _sound(found: Speeds) -> bool:
    return all(isinstance(getattr(found, f.name), (int, float)) for f in fields(Speeds))


def _store(path: Path, known: dict[str, Speeds]) -> None:
    """Written beside and renamed; where that fails, the speeds are measured again by the next process."""
    content = {"format": _FORMAT, "speeds": {name: asdict(found) for name, found in list(known.items())[-32:]}}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path, content)
