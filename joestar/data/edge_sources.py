"""Lists of edges on disk, read from the first edge to the last: arrays, text files, Parquet."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from joestar.data import csv_reader
from joestar.data.folder_writer import open_to_append, write_all
from joestar.data.in_order import in_order, threads_for
from joestar.data.journal import Journal
from joestar.data.progress import Progress
from joestar.data.rows import ColumnRows, FileRows, PackedRows, Rows, reading
from joestar.data.text_blocks import Block, blocks, columns_of
from joestar.errors import DataError

TEXT_BLOCK = 1 << 22
"""Bytes of text that a thread parses at a time, at most."""
PER_BYTE = 16
"""Bytes of memory that a byte of text takes while it is parsed: "1,2" and its end become two numbers, twice."""

PARQUET_BUFFER = 1 << 16
"""Bytes of a column that are read at a time: without it whole row groups are held, and with ``pre_buffer`` the file."""


class Edges(Protocol):
    """Edges in the order of a file.

    Attributes:
        count: how many there are. where: how messages call the file. others: columns that are not read.
    """

    count: int
    where: str
    others: Sequence[str]

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations), integers, of the edges from position ``first``."""

    def place(self, row: int) -> str:
        """How messages call an edge."""


class PairEdges:
    """Edges in an array ``[E, 2]``, a row each."""

    others: Sequence[str] = ()

    def __init__(self, rows: Rows):
        self.rows, self.count, self.where = rows, rows.shape[0], rows.where

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations) of the edges from position ``first``."""
        pairs = self.rows.read(first, count)
        return pairs[:, 0], pairs[:, 1]

    def place(self, row: int) -> str:
        """How messages call an edge."""
        return f"row {row}"


class SideEdges:
    """Edges in an array ``[2, E]``: sources, then destinations."""

    others: Sequence[str] = ()

    def __init__(self, sources: Rows, destinations: Rows, where: str):
        self.sides, self.count, self.where = (sources, destinations), sources.shape[0], where

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations) of the edges from position ``first``."""
        return tuple(side.read(first, count) for side in self.sides)

    def place(self, row: int) -> str:
        """How messages call an edge."""
        return f"column {row}"


