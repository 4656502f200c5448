"""Columns of tables: ids, numbers and coded values, from NumPy arrays or from pieces of text."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from joestar.errors import DataError

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Text that stands for a missing number, label or split, in any case. Of ids only empty text is missing."""


@dataclass
class Ids:
    """Raw node ids: integers as they are, or text as places in a list.

    Attributes:
        values: int64 ``[rows]``; texts: ``None``, or distinct texts, of which ``values`` are the places.
    """

    values: np.ndarray
    texts: list[str] | None = None

    def as_text(self) -> "Ids":
        """The same with text ids; integers as they are written."""
        if self.texts is not None:
            return self
        distinct, places = np.unique(self.values, return_inverse=True)
        return Ids(places.reshape(-1), [str(value) for value in distinct.tolist()])

    def raw(self, row: int) -> int | str:
        """The id in a row."""
        value = int(self.values[row])
        return value if self.texts is None else self.texts[value]


@dataclass
class Coded:
    """Values of any kind as places in a list of the distinct ones; ``None`` there where missing."""

    places: np.ndarray
    values: list


class IdCollector:
    """Puts a column of ids together, piece by piece: integers while all are, else text, each text kept once.

    Only text that is how an integer is written counts as one: ``"007"`` and ``"7"`` stay two ids.
    """

    def __init__(self):
        self.pieces: list[np.ndarray] = []
        self.index: dict[str, int] | None = None

    def add(self, texts: list[str]) -> None:
        """Takes the next rows."""
        if self.index is None:
            whole = integers(texts)
            if whole is not None:
                self.pieces.append(whole)
                return
            self._become_text()
        index = self.index
        self.pieces.append(np.fromiter((index.setdefault(text, len(index)) for text in texts), np.int64, len(texts)))

    def add_integers(self, values: np.ndarray) -> None:
        """Takes rows that are integers."""
        if self.index is None:
            self.pieces.append(values.astype(np.int64, copy=False))
        else:
            self.add([str(value) for value in values.tolist()])

    def add_coded(self, texts: list[str], places: np.ndarray) -> None:
        """Takes rows of text, given as places in a list of distinct texts."""
        if self.index is None:
            self._become_text()
        index = self.index
        known = np.array([index.setdefault(text, len(index)) for text in texts], dtype=np.int64)
        self.pieces.append(known[places])

    def _become_text(self) -> None:
        self.index, before, self.pieces = {}, self.pieces, []
        for piece in before:
            self.add([str(value) for value in piece.tolist()])

    def done(self) -> Ids:
        """The column."""
        values = np.concatenate(self.pieces) if self.pieces else np.empty(0, np.int64)
        return Ids(values, None if self.index is None else list(self.index))


class CodeCollector:
    """Puts a column of values together, each distinct one kept once."""

    def __init__(self):
        self.pieces: list[np.ndarray] = []
        self.index: dict = {}

    def add(self, values: Iterable) -> None:
        """Takes the next rows; text that stands for a missing value becomes ``None``."""
        index = self.index
        places = [index.setdefault(value, len(index)) for value in values]
        self.pieces.append(np.array(places, dtype=np.int64))

    def done(self) -> Coded:
        """The column."""
        values = [None if isinstance(v, str) and v.lower() in MISSING else v for v in self.index]
        return Coded(np.concatenate(self.pieces) if self.pieces else np.empty(0, np.int64), values)


