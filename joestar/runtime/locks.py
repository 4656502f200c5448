"""What only one thread of a process may do at a time, although every step is a thread's own.

Tracing and compiling change tables of PyTorch that are the process's; a capture owns the capture stream of its device.
"""

import contextlib
import os
import threading


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


TRACING = ProcessLock()
CAPTURING = ProcessLock()
