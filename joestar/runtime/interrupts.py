"""Signals that end a program: SIGTERM as an exception, none leaves a module half imported, and none is lost."""

import _thread
import contextlib
import itertools
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator

from joestar.interrupts import Whole

__all__ = ["EXIT", "Whole", "WholeImports", "terminable"]

EXIT = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended."""
_ENDING = signal.SIGINT, signal.SIGTERM
_IMPORTING = "<frozen importlib"
"""What Python calls the code that imports modules."""
_SECONDS = 0.05
"""Until an interrupt is tried again that came while a module was imported."""


class Terminated:
    """What became of SIGTERM: ``came`` is the exception that it raised, or ``None``."""

    came: SystemExit | None = None

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        self.came = SystemExit(EXIT)
        raise self.came

    def check(self) -> None:
        """Raises what was lost on the way: of a finaliser, or of C++ that asked Python, errors are passed over."""
        if self.came is not None:
            raise self.came


@contextlib.contextmanager
def terminable() -> Iterator[Terminated]:
    """SIGTERM raises ``SystemExit`` within, in the main thread, unless the program handles it itself."""
    handler = Terminated()
    free = threading.current_thread() is threading.main_thread()
    if not free or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield handler
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class WholeImports(contextlib.ContextDecorator):
    """Ctrl-C and SIGTERM wait within while a module is being imported, in the main thread; then the program's own
    handler acts. What it raises leaves the block, whatever came of it on the way.

    A module whose import was broken off is gone, but those that it had imported are there, and what it had registered
    stays registered: PyTorch's compiler and what it imports at its first use did not work any more after that. Where
    PyTorch's C++ asks Python for a size, it makes a ``TypeError`` of an interrupt, or of nothing.
    """

    def __enter__(self) -> "WholeImports":
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                before = signal.getsignal(number)
                if isinstance(before, _Patient) and not before.is_active():  # a signal in the instant of its entering
                    before = before.before
                if callable(before) and not isinstance(before, _Patient):
                    signal.signal(number, _Patient(before, _caller()))
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        raised = None
        for number in _ENDING:
            held = signal.getsignal(number)
            if isinstance(held, _Patient) and held.frame is _caller():
                signal.signal(number, held.before)
                raised, held.raised = held.raised or raised, None
        if raised is not None and (error is None or isinstance(error, Exception)) and error is not raised:
            raise raised from error


def _caller() -> types.FrameType:
    """The frame that entered, or leaves, a ``with`` block or a function that is decorated."""
    return sys._getframe(2)


class _Patient:
    """A handler that lets another one, ``before``, act when nothing is imported further in than ``frame``.

    Attributes:
        raised: by that one.
    """

    def __init__(self, before: Callable, frame: types.FrameType):
        self.before, self.frame, self._waits = before, frame, False
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: types.FrameType | None):
        if not self._imports(frame):
            try:
                return self.before(number, frame)
            except BaseException as error:
                self.raised = error
                raise
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
