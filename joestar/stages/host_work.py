"""What a piece of work takes of the host: how long it is alone, and how long all of its threads are at it."""

import os
import time
from typing import NamedTuple

from joestar.kernels import has_native


class HostWork(NamedTuple):
    """Seconds: ``alone`` by the clock with nothing beside it, ``threads`` of processors, of all threads together.

    Two pieces of work that run beside each other share the processors: neither ends sooner than alone, nor both before
    the processors have done what both need.
    """

    alone: float = 0.0
    threads: float = 0.0

    def __add__(self, other: "HostWork") -> "HostWork":
        return HostWork(self.alone + other.alone, self.threads + other.threads)

    def __mul__(self, times: float) -> "HostWork":
        return HostWork(self.alone * times, self.threads * times)


def now() -> HostWork:
    """Both clocks; seconds since some moment, and since the process began."""
    return HostWork(time.perf_counter(), time.process_time())


def since(start: HostWork) -> HostWork:
    """What was done since ``now`` gave ``start``."""
    return now() + start * -1.0


def processors() -> int:
    """How many the stages on the host keep busy."""
    if not has_native():
        return 1
    from joestar.kernels.machine import num_threads

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_threads(), usable)
