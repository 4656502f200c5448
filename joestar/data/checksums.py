"""Checksums of large files: SHA-256 over the SHA-256 of every 64 MiB, by several threads."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 64 << 20
PIECE = 1 << 17
"""Bytes that a thread holds at a time."""


def checksum(path: Path) -> str:
    """Hexadecimal digest of a file. hashlib lets go of the interpreter, so blocks are hashed side by side.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        blocks = pool.map(lambda start: _digest(path, start), range(0, size, BLOCK))
        whole = hashlib.sha256()
        for digest in blocks:
            whole.update(digest)
    return whole.hexdigest()


def _digest(path: Path, start: int) -> bytes:
    made, left = hashlib.sha256(), BLOCK
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (piece := file.read(min(PIECE, left))):
            made.update(piece)
            left -= len(piece)
    return made.digest()
