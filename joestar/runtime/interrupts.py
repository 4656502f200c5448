"""SIGTERM, as batch systems send it before they kill a process, becomes an exception that ``fit`` can act on."""

import contextlib
import signal
import threading
from collections.abc import Iterator

EXIT = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended."""


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