def on_host(value) -> np.ndarray:
    """An array, or a tensor as one; bfloat16, which NumPy has not, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    return np.asarray(value)


def integers(texts: list[str]) -> np.ndarray | None:
    """int64 of texts that are written as integers are; ``None`` if one is not."""
    try:
        values = np.fromiter(map(int, texts), np.int64, len(texts))
    except (ValueError, OverflowError):
        return None
    return values if list(map(str, values.tolist())) == texts else None


def numbers(texts: list[str], complain: Callable[[int, str], Exception]) -> np.ndarray:
    """float64 of texts, NaN where one is missing.

    Args:
        complain: from the row of a text that is no number, and the text, to the error to raise.
    """
    if not as_python_alone("".join(texts)):
        try:
            return np.array(texts, dtype=np.float64)
        except ValueError:
            pass
    made = np.empty(len(texts))
    for row, text in enumerate(texts):
        try:
            made[row] = math.nan if text.lower() in MISSING else number_of(text)
        except ValueError:
            raise complain(row, text) from None
    return made


def as_python_alone(text: str) -> bool:
    """Whether it has what numbers have in no file, and in Python: ``1_000``, digits of other scripts."""
    return "_" in text or not text.isascii()


def number_of(text: str, kind: type = float):
    """A number as files have it.

    Raises:
        ValueError: it is none.
    """
    if as_python_alone(text):
        raise ValueError(f"{text!r} is no number.")
    return kind(text)


def ids_of(array: np.ndarray, where: str, line: Callable[[int], str]) -> Ids:
    """A column of a frame as ids.

    Raises:
        DataError: a missing id, or ids that are neither whole numbers nor text.
    """
    if array.dtype.kind in "iu":
        if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise DataError(f"{where}: the id {array.max()} is beyond int64; convert the column to text.")
        return Ids(array.astype(np.int64, copy=False))
    if array.dtype.kind == "f":
        return _whole(array, where, line)
    objects = _objects(array, where)
    bad = next((row for row, value in enumerate(objects) if is_missing(value) or value == ""), None)
    if bad is not None:
        raise DataError(f"{where}: {line(bad)} has no id. Remove such rows, or give them ids.")
    if all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in objects):
        try:
            return Ids(np.array([int(value) for value in objects], dtype=np.int64).reshape(-1))
        except OverflowError:
            raise DataError(f"{where}: an id is beyond int64; convert the column to text.") from None
    bad = next((row for row, value in enumerate(objects) if not isinstance(value, str)), None)
    if bad is not None:
        raise DataError(
            f"{where}: ids must be all integers or all text; {line(bad)} has {objects[bad]!r} "
            f"({type(objects[bad]).__name__}). Convert the column to text."
        )
    collector = IdCollector()
    collector.index = {}
    collector.add(objects)
    return collector.done()


def _whole(array: np.ndarray, where: str, line: Callable[[int], str]) -> Ids:
    """Floats that stand for integers, as pandas makes them of a column with a gap."""
    missing = np.flatnonzero(np.isnan(array))
    if len(missing):
        raise DataError(f"{where}: {line(missing[0])} has no id. Remove such rows, or give them ids.")
    most = np.float64(2) ** (np.finfo(array.dtype).nmant + 1)  # from it on an integer may have been another one
    wrong = np.flatnonzero((array != np.floor(array)) | (np.abs(array) >= most))
    if len(wrong):
        found = array[wrong[0]]
        cut = f" {array.dtype} holds not every integer from {int(most)} on." * bool(most <= abs(found) < np.inf)
        raise DataError(f"{where}: ids must be integers or text; {line(wrong[0])} has {found}.{cut}")
    return Ids(array.astype(np.int64))


def numbers_of(array: np.ndarray, where: str, line: Callable[[int], str]) -> np.ndarray:
    """A column of a frame as float64, NaN where missing."""
    if array.dtype.kind in "iufb":
        return array.astype(np.float64)
    objects = _objects(array, where)
    made = np.empty(len(objects))
    for row, value in enumerate(objects):
        try:
            missing = is_missing(value) or (isinstance(value, str) and value.strip().lower() in MISSING)
            made[row] = math.nan if missing else number_of(value) if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            raise DataError(no_number(where, line(row), value)) from None
    return made


def coded_of(array: np.ndarray, where: str) -> Coded:
    """A column of a frame as coded values: integers, floats, text, booleans; ``None`` where missing."""
    if array.dtype.kind in "iufb":
        distinct, places = np.unique(array, return_inverse=True, equal_nan=True)
        values = [None if is_missing(value) else value for value in distinct.tolist()]
        return Coded(places.reshape(-1), values)
    collector = CodeCollector()
    collector.add(None if is_missing(value) else value for value in _objects(array, where))
    return collector.done()


def is_missing(value) -> bool:
    """Whether a value of a frame is ``None``, NaN, or what pandas has for it."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True


def no_number(where: str, line: str, value) -> str:
    """The message for text in a column of numbers."""
    return (
        f"{where}: expected numbers, but {line} has {value!r}. Name the columns to use (features=[...] of nodes, "
        "edge_attr=[...] of edges), or encode this one."
    )


def _objects(array: np.ndarray, where: str) -> list:
    if array.dtype.kind not in "OUST":
        raise DataError(f"{where}: a column of dtype {array.dtype} is neither numbers nor text. Convert it first.")
    values = array.tolist()
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text, but a value holds bytes that are no UTF-8 ({error}).") from None
