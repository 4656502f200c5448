"""Large CSV files and Parquet through pyarrow, where it is installed."""

from pathlib import Path

import numpy as np

from joestar.data.columns import MISSING, CodeCollector, IdCollector
from joestar.errors import DataError

BLOCK = 16 << 20
"""Bytes of a piece."""


def read_csv_fast(path: Path, layout, roles: dict[str, str]) -> dict | None:
    """As ``csv_reader.read``; ``None`` if pyarrow is missing, or does not read the file as the slow reader would."""
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError:
        return None
    if layout.delimiter == " ":
        return None
    types = {name: pyarrow.float64() if role == "number" else pyarrow.string() for name, role in roles.items()}
    blank = [f"\0{place}" for place in range(layout.blank)]  # names that no column has
    types |= dict.fromkeys(blank, pyarrow.string())
    try:
        file = _Counted(pyarrow.input_stream(str(path)), layout.delimiter)  # unpacked by the end of its name
        reader = csv.open_csv(
            pyarrow.PythonFile(file, "r"),
            csv.ReadOptions(
                block_size=BLOCK, skip_rows=layout.skipped + layout.header, column_names=[*layout.names, *blank],
                encoding="utf8",
            ),
            csv.ParseOptions(delimiter=layout.delimiter),
            csv.ConvertOptions(
                column_types=types, include_columns=[*roles, *blank], strings_can_be_null=False,
                null_values=sorted({form for text in MISSING for form in (text, text.upper(), text.capitalize())}),
            ),
        )  # fmt: skip
        found = _collect(reader, roles, blank)
        # Fields of several lines, which a quote that is never closed makes, too: the slow reader tells them apart.
        several = file.lines != layout.skipped + layout.header + found[1]
        return None if file.quotes % 2 or (file.quotes and several) or file.behind_blanks else found[0]
    except (pyarrow.ArrowException, OSError, _UnlikeError):  # what is damaged is named by the slow reader
        return None


class _Counted:
    """A file that counts the quotes and lines that are read of it, and sees quotes that open fields behind blanks."""

    def __init__(self, file, delimiter: str):
        from joestar.data.csv_reader import opened_behind_blanks

        self.opened, self.behind_blanks = opened_behind_blanks(delimiter), False
        self.file, self.quotes, self.ends, self.last, self.closed = file, 0, 0, b"", False

    @property
    def lines(self) -> int:
        return self.ends + (self.last not in (b"", b"\n"))

    def read(self, size: int = -1) -> bytes:
        piece: bytes = self.file.read(size)
        self.quotes, self.ends = self.quotes + piece.count(b'"'), self.ends + piece.count(b"\n")
        if b' "' in piece or (self.last == b" " and piece.startswith(b'"')):
            self.behind_blanks |= self.last == b" " or self.opened.search(piece) is not None
        self.last = piece[-1:] or self.last
        return piece

    def close(self) -> None:
        self.closed = True
        self.file.close()


class _UnlikeError(Exception):
    """Something that the slow reader reads otherwise, or complains about."""


def _collect(reader, roles: dict[str, str], blank: list[str]) -> tuple[dict, int]:
    """The columns, and how many rows there are."""
    from pyarrow import compute

    from joestar.data.csv_reader import finish

    kept = {name: {"id": IdCollector, "coded": CodeCollector, "number": list}[role]() for name, role in roles.items()}
    rows = 0
    for batch in reader:
        rows += batch.num_rows
        if any(compute.any(compute.not_equal(batch.column(name), "")).as_py() for name in blank):
            raise _UnlikeError
        for name, role in roles.items():
            column = batch.column(batch.schema.get_field_index(name))
            if role == "number":
                kept[name].append(column.to_numpy(zero_copy_only=False))
                continue
            column = compute.utf8_trim_whitespace(column)
            if compute.any(compute.match_substring(column, '"')).as_py():
                raise _UnlikeError  # a quote behind a space: the slow reader knows what it means
            if role == "id":
                _add_ids(kept[name], column, compute)
            else:
                kept[name].add(column.to_pylist())
    return {name: finish(column) for name, column in kept.items()}, rows


def _add_ids(collector: IdCollector, column, compute) -> None:
    """Integers where all are written as integers are; else text, each distinct one looked at once."""
    import pyarrow

    if compute.any(compute.equal(column, "")).as_py():
        raise _UnlikeError
    if collector.index is None:
        try:
            values = compute.cast(column, pyarrow.int64())
            if compute.all(compute.equal(compute.cast(values, pyarrow.string()), column)).as_py() in (True, None):
                collector.add_integers(values.to_numpy(zero_copy_only=False))
                return
        except pyarrow.ArrowInvalid:
            pass
    coded = column.dictionary_encode()
    collector.add_coded(coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False))


def array_of(column) -> np.ndarray:
    """A column of pyarrow, chunked or not; of one that is coded the values, as a missing one has no code to NumPy."""
    import pyarrow

    coded = pyarrow.types.is_dictionary(column.type)
    return (column.cast(column.type.value_type) if coded else column).to_numpy(zero_copy_only=False)


def read_parquet(path: Path):
    """The file as a ``pyarrow.Table``.

    Raises:
        DataError: pyarrow is missing, or the file cannot be read.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed: pip install pyarrow, or save the table as "
            "CSV."
        ) from None
    try:
        return parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected a Parquet file, but it cannot be read ({error}).") from None
