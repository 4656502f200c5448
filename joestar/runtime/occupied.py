"""A folder in which one process writes at a time: another would number files alike, and remove what is not its own."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from joestar.errors import ConfigError

try:
    import fcntl
except ImportError:  # elsewhere than on Unix nobody is kept out
    fcntl = None

NAME = ".occupied"
WRITING, TRAINING = 60.0, 1.0
"""Seconds to wait for another process: while it writes a file, and before a run begins."""
_PAUSE = 0.02
_LOCK = threading.RLock()
_HELD: dict[Path, "_Entry"] = {}
"""Of this process, by folder."""


class _Entry:
    """Those of this process who are in a folder, or wait to be."""

    def __init__(self):
        self.lock = threading.Lock()
        self.within = self.asking = 0
        self.file: int | None = None


@contextlib.contextmanager
def occupied(folder: Path, seconds: float) -> Iterator[None]:
    """Within, no other process comes in; this one may, in any thread. It ends with the process, however that ends.

    Args:
        seconds: to wait for another process.

    Raises:
        ConfigError: another process is there.
    """
    folder = Path(folder).resolve()
    with _LOCK:
        entry = _HELD.setdefault(folder, _Entry())
        entry.asking += 1
    try:
        with entry.lock:
            if not entry.within:
                entry.file = _file(folder, seconds)
            entry.within += 1
        try:
            yield
        finally:
            with entry.lock:
                entry.within -= 1
                if not entry.within:
                    _leave(folder, entry)
    finally:
        with _LOCK:
            entry.asking -= 1
            if not entry.asking and _HELD.get(folder) is entry:
                del _HELD[folder]


def _leave(folder: Path, entry: _Entry) -> None:
    file, entry.file = entry.file, None
    if file is not None:
        if _is_there(file, folder):  # the folder may be another one by now
            with contextlib.suppress(OSError):
                os.unlink(folder / NAME)
        os.close(file)


def _forked() -> None:
    """A child is not who came in: its copies of the files would keep others out as long as it lives."""
    global _LOCK
    files = [entry.file for entry in _HELD.values() if entry.file is not None]
    _LOCK = threading.RLock()
    for entry in _HELD.values():
        entry.lock, entry.file = threading.Lock(), None
    _HELD.clear()
    for file in files:
        os.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _file(folder: Path, seconds: float) -> int | None:
    """A locked file in the folder; ``None`` where files cannot be locked."""
    if fcntl is None:
        return None
    until = time.monotonic() + seconds
    while True:
        try:
            file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # who cannot write here is told so by the write
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, folder):
                os.truncate(file, 0)
                os.write(file, str(os.getpid()).encode())
                return file
        except BlockingIOError:
            if time.monotonic() >= until:
                owner = os.pread(file, 32, 0).decode(errors="replace") or "another"
                os.close(file)
                raise ConfigError(
                    f"process {owner} writes checkpoints in {folder}: two runs would remove each other's. Wait until "
                    "it has ended, or give this run a folder of its own."
                ) from None
        except OSError:  # a file system without locks
            os.close(file)
            return None
        os.close(file)
        time.sleep(_PAUSE)


def _is_there(file: int, folder: Path) -> bool:
    """Whether the file that was locked still has its name: who leaves removes it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(folder / NAME))
    except OSError:
        return False
