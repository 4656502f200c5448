"""One face for tables of all kinds: text files, Parquet, data frames, dicts of columns."""

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from joestar.data import csv_reader
from joestar.data.columns import coded_of, ids_of, numbers_of, on_host
from joestar.data.nameless import without_index
from joestar.errors import DataError

TEXT = (".csv", ".tsv", ".txt", ".edges")
PARQUET = (".parquet", ".pq")
ENDS = (*TEXT, *(f"{end}.gz" for end in TEXT), *PARQUET)
"""How names of tables end."""


def is_table(path: Path) -> bool:
    """Whether a file's name says that it is a table."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix.lower() in TEXT or path.suffix.lower() in PARQUET


def only_one(folder: Path, stem: str, ends: tuple[str, ...]) -> Path | None:
    """The file of a folder that is called ``stem`` and one of ``ends``, if there is one.

    Raises:
        DataError: there are several, of which one would be chosen and the others forgotten.
    """
    found = [path for end in ends if (path := folder / f"{stem}{end}").is_file()]
    if len(found) > 1:
        raise DataError(
            f"{folder}: expected one file of {stem}; found {', '.join(path.name for path in found)}. Keep one, or give "
            "the path of a file."
        )
    return found[0] if found else None


def is_frame(thing) -> bool:
    """Whether something has named columns: a pandas or polars frame, a pyarrow table, a dict."""
    return isinstance(thing, dict) or hasattr(type(thing), "column_names") or (
        hasattr(thing, "columns") and hasattr(thing, "__getitem__") and not isinstance(thing, np.ndarray)
    )  # fmt: skip


def open_table(
    source, what: str, *, header: bool | None, delimiter: str | None, asked: list[str | int],
    ids: Collection[str] = (),
):  # fmt: skip
    """A table to read columns from.

    Args:
        source: the path of a file, a frame or a dict of columns.
        what: ``"edges"`` or ``"nodes"``, for messages.
        asked: names and positions of columns that the caller asked for. ids: see ``without_index``.

    Raises:
        DataError: it is none of these, or cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(f"{what}: there is no file {path}.")
        if path.suffix.lower() in PARQUET:
            from joestar.data.arrow import read_parquet

            return FrameTable(read_parquet(path), str(path), asked, ids)
        if not is_table(path):
            raise DataError(f"{path}: a table's name must end in {', '.join((*TEXT, *PARQUET))}, or .gz behind it.")
        return TextTable(path, header, delimiter, asked, ids)
    if is_frame(source):
        return FrameTable(source, what, asked, ids)
    raise DataError(
        f"{what} must be the path of a CSV, TSV or Parquet file, a pandas or polars frame, or a dict of columns; got "
        f"{type(source).__name__}."
    )


class TextTable:
    """A text file; ``every`` are its columns by position, ``names`` those without the nameless index of a frame.

    ``named`` says whether these are names, and not numbers.
    """

    def __init__(
        self, path: Path, header: bool | None, delimiter: str | None, asked: list[str | int], ids: Collection[str] = ()
    ):
        self.path, self.where = path, str(path)
        self.layout = csv_reader.look(path, header, delimiter, [name for name in asked if isinstance(name, str)])
        self.every, self.levels, self.named = self.layout.names, [], self.layout.header
        self.names, self.index = without_index(self.every, asked, ids) if self.layout.header else (self.every, None)

    def read(self, roles: dict[str, str]) -> dict:
        """Columns by name, see ``csv_reader.read``."""
        return csv_reader.read(self.path, self.layout, roles)

    def line(self, row: int) -> str:
        """How messages call a row."""
        return csv_reader.line_of(self.path, self.layout, row)

    def note(self) -> str | None:
        """What was guessed and left out."""
        layout, first = self.layout, ", ".join(self.layout.first[: min(4, len(self.layout.names))])
        parts = [f"{layout.skipped} lines of comments skipped"] if layout.skipped else []
        if layout.guessed and layout.header:
            parts.append(f"the first line is taken for a header ({first}; header=False otherwise)")
        elif layout.guessed:
            parts.append(f"no header: the first line is data ({first}; header=True otherwise)")
        if layout.blank:
            parts.append("left out: what is behind the last name, as it is empty")
        if self.index:
            parts.append(self.index)
        return "; ".join(parts) or None


