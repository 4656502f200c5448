"""Rows of arrays on disk, read piece by piece into memory of their own: ``.npy`` files, members of ``.npz`` archives.

Nothing is mapped: what is read counts once, and is gone when it is let go.
"""

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from joestar.data.archive import DAMAGED, LOCAL_HEADER, check_size, header_of
from joestar.errors import DataError


class Rows(Protocol):
    """Something with rows that are read in pieces, from the first to the last.

    Attributes:
        shape, dtype: of all of it. where: how messages call it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    where: str

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``."""


@contextlib.contextmanager
def reading(where: str, *errors: type[Exception]) -> Iterator[None]:
    """Makes errors of the disk, and ``errors``, a ``DataError`` of what is read: others are of what is written."""
    try:
        yield
    except (OSError, *errors) as error:
        raise DataError(f"{where}: it cannot be read ({error}). Is the file complete?") from error


class MemoryRows:
    """Rows of an array."""

    def __init__(self, array: np.ndarray, where: str):
        self.array, self.where, self.shape, self.dtype = array, where, array.shape, array.dtype

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``."""
        return self.array[first : first + count]


class FileRows:
    """Rows of a C-ordered array of which a file has the bytes from ``offset``.

    Raises:
        DataError: the file is too short.
    """

    def __init__(self, path: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...], where: str):
        self.path, self.offset, self.dtype, self.shape, self.where = path, offset, dtype, tuple(shape), where
        self.width = math.prod(self.shape[1:])
        self.row_bytes = self.width * dtype.itemsize
        has, needs = path.stat().st_size, offset + self.shape[0] * self.row_bytes
        if has < needs:
            raise DataError(
                f"{where}: the file is truncated: {list(shape)} of {dtype} need {needs:,} bytes, but there are {has:,}"
                ". Is the download complete?"
            )

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``."""
        count = max(0, min(count, self.shape[0] - first))
        with reading(self.where), open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset + first * self.row_bytes)
            values = np.fromfile(file, self.dtype, count * self.width)
        if values.size != count * self.width:
            raise DataError(f"{self.where}: the file ended at row {first + values.size // max(self.width, 1)}.")
        return values.reshape(count, *self.shape[1:])


class PackedRows:
    """Rows of a compressed member of a ``.npz`` archive: read from its beginning to its end, skipping forwards."""

    def __init__(self, path: Path, member: str, dtype: np.dtype, shape: tuple[int, ...], header: int, where: str):
        self.path, self.member, self.dtype, self.shape, self.where = path, member, dtype, tuple(shape), where
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        self.header, self.stream, self.at = header, None, 0

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``."""
        count = max(0, min(count, self.shape[0] - first))
        try:
            if self.stream is None or first < self.at:
                self.archive = zipfile.ZipFile(self.path)
                self.stream, self.at = self.archive.open(self.member), 0
                self.stream.read(self.header)
            self._skip((first - self.at) * self.row_bytes)
            values = np.empty((count, *self.shape[1:]), self.dtype)
            self._fill(memoryview(values).cast("B") if values.size else memoryview(b""))
        except DAMAGED as error:
            raise DataError(
                f"{self.where}: it cannot be unpacked ({error}), after row {self.at}. Is the download complete?"
            ) from error
        self.at = first + count
        return values

    def _skip(self, left: int) -> None:
        while left > 0:
            piece = self.stream.read(min(left, 1 << 22))
            if not piece:
                raise EOFError("the data end too early")
            left -= len(piece)

    def _fill(self, into: memoryview) -> None:
        while into:
            piece = self.stream.read(min(len(into), 1 << 22))
            if not piece:
                raise EOFError("the data end too early")
            into[: len(piece)] = piece
            into = into[len(piece) :]


class ColumnRows:
    """Rows of a Fortran-ordered array ``[rows, width]``: the rows of ``columns`` are its columns."""

    def __init__(self, columns: FileRows):
        self.columns, self.dtype, self.where = columns, columns.dtype, columns.where
        self.shape = columns.shape[::-1]

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``."""
        count = max(0, min(count, self.shape[0] - first))
        made = np.empty((count, self.shape[1]), self.dtype)
        flat = self.columns
        with reading(self.where), open(flat.path, "rb", buffering=0) as file:
            for place in range(self.shape[1]):
                file.seek(flat.offset + (place * self.shape[0] + first) * self.dtype.itemsize)
                made[:, place] = np.fromfile(file, self.dtype, count)
        return made


def npy_rows(path: Path) -> Rows:
    """Rows of an ``.npy`` file.

    Raises:
        DataError: it is none, or truncated.
    """
    try:
        with open(path, "rb") as file:
            dtype, shape, fortran = _header(file)
            offset = file.tell()
    except DAMAGED as error:
        raise DataError(f"{path}: expected an .npy file of numbers, but it cannot be read ({error}).") from None
    return _in_order(path, offset, dtype, shape, fortran, str(path))


def npz_rows(path: Path, key: str) -> Rows:
    """Rows of a member of an ``.npz`` archive, packed or not.

    Raises:
        DataError: the archive cannot be read, or has no such member.
    """
    where = f"{path}, {key!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(f"{key}.npy")
            with archive.open(info) as member:
                dtype, shape, fortran = _header(member)
                header = member.tell()
                check_size(shape, dtype, info.file_size - header)
    except KeyError:
        raise DataError(f"{path}: the key {key!r} is missing; the file has {', '.join(npz_keys(path))}.") from None
    except DAMAGED as error:
        raise DataError(f"{where}: expected an array of numbers, but it cannot be read ({error}).") from None
    if info.compress_type == zipfile.ZIP_STORED:
        with open(path, "rb") as file:
            file.seek(info.header_offset)
            name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        offset = info.header_offset + LOCAL_HEADER.size + name + extra + header
        return _in_order(path, offset, dtype, shape, fortran, where)
    if fortran and len(shape) > 1:
        raise DataError(f"{where}: it is packed and in Fortran's order; save it with numpy.ascontiguousarray.")
    return PackedRows(path, info.filename, dtype, shape, header, where)


def npz_keys(path: Path) -> list[str]:
    """Names of the arrays of an archive.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return sorted(name.removesuffix(".npy") for name in archive.namelist())
    except DAMAGED as error:
        raise DataError(f"{path}: expected a NumPy .npz archive, but it cannot be read ({error}).") from None


def _header(file) -> tuple[np.dtype, tuple[int, ...], bool]:
    shape, fortran, dtype = header_of(file)
    if dtype.hasobject or dtype.kind not in "iufb":
        raise ValueError(f"it holds {dtype}, which are no numbers")
    if not shape:
        raise ValueError("it is a single number")
    return dtype, shape, fortran


def _in_order(path: Path, offset: int, dtype: np.dtype, shape: tuple, fortran: bool, where: str) -> Rows:
    if not fortran or len(shape) == 1:
        return FileRows(path, offset, dtype, shape, where)
    if len(shape) > 2:
        raise DataError(f"{where}: expected an array of one or two dimensions; got {list(shape)}.")
    return ColumnRows(FileRows(path, offset, dtype, shape[::-1], where))
