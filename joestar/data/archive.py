"""Members of a ``.npz`` file: mapped into memory where they are stored uncompressed, else read."""

import math
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from joestar.errors import DataError

LOCAL_HEADER = struct.Struct("<26xHH")
"""The local file header of a zip member: its last two fields are the lengths of the name and of the extra field."""

DAMAGED = (
    OSError, ValueError, EOFError, RuntimeError, SyntaxError, KeyError, zipfile.BadZipFile, zlib.error, struct.error,
    tokenize.TokenError, OverflowError, TypeError,
)  # fmt: skip
"""What NumPy and the standard library raise of arrays and archives that are damaged, or were never such."""


def header_of(file) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether in Fortran's order, dtype) of an ``.npy`` file, which is then behind its header.

    Raises:
        DAMAGED: it is none.
    """
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    if any(size < 0 or isinstance(size, bool) for size in shape):
        raise ValueError(f"its shape is {list(shape)}")
    return shape, fortran, dtype


def check_size(shape: tuple[int, ...], dtype: np.dtype, has: int) -> None:
    """Raises ``ValueError`` for a shape whose numbers are not there: no memory is asked for what a file cannot hold.

    Args:
        has: bytes behind the header.
    """
    needs = math.prod(shape) * dtype.itemsize
    if needs > has and not dtype.hasobject:
        raise ValueError(f"{list(shape)} of {dtype} need {needs:,} bytes, but there are {has:,}: it is truncated")


def check_npy(path: Path) -> None:
    """Raises one of ``DAMAGED`` unless a file is a whole ``.npy`` file."""
    with open(path, "rb") as file:
        shape, _, dtype = header_of(file)
        check_size(shape, dtype, os.fstat(file.fileno()).st_size - file.tell())


def check_members(path: Path, key: str | None = None) -> None:
    """Raises one of ``DAMAGED`` unless a file is a ``.npz`` archive whose arrays, or the one asked for, are whole."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if key is None or info.filename in (key, f"{key}.npy"):
                with archive.open(info) as member:
                    if member.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC:  # others are no arrays, but bytes to NumPy
                        shape, _, dtype = header_of(member)
                        check_size(shape, dtype, info.file_size - member.tell())


_MAGIC = np.lib.format.MAGIC_PREFIX


class Archive:
    """Reads single arrays of a ``.npz`` file, so that 57 GB of features need not fit into memory.

    Raises:
        DataError: the file cannot be read, or an array is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                self.members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
        except DAMAGED as error:
            raise DataError(f"{path}: expected a NumPy .npz archive, but it cannot be read ({error}).") from error

    def __contains__(self, key: str) -> bool:
        return key in self.members

    def read(self, key: str) -> np.ndarray:
        """The array ``key``, memory-mapped read-only if the archive stores it uncompressed."""
        if key not in self.members:
            raise DataError(f"{self.path}: the key {key!r} is missing; the file has {', '.join(sorted(self.members))}.")
        info = self.members[key]
        try:
            if info.compress_type == zipfile.ZIP_STORED and info.file_size >= 1 << 20:
                return self._map(info)
            check_members(self.path, key)
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays[key]
        except DAMAGED as error:
            raise DataError(f"{self.path}: the array {key!r} cannot be read ({error}).") from error

    def _map(self, info: zipfile.ZipInfo) -> np.ndarray:
        with open(self.path, "rb") as file:
            file.seek(info.header_offset)
            name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
            file.seek(name + extra, 1)
            shape, fortran, dtype = header_of(file)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            check_size(shape, dtype, info.file_size)
            return np.memmap(
                self.path, dtype, "r", offset=file.tell(), shape=shape, order="F" if fortran else "C"
            ).view(np.ndarray)
