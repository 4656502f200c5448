"""How much of the time a GPU is at work: kernels as the profiler sees them, over a number of steps."""

import itertools
from collections.abc import Iterable, Iterator

import torch

SKIPPED, COUNTED = 10, 200
"""Steps of an epoch that are let pass, then those whose kernels are counted."""


def united(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end)."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def busy_share(losses: Iterator, device: torch.device, seconds_per_step: float) -> float | None:
    """Share of an epoch's time in which at least one kernel runs; ``None`` on a CPU, or if the profiler sees none.

    Kernels' times are the profiler's, the time of a step is given: that of epochs which nobody looked at. What copies
    without a kernel does not count; a kernel that waits for the bus does.

    Args:
        losses: steps of an epoch of its own, of which ``SKIPPED + COUNTED`` are taken. seconds_per_step: of others.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    _take(losses, SKIPPED)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        steps = _take(losses, COUNTED)
        torch.cuda.synchronize(device)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not kernels or not steps:
        return None
    return min(1.0, united(kernels) / 1e6 / (steps * seconds_per_step))


def _take(losses: Iterator, number: int) -> int:
    return sum(1 for _ in itertools.islice(losses, number))
