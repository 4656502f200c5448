"""Writes a converted folder: into ``NAME.partial-...`` beside it, checked and renamed at the end.

Arrays are written by ``write``, never through a map of the file: a full disk is then an error and not a crash, and
written pages do not count as memory of the process.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from joestar.data.checksums import checksum
from joestar.data.folder_meta import FORMAT, META, PARTIAL, new_meta
from joestar.errors import DataError

HEADER = 128
"""Bytes of an ``.npy`` header: it is written at the end, when the number of rows is known."""
LOCK = "lock"
"""A file that whoever writes a folder has locked; the system lets go of it when the process ends."""
STORED = {"bfloat16": "<i2"}
"""NumPy has no bfloat16: its bits are kept as int16."""


class ArrayFile:
    """An ``.npy`` file ``[rows, *width]`` that is written from its beginning to its end, or gone on with.

    Args:
        dtype: NumPy's, or ``"bfloat16"`` (bits, given as int16). rows: how many are there already.
    """

    def __init__(self, path: Path, dtype: str, width: tuple[int, ...] = (), rows: int = 0):
        self.path, self.dtype, self.width, self.rows = path, dtype, tuple(width), rows
        self.stored = np.dtype(STORED.get(dtype, dtype))
        self.row_bytes = self.stored.itemsize * int(np.prod(self.width, dtype=np.int64))
        self.file = open_to_append(path, HEADER + rows * self.row_bytes if rows else 0)
        if not rows:
            write_all(self.file, np.zeros(HEADER, np.uint8))

    def append(self, values: np.ndarray) -> None:
        """Writes the next rows."""
        write_all(self.file, np.ascontiguousarray(values, dtype=self.stored))
        self.rows += len(values)

    def close(self) -> dict[str, Any]:
        """Writes the header and the rest to the disk: (shape, dtype, bytes) for ``meta.json``."""
        shape = (self.rows, *self.width)
        text = f"{{'descr': {self.stored.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
        self.file.seek(0)
        header = b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.encode().ljust(HEADER - 11) + b"\n"
        write_all(self.file, np.frombuffer(header, np.uint8))
        os.fsync(self.file.fileno())
        self.file.close()
        return {"shape": list(shape), "dtype": self.dtype, "bytes": HEADER + self.rows * self.row_bytes}


class FolderWriter:
    """The folder that is written, and its name while it is; nobody else writes there meanwhile.

    Args:
        target: where the graph will lie. overwrite: replace a converted folder there.
        tag: what comes after ``.partial-``; the same tag finds the folder again.
        resume: whether to go on with what is there under that tag.

    Raises:
        DataError: there is something at ``target``, or another process writes under the same tag.
    """

    def __init__(self, target: Path, *, overwrite: bool = False, tag: str | None = None, resume: bool = False):
        self.target, self.overwrite, self.settled = check_target(target, overwrite), overwrite, False
        self.folder = self.target.with_name(f"{self.target.name}{PARTIAL}{tag or uuid.uuid4().hex[:12]}")
        self.arrays: dict[str, dict] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / LOCK, "w")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise DataError(f"{self.folder}: another process is writing the same graph here. Wait for it.") from None
        if not resume:
            self._clear({LOCK})

    def open(self, key: str, dtype: str, width: tuple[int, ...] = (), rows: int = 0) -> ArrayFile:
        """The file of an array."""
        check_key(key)
        return ArrayFile(self.folder / f"{key}.npy", dtype, width, rows)

    def write(self, key: str, values: np.ndarray, dtype: str | None = None) -> None:
        """A whole array; ``dtype`` where NumPy's is not its own (bfloat16)."""
        little = values.dtype.newbyteorder("<") if values.dtype.itemsize > 1 else values.dtype
        file = self.open(key, dtype or little.name, values.shape[1:])
        file.append(values)
        self.keep(key, file)

    def keep(self, key: str, file: ArrayFile) -> None:
        """Closes a file that is complete."""
        self.arrays[key] = file.close()

    def finish(self, **facts: Any) -> Path:
        """``complete`` and ``settle``."""
        self.complete(**facts)
        return self.settle()

    def complete(self, **facts: Any) -> None:
        """Adds checksums and, as the last thing, ``meta.json``."""
        for key, entry in self.arrays.items():
            entry["sha256"] = checksum(self.folder / f"{key}.npy")
        write_json(self.folder / META, new_meta(self.arrays, **facts))

    def settle(self) -> Path:
        """Clears a complete folder of what was needed on the way, and gives it its name."""
        self._clear({META, *(f"{key}.npy" for key in json.loads((self.folder / META).read_text())["arrays"])})
        check_target(self.target, self.overwrite)  # again: somebody may have been quicker
        _move(self.folder, self.target)
        self.settled = True
        return self.target

    def discard(self) -> None:
        """Removes what was written, unless it has got its name."""
        if not self.settled:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets others write."""
        self.lock.close()

    def _clear(self, but: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.name not in but:
                path.unlink()


def check_target(target: Path, overwrite: bool, sources: Iterable[Path] = ()) -> Path:
    """The path, of a link that which it leads to.

    Args:
        sources: what is read to write there.

    Raises:
        DataError: something is there, unless it is a converted folder, nothing else lies in it, and it may be replaced.
    """
    target = Path(target).expanduser().absolute()
    if PARTIAL in target.name:
        raise DataError(f"{target}: names with {PARTIAL!r} are those of half-written folders; choose another.")
    if not target.exists() and not target.is_symlink():
        return target
    if not overwrite:
        raise DataError(
            f"{target} exists already; pass overwrite=True (--overwrite) to replace it, or choose another folder."
        )
    place = target.resolve()
    reason = _not_to_replace(place)
    if reason is None:
        inside = next((path for path in sources if path.resolve().is_relative_to(place)), None)
        reason = None if inside is None else f"it holds {inside}, which is read"
    if reason is not None:
        raise DataError(f"{target} exists already; {reason}, so it is left alone; choose another folder.")
    return place


def _not_to_replace(folder: Path) -> str | None:
    """Why a folder is more than a converted graph; ``None`` if it is just that."""
    try:
        meta = json.loads((folder / META).read_text())
    except (OSError, ValueError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not isinstance(meta.get("arrays"), dict):
        return "it is no converted graph"
    foreign = sorted({path.name for path in folder.iterdir()} - {META, *(f"{key}.npy" for key in meta["arrays"])})
    shown = ", ".join(foreign[:4]) + (", ..." if len(foreign) > 4 else "")
    return f"it holds {shown} beside a converted graph" if foreign else None


def check_key(key: str) -> None:
    """Raises unless an array may be called so."""
    if not key.replace("_", "").replace(".", "").replace("-", "").isalnum():
        raise DataError(f"the name {key!r} cannot be a file name; use letters, digits, '_', '-' and '.'.")


def open_to_append(path: Path, size: int):
    """A file to be gone on with behind its first ``size`` bytes; what is beyond is cut off.

    Raises:
        DataError: it is shorter: somebody else has changed it.
    """
    file = open(path, "r+b" if size else "wb", buffering=0)  # noqa: SIM115 - closed by who writes
    if os.fstat(file.fileno()).st_size < size:
        file.close()
        raise DataError(f"{path}: the file is shorter than it was when the conversion stopped. Run it again.")
    file.truncate(size)
    file.seek(size)
    return file


def write_all(file, values: np.ndarray) -> None:
    """Writes an array's bytes; a full disk raises ``OSError`` (one ``write`` may take less than all)."""
    left = memoryview(values).cast("B") if values.size else memoryview(b"")
    while left:
        left = left[file.write(left[: 1 << 30]) :]


def write_json(path: Path, content: dict, *, lasting: bool = True) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one; if ``lasting``, after a power cut, too."""
    beside = path.with_suffix(".new")
    with open(beside, "w") as file:
        file.write(json.dumps(content, indent=1 if lasting else None) + "\n")
        file.flush()
        if lasting:
            os.fsync(file.fileno())
    beside.replace(path)


def full(path: Path, error: OSError) -> DataError:
    """What to say of an error of the disk."""
    return DataError(f"{path}: cannot write the graph ({error}). Is there space, and permission?")


def _move(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    else:
        old = target.with_name(f"{target.name}{PARTIAL}old-{uuid.uuid4().hex[:8]}")
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
