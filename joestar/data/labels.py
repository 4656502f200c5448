"""Labels as people have them: class names, class ids, targets; and splits."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from joestar.data.columns import MISSING, Coded, number_of
from joestar.data.float32 import in_float32
from joestar.errors import DataError

UNLABELLED = -100
TASKS = (None, "classes", "regression")
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*")
MANY = 0.5
"""Classes per labelled node from which whole numbers are rather a quantity."""


@dataclass
class Labels:
    """Labels of all nodes.

    Attributes:
        y: int64 ``[N]`` class ids, -100 where unlabelled; or float32 ``[N]`` or ``[N, T]``, NaN where unknown.
        num_classes: ``None`` for regression; multilabel: whether ``y`` ``[N, T]`` holds 0 and 1.
        class_names: what the classes are called, if they are not called 0, 1, ...; note: what to tell.
    """

    y: np.ndarray
    num_classes: int | None = None
    multilabel: bool = False
    class_names: list[str] | None = None
    note: str = ""


def check_task(task: str | None) -> None:
    """Raises ``DataError`` unless ``task`` is a known one."""
    if task not in TASKS:
        raise DataError(f"task must be 'classes', 'regression' or None (by the values); got {task!r}.")


def from_coded(
    column: Coded, where: str, task: str | None, line: Callable[[int], str] = "row {}".format
) -> Labels:  # fmt: skip
    """Labels of a column of a table: text is classes, whole numbers are classes, other numbers are targets.

    Args:
        line: how messages call a row.

    Raises:
        DataError: a label that does not fit.
    """
    known = [value for value in column.values if value is not None]
    if not known:
        raise DataError(f"{where}: not one label; all values are missing. Leave it out with label=False.")
    parsed = [_number(value) for value in known]
    _check_finite(column, known, parsed, where, line)
    if any(value is None for value in parsed):
        if task == "regression":
            raise DataError(f"{where}: task='regression' needs numbers; got {known[parsed.index(None)]!r}.")
        return _named(column, sorted({str(value) for value in known}), str)
    whole = all(isinstance(value, int) or value.is_integer() for value in parsed)
    written_whole = all(not isinstance(v, str) or ("." not in v and "e" not in v.lower()) for v in known)
    if task == "regression" or (task is None and not (whole and written_whole)):
        return _targets(column, where, line)
    if not whole:
        value = next(value for value in parsed if not (isinstance(value, int) or value.is_integer()))
        raise DataError(f"{where}: task='classes' needs whole numbers or text; got {value}.")
    return _numbered(column, sorted({int(value) for value in parsed}), where, task)


def _number(value) -> int | float | None:
    """What a label is as a number, which may be infinite; ``None`` for text."""
    try:
        if isinstance(value, (bool, int, np.integer)) or (isinstance(value, str) and _WHOLE.fullmatch(value)):
            return int(value)  # beyond 2^53 a float is another one
        made = number_of(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(made) else made


def _check_finite(column: Coded, known: list, parsed: list, where: str, line: Callable[[int], str]) -> None:
    """Raises ``DataError`` for an infinite label; among names of classes the text "inf" is one."""
    named = any(number is None for number in parsed)
    for value, number in zip(known, parsed, strict=True):
        if isinstance(number, float) and math.isinf(number) and not (named and isinstance(value, str)):
            raise DataError(f"{where}: labels must be finite; {_first(column, value, line)} has {value!r}.")


def _first(column: Coded, value, line: Callable[[int], str]) -> str:
    """The first row that has a value."""
    return line(int(np.flatnonzero(column.places == column.values.index(value))[0]))


def _named(column: Coded, names: list[str], key) -> Labels:
    rank = {name: position for position, name in enumerate(names)}
    table = np.array([UNLABELLED if v is None else rank[key(v)] for v in column.values], dtype=np.int64)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return Labels(table[column.places], len(names), False, names, f"{len(names)} classes ({shown})")


def _numbered(column: Coded, found: list[int], where: str, task: str | None) -> Labels:
    """Class ids that are 0..C-1 stay; others are ranked, and their numbers are the classes' names."""
    if found[0] < 0 and found != [-1, 1]:
        raise DataError(
            f"{where}: the label {found[0]} is negative: leave labels of unlabelled nodes empty, or write the classes "
            "as text."
        )
    labels = _named(column, [str(value) for value in found], lambda value: str(int(_number(value))))
    if found == list(range(len(found))):
        labels.class_names, labels.note = None, f"{len(found)} classes (0 to {found[-1]})"
    labelled = int(np.count_nonzero(labels.y != UNLABELLED))
    if task is None and len(found) > max(20, MANY * labelled):
        raise DataError(
            f"{where}: {len(found)} different whole numbers on {labelled} nodes: say what they are, "
            "task='regression' (a quantity) or task='classes'."
        )
    return labels


