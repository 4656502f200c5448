"""Signals that end a program: SIGTERM as an exception, and both it and Ctrl-C leave nothing half done: a module that is
being imported, a step that is being made."""

import _signal  # as ``signal``, which makes an enum of every handler: too slow for every step
import _thread
import contextlib
import itertools
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator

_ENDING = int(signal.SIGINT), int(signal.SIGTERM)
EXIT = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended."""
_IMPORTING = "<frozen importlib"
"""What Python calls the code that imports modules."""
_SECONDS = 0.05
"""Until an interrupt is tried again that came while a module was imported."""


def _raise(number, frame) -> None:
    raise SystemExit(EXIT)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises ``SystemExit`` within, in the main thread, unless the program handles it itself."""
    free = threading.current_thread() is threading.main_thread()
    if not free or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class WholeImports(contextlib.ContextDecorator):
    """Ctrl-C waits within while a module is being imported, in the main thread; then the program's own handler acts.

    A module whose import was broken off is gone, but those that it had imported are there, and what it had registered
    stays registered: PyTorch's compiler and what it imports at its first use did not work any more after that.
    """

    def __enter__(self) -> "WholeImports":
        before = signal.getsignal(signal.SIGINT)
        if isinstance(before, _Patient) and not before.is_active():  # Ctrl-C in the instant of its entering
            before = before.before
        main = threading.current_thread() is threading.main_thread()
        if main and callable(before) and not isinstance(before, _Patient):
            signal.signal(signal.SIGINT, _Patient(before, _caller()))
        return self

    def __exit__(self, *error) -> None:
        if threading.current_thread() is threading.main_thread():
            held = signal.getsignal(signal.SIGINT)
            if isinstance(held, _Patient) and held.frame is _caller():
                signal.signal(signal.SIGINT, held.before)


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


def _caller() -> types.FrameType:
    """The frame that entered, or leaves, a ``with`` block or a function that is decorated."""
    return sys._getframe(2)


class _Patient:
    """A handler that lets another one, ``before``, act when nothing is imported further in than ``frame``."""

    def __init__(self, before: Callable, frame: types.FrameType):
        self.before, self.frame, self._waits = before, frame, False

    def __call__(self, number: int, frame: types.FrameType | None):
        if not self._imports(frame):
            return self.before(number, frame)
        if not self._waits:  # however often it is pressed
            self._waits = True
            again = threading.Timer(_SECONDS, self._send, (number,))
            again.daemon = True
            again.start()
        return None

    def _send(self, number: int) -> None:
        """Sends the main thread the signal again, which ends what it waits for."""
        self._waits = False
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident, number)
        else:
            _thread.interrupt_main(number)

    def is_active(self) -> bool:
        """Whether what it was made in goes on."""
        return self.frame in _frames(sys._getframe())

    def _imports(self, frame: types.FrameType | None) -> bool:
        further_in = itertools.takewhile(lambda each: each is not self.frame, _frames(frame))
        return any(each.f_code.co_filename.startswith(_IMPORTING) for each in further_in)


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and all that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back
