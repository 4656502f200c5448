"""What only one thread of a process may do at a time, although every step is a thread's own.

Tracing and compiling change tables of PyTorch that are the process's; a capture, with the runs before it, owns the
capture stream of its device. What is recorded is lost if anybody waits for the device meanwhile: ``synchronize`` and
``RECORDING.soon`` wait for its end.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Callable

import torch

from joestar.garbage import fewer_collections


class ProcessLock(contextlib.ContextDecorator):
    """A reentrant lock that is free again in a forked child: the thread that held it does not exist there."""

    def __init__(self):
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> "ProcessLock":
        self._lock.acquire()
        return self

    def __exit__(self, *args) -> None:
        self._lock.release()


class TracingLock(ProcessLock):
    """Nearly all that tracing and compiling make stays, so that there is little to collect."""

    def __enter__(self) -> "TracingLock":
        super().__enter__()
        fewer_collections.__enter__()
        return self

    def __exit__(self, *args) -> None:
        fewer_collections.__exit__()
        super().__exit__(*args)


class RecordingLock(ProcessLock):
    """Held while a CUDA graph is recorded, by the thread that does; keeps what must not happen then."""

    def _renew(self) -> None:
        super()._renew()
        self._inside = 0
        self._later: collections.deque[Callable[[], None]] = collections.deque()

    def __enter__(self) -> "RecordingLock":
        super().__enter__()
        self._inside += 1
        return self

    def __exit__(self, *args) -> None:
        self._inside -= 1
        super().__exit__(*args)
        self._catch_up()

    def soon(self, action: Callable[[], None], now: bool = True) -> None:
        """Calls ``action`` while nothing is recorded: now, or at the end of what is, in whatever thread.

        For finalizers, which the garbage collector calls in any thread, at any time; does not wait. ``now=False``, in a
        thread that records without this lock: not before the next call.
        """
        self._later.append(action)
        if now:
            self._catch_up()

    def settle(self) -> None:
        """All that was put off has happened."""
        with self:
            pass

    def _catch_up(self) -> None:
        while self._later and self._lock.acquire(blocking=False):  # else who holds it does so when it lets go
            try:
                if self._inside:  # by this very thread
                    return
                self._inside += 1
                try:
                    while self._later:
                        self._later.popleft()()
                finally:
                    self._inside -= 1
            finally:
                self._lock.release()


TRACING = TracingLock()
CAPTURING = ProcessLock()
RECORDING = RecordingLock()


def synchronize(device: torch.device | int | None = None) -> None:
    """``torch.cuda.synchronize``, but not while another thread records a CUDA graph: that would be lost.

    Not for threads that somebody waits for who records: autograd's run backward passes of what is recorded.
    """
    with RECORDING:
        torch.cuda.synchronize(device)
