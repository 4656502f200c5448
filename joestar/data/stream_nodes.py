"""Features and labels, from rows on disk to a converted folder, piece by piece."""

from collections.abc import Callable
from typing import Any

import numpy as np

from joestar.data.csv_reader import look
from joestar.data.folder_writer import FolderWriter
from joestar.data.journal import Journal
from joestar.data.labels import UNLABELLED
from joestar.data.progress import Progress
from joestar.data.rows import Rows
from joestar.data.text_blocks import blocks, columns_of
from joestar.errors import DataError

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MOST_CLASSES = (1 << 31) - 1
"""The largest class id: a model has an output for every one up to it."""
MOST = 1 << 24
"""Values that are converted together, at most."""
PER_VALUE = 32
"""Bytes of memory of a value while it is converted, beside those of its row in a text file."""


def check_features(x: Rows, num_nodes: int | None) -> None:
    """Raises unless these are features ``[num_nodes, F]``."""
    if len(x.shape) != 2 or x.shape[1] == 0 or (num_nodes is not None and x.shape[0] != num_nodes):
        said = "N" if num_nodes is None else num_nodes
        raise DataError(f"{x.where}: features must be [{said}, F] with F > 0; got {list(x.shape)}.")


def features_dtype(x: Rows, asked: str | None) -> str:
    """What features are stored in: as asked for, else float16 stays and others become float32."""
    if asked is not None:
        return DTYPES[asked]
    return "float16" if x.dtype == np.float16 else "float32"


