"""A folder in which one process writes at a time: another would number files alike, and remove what is not its own."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from joestar.errors import ConfigError
from joestar.interrupts import Whole

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
    visit = _Visit(Path(folder).resolve())
    try:
        try:
            visit.come(seconds)
            yield
        finally:
            visit.leave()
    finally:
        visit.leave()  # if an interrupt came in front of the first one


class _Visit:
    """A stay in a folder; what an interrupt breaks off leaves nothing behind: it would keep this process out, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entry: _Entry | None = None
        self.came = False

    def come(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with Whole(), _LOCK:
            self.entry = _HELD.setdefault(self.folder, _Entry())
            self.entry.asking += 1
        while not self.came:
            with Whole():
                owner = _come_in(self.folder, self.entry)
                self.came = owner is None
            if not self.came:
                if time.monotonic() >= until:
                    raise ConfigError(
                        f"process {owner} writes checkpoints in {self.folder}: two runs would remove each other's. "
                        "Wait until it has ended, or give this run a folder of its own."
                    )
                time.sleep(_PAUSE)

    def leave(self) -> None:
        with Whole(), _LOCK:
            if self.came:
                self.came = False
                _leave(self.folder, self.entry)
            if self.entry is not None:
                entry, self.entry = self.entry, None
                entry.asking -= 1
                if not entry.asking and _HELD.get(self.folder) is entry:
                    del _HELD[self.folder]


def _come_in(folder: Path, entry: _Entry) -> str | None:
    """Whether this process is in the folder now: ``None``, or who else is."""
    with entry.lock:
        if not entry.within:
            entry.file, owner = _file(folder)
            if owner is not None:
                return owner
        entry.within += 1
    return None


def _leave(folder: Path, entry: _Entry) -> None:
    with entry.lock:
        entry.within -= 1
        if entry.within or entry.file is None:
            return
        file, entry.file = entry.file, None
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


def _file(folder: Path) -> tuple[int | None, str | None]:
    """(a locked file in the folder, or ``None`` where files cannot be locked; the process that has locked it)."""
    if fcntl is None:
        return None, None
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # who cannot write here is told so by the write
        return None, None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(file, folder):
            os.truncate(file, 0)
            os.write(file, str(os.getpid()).encode())
            return file, None
        owner = "another"  # which has just left
    except BlockingIOError:
        owner = os.pread(file, 32, 0).decode(errors="replace") or "another"
    except OSError:  # a file system without locks
        os.close(file)
        return None, None
    os.close(file)
    return None, owner


def _is_there(file: int, folder: Path) -> bool:
    """Whether the file that was locked still has its name: who leaves removes it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(folder / NAME))
    except OSError:
        return False
