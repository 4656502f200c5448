"""CSV and TSV files: what is in them, and their columns, in pieces that fit into memory."""

import contextlib
import csv
import gzip
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from joestar.data.columns import CodeCollector, Coded, IdCollector, Ids, no_number, number_of, numbers
from joestar.errors import DataError

ROWS = 50_000
"""Rows of a piece."""
FAST_FROM = 8 << 20
"""Bytes from which a file is read by ``pyarrow.csv``, where that is installed."""
SAMPLE = 50
"""Lines that tell whether there is a header."""
KNOWN = frozenset(
    [
        "source",
        "src",
        "from",
        "target",
        "dst",
        "to",
        "destination",
        "id",
        "node",
        "node_id",
        "nodeid",
        "weight",
        "edge_weight",
        "label",
        "class",
        "split",
        "timestamp",
    ]
)


@dataclass(frozen=True)
class Layout:
    """How a text file is laid out.

    Attributes:
        names: of the columns; numbers from ``"0"`` where there is no header. The first may be empty, an index.
        header: whether the first line holds them; guessed: whether that was guessed.
        skipped: lines of comments before it; delimiter: between fields; first: the first line's fields.
        blank: columns behind those, without names and values, as lines have that end in a delimiter.
    """

    names: list[str]
    header: bool
    guessed: bool
    skipped: int
    delimiter: str
    first: list[str]
    blank: int = 0

    @property
    def width(self) -> int:
        """Fields of a line."""
        return len(self.names) + self.blank


def look(path: Path, header: bool | None, delimiter: str | None, asked: list[str]) -> Layout:
    """Finds delimiter and header of a file.

    Args:
        asked: names of columns that the caller asked for: if they are in the first line, it is a header.

    Raises:
        DataError: the file is empty, no text, or cut short.
    """
    with _reading(path), _open(path) as file:
        skipped, first = next(
            ((i, line) for i, line in enumerate(file) if line.strip() and line[0] not in "#%"), (0, "")
        )
        lines = [first, *itertools.islice(file, SAMPLE - 1)]
    if not first:
        raise DataError(f"{path}: expected lines of fields, but the file is empty.")
    delimiter = _delimiter(path, first) if delimiter is None else delimiter
    with _reading(path):
        rows = [row for row in _fields(lines, delimiter) if row]
    blank = _blank(rows)
    found = _has_header([row[: len(rows[0]) - blank] for row in rows], asked) if header is None else header
    names = rows[0] if found else [str(i) for i in range(len(rows[0]))]
    blank = blank if found and "" not in asked else 0
    names = names[: len(names) - blank]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise DataError(f"{path}: two columns are called {doubled!r}. Rename one; header=False, if it is no header.")
    return Layout(names, found, header is None, skipped, delimiter, rows[0], blank)


def _blank(rows: list[list[str]]) -> int:
    """How many columns at the end have neither a name nor, in the lines that were looked at, a value."""
    width = len(rows[0])
    while width > 1 and not any(row[width - 1] for row in rows if len(row) >= width):
        width -= 1
    return len(rows[0]) - width


def read(path: Path, layout: Layout, roles: dict[str, str]) -> dict:
    """Columns by name: ``Ids`` for the role ``"id"``, ``Coded`` for ``"coded"``, float64 for ``"number"``.

    Raises:
        DataError: naming the line and column that is wrong.
    """
    if path.stat().st_size >= FAST_FROM:
        from joestar.data.arrow import read_csv_fast

        fast = read_csv_fast(path, layout, roles)
        if fast is not None:
            return fast
    return _read_slowly(path, layout, roles)


def line_of(path: Path, layout: Layout, row: int) -> str:
    """``line n`` of a row of the table, counted from 0; reads the file up to there."""
    for number, _ in itertools.islice(_rows(path, layout), row, row + 1):
        return f"line {number}"
    return f"row {row + 1}"


def _read_slowly(path: Path, layout: Layout, roles: dict[str, str]) -> dict:
    places = {name: layout.names.index(name) for name in roles}
    kept = {name: _COLLECTORS[role]() for name, role in roles.items()}
    rows = _rows(path, layout)
    while piece := list(itertools.islice(rows, ROWS)):
        for name, role in roles.items():
            place = places[name]
            texts = [fields[place].strip() for _, fields in piece]
            where = f"{path}, column {name!r}"
            if role == "number":
                kept[name].append(numbers(texts, _complaint(where, piece)))
            elif role == "id" and "" in texts:
                number = piece[texts.index("")][0]
                raise DataError(f"{where}: line {number} has no id. Remove such lines, or give them ids.")
            else:
                kept[name].add(texts)
    return {name: finish(column) for name, column in kept.items()}


def finish(column):
    """The column that was collected."""
    import numpy as np

    if isinstance(column, list):
        return np.concatenate(column) if column else np.empty(0)
    done: Ids | Coded = column.done()
    return done


_COLLECTORS = {"id": IdCollector, "coded": CodeCollector, "number": list}