def write_features(
    x: Rows, writer: FolderWriter, journal: Journal, dtype: str, limit: int, check: bool, progress: Progress
) -> None:
    """Writes ``ndata.x``.

    Args:
        check: look for NaN and infinite values.

    Raises:
        DataError: such a value when asked, or one beyond the range of ``dtype``; names row and column.
    """
    state = journal.state("features", {"rows": 0})
    file = writer.open("ndata.x", dtype, x.shape[1:], rows=state["rows"])
    step = max(1, min(MOST, limit // PER_VALUE) // x.shape[1])
    for first in range(state["rows"], x.shape[0], step):
        values = x.read(first, min(step, x.shape[0] - first))
        if check and values.dtype.kind == "f" and not np.isfinite(values).all():
            raise _bad(values, ~np.isfinite(values), first, x.where, "features must be finite")
        file.append(converted(values, dtype, first, x.where))
        state["rows"] = file.rows
        journal.save()
        progress("features", file.rows, x.shape[0])
    writer.keep("ndata.x", file)


def converted(values: np.ndarray, dtype: str, first: int, where: str) -> np.ndarray:
    """Values as ``dtype``; bfloat16 as the bits, int16, rounded to nearest even.

    Raises:
        DataError: a finite value becomes infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(values, dtype="float32" if dtype == "bfloat16" else dtype)
        shown = _to_bf16(made) if dtype == "bfloat16" else made
        infinite = (shown & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(shown)
        if infinite.any():
            beyond = infinite & np.isfinite(values)
            if beyond.any():
                raise _bad(values, beyond, first, where, f"a feature is beyond {dtype}: store bf16 or fp32")
    return shown


def _to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16).view(np.int16)


def _bad(values: np.ndarray, wrong: np.ndarray, first: int, where: str, what: str) -> DataError:
    row, column = (int(v) for v in np.argwhere(wrong)[0])
    return DataError(f"{where}: {what}; row {first + row}, column {column} is {values[row, column]}.")


class Labels:
    """Labels that are read in pieces; what is known of them at the end.

    Args:
        task: ``"classes"`` (also ``None``) or ``"regression"``.
    """

    def __init__(self, y: Rows, num_nodes: int, task: str | None):
        self.y, self.task = y, task
        self.width = 1 if len(y.shape) == 1 else y.shape[1]
        self.high, self.known, self.binary = -1, 0, True
        if len(y.shape) not in (1, 2) or y.shape[0] != num_nodes or self.width == 0:
            raise DataError(f"{y.where}: labels must be [{num_nodes}] or [{num_nodes}, T]; got {list(y.shape)}.")
        self.many = self.width > 1
        self.floats = self.many or task == "regression"

    def write(self, writer: FolderWriter, limit: int, progress: Progress) -> dict[str, Any]:
        """Writes ``ndata.y``; num_classes, multilabel, and how many nodes are labelled.

        Raises:
            DataError: class ids that are none, infinite targets, or no label at all.
        """
        shape = (self.width,) if self.many else ()
        file = writer.open("ndata.y", "float32" if self.floats else "int64", shape)
        step = max(1, min(MOST, limit // PER_VALUE) // self.width)
        take: Callable = self._targets if self.floats else self._classes
        for first in range(0, self.y.shape[0], step):
            count = min(step, self.y.shape[0] - first)
            file.append(take(self.y.read(first, count).reshape(count, *shape), first))
            progress("labels", first + count, self.y.shape[0])
        if not self.known:
            raise DataError(f"{self.y.where}: not one of the {self.y.shape[0]} nodes has a label.")
        writer.keep("ndata.y", file)
        multilabel = self.many and self.binary and self.task != "regression"
        classes = self.width if multilabel else None if self.floats else self.high + 1
        return {"num_classes": classes, "multilabel": multilabel, "labelled": self.known}

    def _classes(self, y: np.ndarray, first: int) -> np.ndarray:
        if y.dtype.kind == "f":
            known = ~np.isnan(y)
            wrong = np.flatnonzero(known & ~(np.isfinite(y) & (y == np.floor(y))))
            if len(wrong):
                raise DataError(
                    f"{self.y.where}: class ids must be whole numbers; row {first + int(wrong[0])} is {y[wrong[0]]}. "
                    "Targets of a regression: --task regression (task='regression')."
                )
            y = np.where(known, y, UNLABELLED)
        beyond = np.flatnonzero(y > np.float64(MOST_CLASSES))  # which is none of float16
        if len(beyond):
            raise DataError(
                f"{self.y.where}: class ids must be 0..C-1; row {first + int(beyond[0])} is {y[beyond[0]]}, beyond "
                f"{MOST_CLASSES:,}. Number the classes, or take --task regression (task='regression') for targets."
            )
        y = y.astype(np.int64)
        wrong = np.flatnonzero((y < 0) & (y != UNLABELLED))
        if len(wrong):
            raise DataError(
                f"{self.y.where}: class ids must be 0..C-1, or NaN or {UNLABELLED} for unlabelled nodes; row "
                f"{first + int(wrong[0])} is {y[wrong[0]]}."
            )
        self.known += int(np.count_nonzero(y >= 0))
        self.high = max(self.high, int(y.max())) if len(y) else self.high
        return y

    def _targets(self, y: np.ndarray, first: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            y = y.astype(np.float32)
        if np.isinf(y).any():
            row = int(np.argwhere(np.isinf(y))[0][0])
            raise DataError(f"{self.y.where}: targets must be finite numbers of float32; row {first + row} is not.")
        self.known += int(np.count_nonzero(~np.isnan(y)))
        other = ~((y == 0) | (y == 1) | np.isnan(y))
        if self.task == "classes" and other.any():
            raise _bad(
                y.reshape(len(y), -1),
                other.reshape(len(y), -1),
                first,
                self.y.where,
                "task='classes' with labels [N, T] needs 0 and 1 (NaN where unknown)",
            )
        self.binary = self.binary and not other.any()
        return y


class TextRows:
    """Rows of numbers of a text file without header, float64, parsed as they are read, from the first to the last.

    Args:
        rows: how many there must be. limit: bytes to work in.

    Raises:
        DataError: a field is no number; names line and field. There are fewer rows, or more.
    """

    def __init__(self, path, rows: int, limit: int):
        self.path, self.where, self.dtype = path, str(path), np.dtype(np.float64)
        layout = look(path, False, ",", [])
        self.shape = (rows, len(layout.names))
        self.block = int(max(1 << 12, min(1 << 24, limit // 16)))
        self.stream, self.at, self.rest = None, 0, None

    def read(self, first: int, count: int) -> np.ndarray:
        """Rows ``first`` to ``first + count``; those before are parsed and passed over."""
        if self.stream is None or first < self.at:
            self.stream, self.at, self.rest = self._parsed(), 0, np.empty((0, self.shape[1]))
        found, missing = [], count
        while missing:
            piece = self.rest if len(self.rest) else next(self.stream, None)
            if piece is None:
                raise DataError(
                    f"{self.path}: expected {self.shape[0]} rows, one per node; the file has {self.at}. Is it complete?"
                )
            skip = max(0, min(first - self.at, len(piece)))
            part = piece[skip : skip + missing]
            self.rest, self.at = piece[skip + len(part) :], self.at + skip + len(part)
            missing -= len(part)
            found.append(part)
        if self.at == self.shape[0]:
            self._check_end()
        return np.concatenate(found) if found else np.empty((0, self.shape[1]))

    def _check_end(self) -> None:
        if len(self.rest) or any(len(piece) for piece in self.stream):
            raise DataError(
                f"{self.path}: expected {self.shape[0]} rows, one per node; the file has more. Is it that of the graph?"
            )

    def _parsed(self):
        width = self.shape[1]
        for block in blocks(self.path, self.block):
            columns = columns_of(block, self.path, width, list(range(width)), ",", np.float64)
            yield np.stack(columns, axis=1) if columns else np.empty((0, width))
