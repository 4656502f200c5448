"""Tables of numbers in text files, parsed in blocks of whole lines, by pyarrow where it is installed."""

import codecs
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joestar.data import csv_reader
from joestar.data.columns import number_of
from joestar.errors import DataError


@dataclass
class Block:
    """Whole lines of a file: their bytes, where they begin, how many lines and rows lie before them."""

    content: bytes
    start: int
    line: int

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.start + len(self.content)

    @property
    def lines(self) -> int:
        """Lines up to the end of the block."""
        return self.line + self.content.count(b"\n")


def blocks(path: Path, size: int, start: int = 0, line: int = 0, delimiter: str = ",") -> Iterator[Block]:
    """Blocks of about ``size`` bytes of a file, ``.gz`` unpacked, from a position of its text where a row begins.

    Each begins with a row: none ends within a field in quotes, up to fields of ``2 * size`` bytes.

    Raises:
        DataError: the file cannot be read, or is cut short.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            if start == 0 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                start = len(codecs.BOM_UTF8)
            file.seek(start)
            rest, quotes = b"", _Quotes(delimiter)
            while piece := file.read(size):
                piece = rest + piece
                cut = quotes.last_end(piece, 2 * size)
                content, rest = piece[:cut], piece[cut:]
                if content:
                    block = Block(content, start, line)
                    yield block
                    start, line = block.end, block.lines
            if rest:
                yield Block(rest, start, line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a table, but it cannot be read ({error}). Is it complete?") from None


class _Quotes:
    """What quotes mean beside a delimiter, to the ``csv`` module: those within a field without quotes are text."""

    def __init__(self, delimiter: str):
        mark = delimiter.encode()
        self.opens = np.zeros(256, dtype=bool)
        self.opens[list(b'"\r\n' + (mark if len(mark) == 1 else b""))] = True
        blanks = b"" if delimiter == "\t" else b" *"
        self.field = re.compile(
            rb"(?:[\r\n]|" + re.escape(mark) + rb")" + blanks + rb'"[^"]*(?:""[^"]*)*(?:"|\Z)'
        )  # a field in quotes, and what is before it; it ends with the text if it is left open

    def last_end(self, piece: bytes, most: int) -> int:
        """Where the last line of rows ends that is not within quotes; of more than ``most`` bytes of such: any line."""
        last = piece.rfind(b"\n") + 1
        if b'"' not in piece:
            return last
        cut = self._by_parity(piece, last) if self._are_brackets(piece) else self._by_fields(piece)
        return cut or (last if len(piece) > most else 0)

    def _are_brackets(self, piece: bytes) -> bool:
        """Whether every other quote opens a field, or is the second of a doubled one: none of them is text."""
        text, seen = np.frombuffer(piece, np.uint8), 0
        for start in range(0, len(text), 1 << 20):
            found = start + np.flatnonzero(text[start : start + (1 << 20)] == ord('"'))
            opening = found[seen % 2 :: 2]
            if not self.opens[text[opening[opening > 0] - 1]].all():
                return False
            seen += len(found)
        return True

    @staticmethod
    def _by_parity(piece: bytes, cut: int) -> int:
        within = piece.count(b'"', 0, cut) % 2
        while within:
            before = piece.rfind(b"\n", 0, cut - 1) + 1
            within ^= piece.count(b'"', before, cut) % 2
            cut = before
        return cut

    def _by_fields(self, piece: bytes) -> int:
        cut = past = 0  # behind the last field of several lines
        for found in self.field.finditer(b"\n" + piece):
            start, end = found.start(), found.end() - 1  # in the piece, behind what is before the field
            if piece.find(b"\n", start, end) >= 0:
                cut, past = piece.rfind(b"\n", past, start) + 1 or cut, end
        return piece.rfind(b"\n", past) + 1 or cut


def columns_of(block: Block, path: Path, width: int, wanted: list[int], delimiter: str, dtype) -> list[np.ndarray]:
    """The wanted columns of a block, each of ``dtype``, int64 or float64.

    Raises:
        DataError: naming the first line and field that is no such number.
    """
    found = _by_arrow(block, width, wanted, delimiter, dtype)
    if found is None:
        found = _by_numpy(block, width, wanted, delimiter, dtype)
    if found is None or any(column.dtype.kind == "f" and np.isinf(column).any() for column in found):
        found = _line_by_line(block, path, width, wanted, delimiter, dtype)
    return found


def _by_arrow(block: Block, width: int, wanted: list[int], delimiter: str, dtype) -> list[np.ndarray] | None:
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError:
        return None
    if delimiter == " " or b"0x" in block.content or b"0X" in block.content:  # which it takes for a number
        return None
    names = [str(place) for place in range(width)]
    kind = pyarrow.from_numpy_dtype(np.dtype(dtype))
    try:
        table = csv.read_csv(
            pyarrow.BufferReader(block.content),
            csv.ReadOptions(column_names=names, use_threads=False, block_size=max(len(block.content), 1)),
            csv.ParseOptions(delimiter=delimiter),
            csv.ConvertOptions(
                column_types={names[place]: kind for place in wanted}, include_columns=[names[p] for p in wanted],
                null_values=[""],
            ),
        )  # fmt: skip
    except pyarrow.ArrowException:
        return None
    if any(column.null_count for column in table.columns):
        return None
    quotes, lines = block.content.count(b'"'), block.content.count(b"\n") + (not block.content.endswith(b"\n"))
    if quotes % 2 or (quotes and table.num_rows != lines):  # fields of several lines, or a quote that is left open
        return None
    if quotes and csv_reader.opened_behind_blanks(delimiter).search(block.content):
        return None
    return [column.to_numpy() for column in table.columns]


def _by_numpy(block: Block, width: int, wanted: list[int], delimiter: str, dtype) -> list[np.ndarray] | None:
    if not block.content.strip():
        return [np.empty(0, dtype) for _ in wanted]
    if np.issubdtype(dtype, np.integer) and not _whole_numbers_alone(block.content, delimiter):
        return None
    try:
        table = np.loadtxt(
            io.BytesIO(block.content), dtype, delimiter=None if delimiter == " " else delimiter, ndmin=2, comments=None
        )
    except ValueError:
        return None
    return [table[:, place] for place in wanted] if table.shape[1] == width else None


def _whole_numbers_alone(content: bytes, delimiter: str) -> bool:
    """Whether text has no other characters than whole numbers of int64 have: NumPy 1.26 cuts others to such."""
    if content.translate(None, b"0123456789+- \t\r\n" + delimiter.encode()):
        return False
    digits = content.translate(_ZEROS)
    if b"0" * len(_MOST) not in digits:
        return True
    return b"0" * (len(_MOST) + 1) not in digits and not any(number > _MOST for number in _LARGE.findall(content))


_MOST = b"9223372036854775807"
_LARGE = re.compile(rb"9\d{18}")
"""What may be beyond int64, of numbers that are no longer than its largest."""
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def _line_by_line(block: Block, path: Path, width: int, wanted: list[int], delimiter: str, dtype) -> list[np.ndarray]:
    number = int if np.issubdtype(dtype, np.integer) else float
    what = "whole numbers" if number is int else "numbers"
    kept: list[list] = [[] for _ in wanted]
    for row, fields in _rows(block, path, width, delimiter):
        at = f"{path}: line {row}"
        if len(fields) != width:
            raise DataError(f"{at} has {len(fields)} fields, expected {width} (separated by {delimiter!r}).")
        for values, place in zip(kept, wanted, strict=True):
            field = fields[place].strip().strip('"')
            try:
                value = number_of(field, number)
                if number is float and math.isinf(value) and "inf" not in field.lower():
                    raise OverflowError(f"{field} is beyond float64")
                values.append(value if number is float else int(np.int64(value)))
            except (ValueError, OverflowError):
                raise DataError(
                    f"{at}, field {place + 1}: expected {what}; got {field!r}. Ids that are text are numbered by "
                    "joestar.data.from_tables."
                ) from None
    return [np.array(values, dtype=dtype) for values in kept]


def _rows(block: Block, path: Path, width: int, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of all lines that are not empty; fields in quotes may hold delimiters and ends of lines."""
    if width > 1 and b'"' in block.content:
        lines = io.StringIO(block.content.decode("utf-8", "replace"), newline="")
        rows = csv_reader.rows_of(lines, delimiter, path, block.line)
        yield from (row for row in rows if "".join(row[1]).strip() or len(row[1]) > 1)
        return
    for row, line in enumerate(block.content.splitlines()):
        if text := line.decode("utf-8", "replace").strip():
            yield block.line + row + 1, text.split() if delimiter == " " else text.split(delimiter)
