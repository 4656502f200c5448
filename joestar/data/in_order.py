"""Pieces of work by several threads, whose results come in the order of the pieces."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_THREADS = 16


def threads_for(limit: int, share: int) -> int:
    """How many threads work in ``limit`` bytes where each should have ``share``; at most a core's each."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), limit // share))


def in_order(pool: ThreadPoolExecutor, work: Callable, items: Iterable, ahead: int) -> Iterator[Any]:
    """``map`` by threads, in order, at most ``ahead`` items at a time."""
    waiting: deque = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