def _targets(column: Coded, where: str, line: Callable[[int], str]) -> Labels:
    with np.errstate(over="ignore"):
        table = np.array([np.nan if v is None else _float(v) for v in column.values]).astype(np.float32)
    if np.isinf(table).any():
        value = column.values[int(np.flatnonzero(np.isinf(table))[0])]
        raise DataError(f"{where}: targets must be numbers of float32; {_first(column, value, line)} has {value!r}.")
    y = table[column.places]
    low, high = np.nanmin(y), np.nanmax(y)
    return Labels(y, note=f"a target for regression ({low:.4g} to {high:.4g}; task='classes' otherwise)")


def _float(value) -> float:
    try:
        return float(value)
    except OverflowError:  # of whole numbers
        return math.inf


def from_array(y: np.ndarray, num_nodes: int, where: str, task: str | None = None) -> Labels:
    """Labels of an array: ``[N]`` or ``[N, 1]`` whole numbers are classes, other floats and ``[N, T]`` targets.

    Raises:
        DataError: shape, dtype or values do not fit.
    """
    if y.ndim not in (1, 2) or len(y) != num_nodes:
        raise DataError(
            f"{where}: labels must be [{num_nodes}] class ids or targets, or [{num_nodes}, T] targets; got shape "
            f"{list(y.shape)}."
        )
    if y.dtype.kind not in "iufb":
        raise DataError(f"{where}: labels must be numbers; got dtype {y.dtype}. Map class names to 0..C-1 first.")
    if y.ndim == 2 and y.shape[1] != 1:
        return _many(y, where, task)
    y = y.reshape(-1)
    if y.dtype.kind == "f":
        known = y[~np.isnan(y)]
        if np.isinf(known).any():
            raise DataError(
                f"{where}: labels must be finite; node {np.flatnonzero(np.isinf(y))[0]} has an infinite one."
            )
        if task == "regression" or (task is None and (known != np.floor(known)).any()):
            return Labels(
                in_float32(y, f"{where}: labels"), note="targets for regression (y is no whole number everywhere)"
            )
        if (known != np.floor(known)).any():
            raise DataError(f"{where}: class ids must be whole numbers; got {known[known != np.floor(known)][0]}.")
        y = np.where(np.isnan(y), UNLABELLED, y)
    elif task == "regression":
        return Labels(in_float32(y, f"{where}: labels"), note="targets for regression, as asked for")
    y = y.astype(np.int64)
    wrong = y[(y < 0) & (y != UNLABELLED)]
    if len(wrong):
        raise DataError(
            f"{where}: class ids must be 0..C-1, or NaN or {UNLABELLED} for unlabelled nodes; got {wrong[0]} "
            f"on {len(wrong)} nodes."
        )
    return Labels(y, int(y.max()) + 1 if len(y) else None)


def _many(y: np.ndarray, where: str, task: str | None) -> Labels:
    y = in_float32(y, f"{where}: labels")
    if np.isinf(y).any():
        row, column = np.argwhere(np.isinf(y))[0]
        raise DataError(f"{where}: multi-label targets must be finite; node {row}, task {column} is {y[row, column]}.")
    binary = bool(((y == 0) | (y == 1) | np.isnan(y)).all())
    if task == "classes" and not binary:
        raise DataError(f"{where}: task='classes' with [N, T] targets needs 0 and 1 (NaN where unknown).")
    if binary and task != "regression":
        return Labels(y, y.shape[1], True)
    return Labels(y, note=f"{y.shape[1]} targets for regression (y is not only 0 and 1)")


def labelled_nodes(y: np.ndarray) -> np.ndarray:
    """Ids of the nodes with a class, respectively with any known target."""
    if y.dtype.kind == "f":
        known = ~np.isnan(y)
        return np.flatnonzero(known.any(axis=1) if y.ndim == 2 else known)
    return np.flatnonzero(y != UNLABELLED)


SPLIT_NAMES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


def split_of(column: Coded, where: str) -> dict[str, np.ndarray]:
    """Node ids under ``train``, ``val`` and ``test`` from a column of these words; other nodes: none, empty or ``-``.

    Raises:
        DataError: another word.
    """
    table = []
    for value in column.values:
        text = "" if value is None else str(value).strip().lower()
        if text not in SPLIT_NAMES and text not in MISSING and text != "-":
            raise DataError(f"{where}: a split is 'train', 'val' or 'test', or empty for none; got {value!r}.")
        table.append(SPLIT_NAMES.get(text, -1))
    part = np.array(table, dtype=np.int64)[column.places]
    return {name: np.flatnonzero(part == number) for number, name in enumerate(("train", "val", "test"))}
