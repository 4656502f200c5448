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
_HELD: dict[Path, list] = {}
"""Folder -> [number of those within, file]; of this process."""


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
        entry = _HELD.setdefault(folder, [0, None])
        if not entry[0]:
            try:
                entry[1] = _file(folder, seconds)
            except BaseException:
                del _HELD[folder]
                raise
        entry[0] += 1
    try:
        yield
    finally:
        with _LOCK:
            entry[0] -= 1
            if not entry[0]:
                del _HELD[folder]
                if entry[1] is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(folder / NAME)
                    os.close(entry[1])


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