def _complaint(where: str, piece: list):
    return lambda row, text: DataError(no_number(where, f"line {piece[row][0]}", text))


def _rows(path: Path, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every row below the header; spaces around fields are still there."""
    width = layout.width
    with _reading(path), _open(path) as file:
        for _ in range(layout.skipped):
            next(file)
        header = layout.header
        for line, fields in rows_of(file, layout.delimiter, path, layout.skipped):
            if not fields or (width > 1 and fields == [""]):
                continue
            if header:
                header = False
                continue
            if len(fields) != width:
                raise DataError(
                    f"{path}: line {line} has {len(fields)} fields, the first has {width} "
                    f"(separated by {layout.delimiter!r}). Correct the line, or give delimiter=..."
                )
            if layout.blank and "".join(fields[-layout.blank :]).strip():
                raise DataError(
                    f"{path}: line {line} has a value behind the last column that has a name. Give that column one, or "
                    "remove the value."
                )
            yield line, fields


_END = "\x1eend-of-table\x1e"
"""A row behind the last one: where a quote is still open it becomes part of a field."""


def opened_behind_blanks(delimiter: str) -> re.Pattern:
    """Quotes that open a field behind blanks, in bytes: to pyarrow they are text, and ends of lines within end rows."""
    if delimiter == "\t":
        return re.compile(rb"(?!)")  # there, they are text
    return re.compile(rb"(?:\A|[\r\n]|" + re.escape(delimiter.encode()) + rb') +"')


def _closed(row: str, delimiter: str) -> bool:
    """Whether a row of several lines has a delimiter or the end, blanks apart, behind every field in quotes."""
    tight = re.sub(rf'" +(?=[{re.escape(delimiter)}\r\n]|$)', '"', row)
    try:
        list(csv.reader([tight], delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True))
    except csv.Error:
        return False
    return True


def rows_of(lines: Iterable[str], delimiter: str, path: Path, before: int) -> Iterator[tuple[int, list[str]]]:
    """(its last line, fields) of every row of lines, behind ``before`` others of a file.

    Raises:
        DataError: a line cannot be read, or a quote is never closed, or by one that opens another field: the lines
            between would be part of a field.
    """
    kept: list[str] = []  # lines of the row that is read
    never = "{path}: a quote that is opened in line {first} is never closed{why}. Close it, or remove it."

    def keeping() -> Iterator[str]:
        for line in itertools.chain(lines, [_END]):
            kept.append(line)
            yield line

    reader, first = _reader(keeping(), delimiter), before + 1
    try:
        for fields in reader:
            if kept == [_END]:  # the line: a delimiter may be part of it
                return
            if len(kept) > 1 and (kept[-1] == _END or not _closed("".join(kept), delimiter)):
                raise DataError(never.format(path=path, first=first, why=""))
            kept.clear()
            yield before + reader.line_num, fields
            first = before + reader.line_num + 1
    except csv.Error as error:
        if len(kept) > 1:  # the field that the quote begins is longer than the csv module reads
            raise DataError(never.format(path=path, first=first, why=f", or too late ({error})")) from None
        raise DataError(f"{path}: line {before + reader.line_num} cannot be read ({error}).") from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Makes what may come up while a file is unpacked and decoded a ``DataError``."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text ({error}). Save the file as UTF-8.") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: expected a table, but it cannot be read ({reason}). Is it complete?") from None


def _open(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _reader(lines, delimiter: str):
    if delimiter == " ":  # those at a line's end are behind no field
        return csv.reader((line.rstrip(" \t\r\n") + "\n" for line in lines), delimiter=" ", skipinitialspace=True)
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=delimiter != "\t")


def _fields(lines: list[str], delimiter: str) -> list[list[str]]:
    return [[field.strip() for field in row] for row in _reader(lines, delimiter)]


def _delimiter(path: Path, line: str) -> str:
    """Tab in ``.tsv`` files; else the first of these that the first line has."""
    if ".tsv" in map(str.lower, path.suffixes):
        return "\t"
    return next((mark for mark in (",", "\t", ";", " ") if mark in line.strip()), ",")


def _has_header(rows: list[list[str]], asked: list[str]) -> bool:
    """Whether the first line names the columns: asked for, known names, or words above numbers."""
    if any(name in rows[0] for name in asked):
        return True
    if len(rows[0]) > 1 and not rows[0][0]:  # an index of a data frame has no name
        rows = [row[1:] for row in rows]
    first, rest = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    named = [field for field in first if field]
    if any(_is_number(field) for field in first) or len(set(named)) < len(named):
        return False
    if any(field.lower() in KNOWN for field in first):  # also where lines end in a delimiter: the last name is empty
        return True
    return bool(rest) and "" not in first and any(all(_is_number(row[i]) for row in rest) for i in range(len(first)))


def _is_number(text: str) -> bool:
    try:
        number_of(text)
    except ValueError:
        return False
    return True
