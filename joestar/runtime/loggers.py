"""Loggers by what they can do: TensorBoard's, Weights & Biases', Lightning's, a function, or the path of a CSV file."""

import contextlib
import csv
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from joestar.errors import ConfigError
from joestar.runtime.fit_calls import accepts

Log = Callable[[Mapping[str, float], int], None]


def logger(target, goes_on: bool = False) -> Log:
    """A function (values, number of the epoch or step) for whatever ``target`` is.

    Args:
        target: has ``add_scalar(name, value, number)`` (TensorBoard), ``log_metrics(values, number)`` (Lightning) or
            ``log(values, step=number)`` (Weights & Biases); a path ``*.csv``; or such a function.
        goes_on: with what was logged before, from a checkpoint.

    Raises:
        ConfigError: for anything else, or a file that cannot be written.
    """
    if isinstance(target, (str, os.PathLike)):
        return CsvFile(target, goes_on)
    if _can(target, "add_scalar", "", 0.0, 0):
        return lambda values, number: [target.add_scalar(name, value, number) for name, value in values.items()]
    if _can(target, "log_metrics", {}, 0):
        return lambda values, number: target.log_metrics(dict(values), number)
    if _can(target, "log", {}, step=0):
        return lambda values, number: target.log(dict(values), step=number)
    if callable(target) and accepts(target, {}, 0):
        return target
    raise ConfigError(
        "a logger must have add_scalar (TensorBoard), log_metrics (Lightning) or log with step= (Weights & Biases), or "
        f"be a function (values, number) or the path of a .csv file; got {type(target).__name__}. For another logger "
        "give a function, as lambda values, number: logger.info('%s %s', number, values)."
    )


def _can(target, name: str, *given, **named) -> bool:
    method = getattr(target, name, None)
    return callable(method) and accepts(method, *given, **named)


class CsvFile:
    """A CSV file with a row per number.

    Of a run that goes on, rows of before stay that come before the first one of this run. One that begins puts its
    first row in place of the whole file.

    Raises:
        ConfigError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: str | os.PathLike, goes_on: bool = False):
        self.path, self.goes_on = Path(path), goes_on
        if self.path.suffix != ".csv":
            raise ConfigError(f"{path} is no logger: expected a path that ends in .csv.")
        self.rows: dict[int, dict[str, str]] = {}
        self.names = ["number"]
        self.fresh = True
        self._check()

    def _check(self) -> None:
        folder = Path(os.path.realpath(self.path)).parent
        if not folder.is_dir():
            raise ConfigError(f"{self.path} cannot be written: there is no folder {folder}. Make it before.")
        place = self.path if self.path.exists() else folder
        if not os.access(place, os.W_OK):
            raise ConfigError(f"{self.path} cannot be written: there is no permission to write to {place}.")
        self._rows()

    def _rows(self) -> list[dict[str, str]]:
        """What the file holds."""
        if not (self.path.is_file() or self.path.is_dir()):  # a device is written to only
            return []
        try:
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows, names = list(reader), reader.fieldnames or ["number"]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{self.path} is no log of fit: it cannot be read as a CSV file ({error}).") from error
        if names[0] != "number" or not all(map(_is_ours, rows)):
            raise ConfigError(
                f"{self.path} is no log of fit, which would replace it: expected rows that begin with a number of "
                f"steps; its columns are {', '.join(names)}. Give another path."
            )
        return rows

    def __call__(self, values: Mapping[str, float], number: int) -> None:
        """Adds values to the row of a number."""
        try:
            again = self._begin(number) if self.fresh else number in self.rows
            row = self.rows.setdefault(number, {"number": str(number)})
            row.update({name: repr(value) for name, value in values.items()})
            new = [name for name in values if name not in self.names]
            self.names += new
            if again or new:
                self._replace()
            else:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self.names).writerow(row)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error}).") from error

    def _begin(self, number: int) -> bool:
        self.fresh = False
        if self.goes_on:
            rows = self._rows()
            self.rows = {int(row["number"]): row for row in rows if int(row["number"]) < number}
            self.names = list(rows[0]) if rows else self.names
        return True

    def _replace(self) -> None:
        """Writes all rows beside, then renames: whatever ends the process, those that were there are not lost.

        In place where that cannot be: a device, a folder that is not writable, a file that is mounted.
        """
        place = Path(os.path.realpath(self.path))
        beside = place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp")
        if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
            return self._write(place)
        try:
            self._write(beside)
            if place.exists():
                shutil.copymode(place, beside)
            try:
                beside.replace(place)
            except OSError:
                if not place.exists():
                    raise
                self._write(place)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return None

    def _write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.names)
            writer.writeheader()
            writer.writerows(self.rows.values())


def _is_ours(row: dict) -> bool:
    """Whether a row begins with a number, and has no more entries than the header."""
    return (row["number"] or "").isdecimal() and None not in row


def loggers(targets, goes_on: bool = False) -> list[Log]:
    """A function for each of one logger or several; see ``logger``."""
    if targets is None:
        return []
    several = isinstance(targets, (list, tuple))
    return [logger(target, goes_on) for target in (targets if several else [targets])]