def _with_levels(frame):
    """(a frame whose index names no columns, the columns that it named): of pandas; others have none."""
    index = getattr(frame, "index", None)
    names = getattr(index, "names", None)
    if isinstance(frame, dict) or names is None or not hasattr(frame, "reset_index"):
        return frame, []
    levels = [place for place, name in enumerate(names) if name is not None and name not in frame.columns]
    if not levels:
        return frame, []
    named = [names[place] for place in levels]
    return frame.reset_index(level=levels)[[*frame.columns, *named]], [str(name) for name in named]


class FrameTable:
    """A data frame, a pyarrow table or a dict of columns; ``every`` and ``names`` as ``TextTable`` has them.

    ``named`` says whether all are called by text, and not by numbers, as those of a pandas frame by default. ``levels``
    are those that the index of a pandas frame names: columns, too, behind the others, as in Parquet.
    """

    def __init__(self, frame, where: str, asked: Collection[str | int] = (), ids: Collection[str] = ()):
        self.where = where
        frame, self.levels = _with_levels(frame)
        arrow = hasattr(
            type(frame), "column_names"
        )  # its `columns` are not names; of the type: a column may be so called
        keys = list(frame if isinstance(frame, dict) else frame.column_names if arrow else frame.columns)
        self.every, self.named = [str(key) for key in keys], all(isinstance(key, str) for key in keys)
        self.names, self.index = without_index(self.every, asked, ids)
        if self.levels and ids and not any(name.lower() in ids for name in self.names):
            self.index = f"the ids are {self.levels[0]!r}, the index of the data frame (id=... names others)"
        self.columns = {str(key): frame[key] for key in keys if str(key) in self.names}
        if not self.names:
            raise DataError(f"{where}: expected columns; there are none.")
        lengths = {name: _length(column, name, where) for name, column in self.columns.items()}
        other = next((name for name in self.names if lengths[name] != lengths[self.names[0]]), None)
        if other is not None:
            raise DataError(
                f"{where}: columns must be equally long; {self.names[0]!r} has {lengths[self.names[0]]} rows, "
                f"{other!r} has {lengths[other]}."
            )

    def read(self, roles: dict[str, str]) -> dict:
        """Columns by name, see ``csv_reader.read``."""
        made = {}
        for name, role in roles.items():
            array, where = self._array(name), f"{self.where}, column {name!r}"
            if role == "id":
                made[name] = ids_of(array, where, self.line)
            else:
                made[name] = numbers_of(array, where, self.line) if role == "number" else coded_of(array, where)
        return made

    def _array(self, name: str) -> np.ndarray:
        column = self.columns[name]
        if hasattr(column, "detach"):
            column = on_host(column)
        elif type(column).__module__.partition(".")[0] == "pyarrow":
            from joestar.data.arrow import array_of

            column = array_of(column)
        for method in ("to_numpy", "numpy"):
            if hasattr(column, method):
                array = np.asarray(getattr(column, method)())
                break
        else:
            array = np.asarray(column, dtype=object if _mixed(column) else None)
        if array.ndim != 1:
            raise DataError(f"{self.where}: the column {name!r} must have one value per row; got {list(array.shape)}.")
        return array

    def line(self, row: int) -> str:
        """How messages call a row, counted from 0 as frames do."""
        return f"row {int(row)}"

    def note(self) -> str | None:
        """What was left out; nothing is guessed."""
        return self.index


def _length(column, name: str, where: str) -> int:
    try:
        return len(column)
    except TypeError:
        raise DataError(
            f"{where}: the column {name!r} must be a list or array of values; got {type(column).__name__}."
        ) from None


def _mixed(column) -> bool:
    """Whether NumPy would turn numbers of a list into text, as it does beside text, or refuse to read it."""
    return isinstance(column, (list, tuple)) and not all(isinstance(value, (int, float)) for value in column)
