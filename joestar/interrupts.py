"""Ctrl-C and SIGTERM leave nothing half done: a step, a lock of a thread that others wait for."""

import _signal  # as ``signal``, which makes an enum of every handler: too slow for every step
import contextlib
import signal
import sys
import threading
import types
from collections.abc import Callable

_ENDING = int(signal.SIGINT), int(signal.SIGTERM)


class Whole(contextlib.AbstractContextManager):
    """Ctrl-C, and SIGTERM if something handles it, wait within, in the main thread, and act at its end.

    What is within happens as a whole, or fails by itself. A second signal acts at once.
    """

    _active = False
    """Whether the main thread is in one: what is further in waits for the outermost."""

    def __init__(self):
        self._before: dict[int, Callable] = {}
        self._waits: int | None = None

    def __enter__(self) -> "Whole":
        if not Whole._active and threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    _signal.signal(number, self._note)
            Whole._active = bool(self._before)
        return self

    def _note(self, number: int, frame: types.FrameType | None):
        if self._waits is not None:
            self._waits = None
            return self._before[number](number, frame)
        self._waits = number
        return None

    def __exit__(self, *error) -> None:
        if not self._before:
            return
        Whole._active = False
        for number, handler in reversed(self._before.items()):  # Ctrl-C last: it may end this loop
            if _signal.getsignal(number) == self._note:
                _signal.signal(number, handler)
        number, self._waits = self._waits, None
        if number is not None:
            self._before[number](number, sys._getframe(1))