class ParquetEdges:
    """Edges in two columns of a Parquet file, read by pyarrow.

    Raises:
        DataError: pyarrow is missing, or the file is none.
    """

    def __init__(self, path: Path, choose):
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(
                f"{path}: reading Parquet needs pyarrow, which is not installed: pip install pyarrow, or save the "
                "edges as .npy."
            ) from None
        try:
            self.file = parquet.ParquetFile(path, buffer_size=PARQUET_BUFFER, pre_buffer=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: expected a Parquet file, but it cannot be read ({error}).") from None
        self.where, self.count = str(path), self.file.metadata.num_rows
        self.columns = choose(list(self.file.schema_arrow.names))
        self.others = [name for name in self.file.schema_arrow.names if name not in self.columns]
        self.batches, self.at, self.rest = None, 0, None
        self.errors = (pyarrow.ArrowException, StopIteration)

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations) of the edges from position ``first``."""
        with reading(self.where, *self.errors):
            found = self._pieces(first, min(count, self.count - first))
        return tuple(self._side(found, name, first) for name in self.columns)

    def _pieces(self, first: int, count: int) -> list:
        if self.batches is None or first != self.at:
            self._start(first, count)
        found, missing = [], count
        while missing > 0:
            piece = self.rest if self.rest is not None and self.rest.num_rows else next(self.batches)
            found.append(piece.slice(0, missing))
            self.rest = piece.slice(missing) if piece.num_rows > missing else None
            missing -= found[-1].num_rows
        self.at = first + count
        return found

    def _start(self, first: int, count: int) -> None:
        """Begins at the row group that has an edge."""
        group, before = 0, 0
        groups = self.file.metadata.num_row_groups
        while group < groups and before + self.file.metadata.row_group(group).num_rows <= first:
            before += self.file.metadata.row_group(group).num_rows
            group += 1
        self.batches = self.file.iter_batches(max(count, 1), list(range(group, groups)), columns=self.columns)
        self.rest, skip = None, first - before
        while skip:
            piece = next(self.batches)
            self.rest = piece.slice(skip) if piece.num_rows > skip else None
            skip -= min(skip, piece.num_rows)

    def _side(self, pieces: list, name: str, first: int) -> np.ndarray:
        arrays = []
        for piece in pieces:
            column = piece.column(piece.schema.get_field_index(name))
            if column.null_count:
                row = first + int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise DataError(f"{self.where}, column {name!r}: row {row} has no id. Remove such rows.")
            arrays.append(column.to_numpy(zero_copy_only=False))
            first += piece.num_rows
        made = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        _check_integers(made.dtype, f"{self.where}, column {name!r}")
        return made

    def place(self, row: int) -> str:
        """How messages call an edge."""
        return f"row {row}"


def array_edges(rows: Rows, journal: Journal, folder: Path, limit: int, progress: Progress) -> Edges:
    """Edges in an array ``[2, E]`` or ``[E, 2]``; a packed one is unpacked into ``folder`` first.

    Raises:
        DataError: another shape, or no integers.
    """
    _check_integers(rows.dtype, rows.where)
    if len(rows.shape) != 2 or 2 not in rows.shape:
        raise DataError(f"{rows.where}: edges must be integers [2, E] or [E, 2]; got {rows.dtype} {list(rows.shape)}.")
    if isinstance(rows, PackedRows):
        rows = _unpacked(rows, journal, folder, limit, progress)
    if rows.shape[0] != 2:
        return PairEdges(rows)
    if isinstance(rows, ColumnRows):  # [2, E] in Fortran's order: pairs
        return PairEdges(rows.columns)
    count = rows.shape[1]
    if isinstance(rows, FileRows):
        sides = [
            FileRows(rows.path, rows.offset + side * rows.row_bytes, rows.dtype, (count,), rows.where)
            for side in (0, 1)
        ]
        return SideEdges(*sides, rows.where)
    raise DataError(f"{rows.where}: edges of {type(rows).__name__} cannot be read.")


def text_edges(
    path: Path, header: bool | None, delimiter: str | None, choose, journal: Journal, folder: Path, limit: int,
    progress: Progress,
) -> PairEdges:  # fmt: skip
    """Edges of a CSV or TSV file, parsed once into a file of pairs in ``folder``; ids are whole numbers.

    Raises:
        DataError: naming the line and field that is no whole number.
    """
    layout = csv_reader.look(path, header, delimiter, [])
    names = choose(layout.names)
    wanted = [layout.names.index(name) for name in names]
    state = journal.state("parse", {"start": None, "line": 0, "rows": 0})
    staged = folder / "edges.staged"
    if state["start"] is None:
        state["start"], state["line"] = _after_header(path, layout)
    size = 0 if path.suffix == ".gz" else path.stat().st_size
    threads = threads_for(limit, PER_BYTE << 20)
    step = min(TEXT_BLOCK, max(limit // (PER_BYTE * (threads + 1)), 1 << 12))

    def parsed(block: Block) -> tuple[int, int, np.ndarray]:
        sides = columns_of(block, path, layout.width, wanted, layout.delimiter, np.int64)
        return block.end, block.lines, np.stack(sides, axis=1)

    with open_to_append(staged, state["rows"] * 16) as file:
        if not state.get("ended"):
            with ThreadPoolExecutor(threads) as pool:
                pieces = blocks(path, step, state["start"], state["line"], layout.delimiter)
                for end, lines, pairs in in_order(pool, parsed, pieces, threads):
                    write_all(file, pairs)
                    state |= {"start": end, "line": lines, "rows": state["rows"] + len(pairs)}
                    journal.save()
                    progress("parsing", end, size)
            state["ended"] = True
            journal.save()
    rows = FileRows(staged, 0, np.dtype(np.int64), (state["rows"], 2), str(path))
    others = [name for name in layout.names if name not in names] + [""] * bool(layout.blank)
    return _Staged(rows, layout.skipped + layout.header, others)


class _Staged(PairEdges):
    """Pairs of a text file whose table begins after so many lines."""

    def __init__(self, rows: Rows, before: int, others: list[str]):
        super().__init__(rows)
        self.before, self.others = before, others

    def place(self, row: int) -> str:
        return f"row {row} of the table (about line {row + 1 + self.before})"


def _after_header(path: Path, layout: csv_reader.Layout) -> tuple[int, int]:
    """(position, lines) behind comments and header."""
    lines = layout.skipped + layout.header
    start = 0
    for block in blocks(path, 1 << 16):
        start = block.start
        for line in block.content.splitlines(keepends=True):
            if not lines:
                return start, layout.skipped + layout.header
            start, lines = start + len(line), lines - 1
    return start, layout.skipped + layout.header


def _unpacked(rows: PackedRows, journal: Journal, folder: Path, limit: int, progress: Progress) -> FileRows:
    staged, total = folder / "edges.staged", rows.shape[0] * rows.shape[1]
    state = journal.state("unpack", {"rows": 0})
    flat = PackedRows(rows.path, rows.member, rows.dtype, (total,), rows.header, rows.where)
    step = max(1, min(1 << 23, limit // (2 * rows.dtype.itemsize)))
    with open_to_append(staged, state["rows"] * rows.dtype.itemsize) as file:
        while state["rows"] < total:
            values = flat.read(state["rows"], min(step, total - state["rows"]))
            write_all(file, values)
            state["rows"] += len(values)
            journal.save()
            progress("unpacking edges", state["rows"], total)
    return FileRows(staged, 0, rows.dtype, rows.shape, rows.where)


def _check_integers(dtype: np.dtype, where: str) -> None:
    if dtype.kind not in "iu":
        raise DataError(f"{where}: ids of nodes must be integers; got {dtype}.")


def fingerprint(path: Path) -> str:
    """What tells that a file was changed: path, size and time."""
    found = path.stat()
    return json.dumps([str(path.absolute()), found.st_size, found.st_mtime_ns])


def check_unchanged(paths: Sequence[Path], before: Sequence[str]) -> None:
    """Raises ``DataError`` for a file whose fingerprint is another one than before it was read."""
    for path, known in zip(paths, before, strict=True):
        if not path.exists() or fingerprint(path) != known:
            raise DataError(
                f"{path}: it was changed while it was read, so part of the graph would be of the old file and part of "
                "the new one. Run it again once nobody writes to it."
            )
