"""What only one thread of a process may do at a time, although every step is a thread's own.

Tracing and compiling change tables of PyTorch that are the process's; a capture owns the capture stream of its device.
"""

import contextlib
import os
import threading

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


TRACING = TracingLock()
CAPTURING = ProcessLock()
