"""Timing, memory and launches of a step; what measurements are given."""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from joestar.errors import ConfigError

SHORT, MANY = 0.3, 100
"""Epochs are repeated until they took so many seconds, or were so many."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass
class Timing:
    """Milliseconds per step: median, 20th and 80th percentile (as NumPy's), and how many steps were timed."""

    median: float
    p20: float
    p80: float
    steps: int

    @classmethod
    def of(cls, milliseconds: list[float], group: int = 1) -> "Timing":
        """The statistics of some steps, or of means over groups of so many."""
        several = milliseconds if len(milliseconds) > 1 else 2 * milliseconds
        fifths = statistics.quantiles(several, n=5, method="inclusive")
        return cls(statistics.median(milliseconds), fifths[0], fifths[-1], group * len(milliseconds))


def time_steps(step: Callable[[], object], steps: int, warm_up: int, device: torch.device, group: int = 1) -> Timing:
    """Times ``steps`` calls after ``warm_up`` others; on a GPU by events around groups of ``group`` calls.

    Groups let the host run ahead as it does in training: what is timed is throughput, not latency.
    """
    for _ in range(warm_up):
        step()
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return Timing.of(times)
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(max(1, steps // group) + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(group):
            step()
        mark.record()
    torch.cuda.synchronize(device)
    return Timing.of([before.elapsed_time(after) / group for before, after in itertools.pairwise(marks)], group)


@dataclass
class Epochs:
    """Whole epochs by the wall clock, set-up and end included.

    Attributes:
        seconds: median of an epoch, ``count`` of them; steps: of an epoch, the last of which may be smaller.
        ms_per_step: of the whole loop. one_step_ms: median of an epoch of a single step.
        set_up_ms: what ``one_step_ms`` has beyond a step; rest_ms: what an epoch has beyond its steps.
    """

    seconds: float
    count: int
    steps: int
    ms_per_step: float
    one_step_ms: float
    set_up_ms: float
    rest_ms: float


def time_epochs(
    epoch: Callable[[int | None], object], steps: int, step_ms: float, device: torch.device, epochs: int, short: int = 5
) -> Epochs:
    """Times ``epochs`` whole epochs (more, while they take less than ``SHORT`` seconds), and ``short`` of one step.

    Args:
        epoch: carries out an epoch of so many steps, ``None`` for all. steps: of a whole one.
        step_ms: median of a step, what ``set_up_ms`` and ``rest_ms`` are measured against.
    """
    whole = _walls(lambda: epoch(None), epochs, device)
    single = _walls(lambda: epoch(1), short, device)
    seconds, one = statistics.median(whole), statistics.median(single) * 1e3
    return Epochs(
        seconds, len(whole), steps, seconds * 1e3 / steps, one, one - step_ms, seconds * 1e3 - steps * step_ms
    )


def _walls(call: Callable[[], object], least: int, device: torch.device) -> list[float]:
    """Seconds of each call, at least ``least`` of them, more while they are short."""
    times: list[float] = []
    while len(times) < least or (sum(times) < SHORT and len(times) < MANY):
        start = _now(device)
        call()
        times.append(_now(device) - start)
    return times


def _now(device: torch.device) -> float:
    """The clock when everything launched has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def launches(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """Kernel and graph launches, kernels run and host synchronisations per step on a GPU, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
    found = {"launches": 0, "kernels": 0, "syncs": 0}
    for event in trace.events():
        name = event.name
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found["kernels"] += 1
        elif name in LAUNCHES:
            found["launches"] += 1
        elif name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            found["syncs"] += 1
    found["syncs"] = max(0, found["syncs"] - 1)  # the profiler's own, when it stops
    return {name: count / steps for name, count in found.items()}


def kernel_times(step: Callable[[], object], steps: int = 5) -> list[tuple[str, float, float]]:
    """(kernel, microseconds per step, calls per step), longest first."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = totals.setdefault(event.name, [0.0, 0])
            entry[0] += event.device_time
            entry[1] += 1
    rows = [(name, time / steps, calls / steps) for name, (time, calls) in totals.items()]
    return sorted(rows, key=lambda row: -row[1])


class PeakMemory:
    """Peak bytes beyond what was there at the start: reserved memory on a GPU, resident memory on a CPU (Linux)."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.before = torch.cuda.memory_reserved(device) if device.type == "cuda" else _resident("VmRSS")

    def forget(self) -> None:
        """Starts the peak anew: what compiling and tuning took does not count."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        """Peak since ``forget``, less what was there at the start."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) - self.before
        return max(0, _resident("VmHWM") - self.before)


def _resident(field: str) -> int:
    """A field of this process's status in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def check_some(**given: Iterable[object]) -> None:
    """Raises ``ConfigError`` where nothing is named of what there has to be."""
    for what, found in given.items():
        if not tuple(found):
            raise ConfigError(f"there is nothing to measure: no {what.replace('_', ' ')} is given.")


def check_words(**given: tuple[Iterable[str], Iterable[str]]) -> None:
    """Raises ``ConfigError`` for words that there are not; what they are of -> (words, those that there are)."""
    for what, (words, known) in given.items():
        for word in words:
            if word not in known:
                raise ConfigError(f"unknown {what.replace('_', ' ')} {word!r}: choose from {', '.join(known)}.")
