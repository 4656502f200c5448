"""Loggers by what they can do: TensorBoard's, Weights & Biases', Lightning's, a function, or the path of a CSV file."""

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from joestar.errors import ConfigError

Log = Callable[[Mapping[str, float], int], None]


def logger(target) -> Log:
    """A function (values, number of the epoch or step) for whatever ``target`` is.

    Args:
        target: has ``add_scalar(name, value, number)`` (TensorBoard), ``log_metrics(values, number)`` (Lightning) or
            ``log(values, step=number)`` (Weights & Biases); a path ``*.csv``; or such a function.

    Raises:
        ConfigError: for anything else, or a file that cannot be written.
    """
    if isinstance(target, (str, os.PathLike)):
        return CsvFile(target)
    if callable(getattr(target, "add_scalar", None)):
        return lambda values, number: [target.add_scalar(name, value, number) for name, value in values.items()]
    if callable(getattr(target, "log_metrics", None)):
        return lambda values, number: target.log_metrics(dict(values), number)
    if callable(getattr(target, "log", None)):
        return lambda values, number: target.log(dict(values), step=number)
    if callable(target):
        return target
    raise ConfigError(
        f"a logger must have add_scalar (TensorBoard), log_metrics (Lightning) or log (Weights & Biases), or be a "
        f"function (values, number) or the path of a .csv file; got {type(target).__name__}."
    )


class CsvFile:
    """A CSV file with a row per number; rows of an earlier run stay if they come before the first one of this."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if self.path.suffix != ".csv":
            raise ConfigError(f"{path} is no logger: expected a path that ends in .csv.")
        self.rows: dict[int, dict[str, str]] = {}
        self.names = ["number"]
        self.fresh = True

    def __call__(self, values: Mapping[str, float], number: int) -> None:
        """Adds values to the row of a number."""
        try:
            again = self._read(number) if self.fresh else number in self.rows
            row = self.rows.setdefault(number, {"number": str(number)})
            row.update({name: repr(value) for name, value in values.items()})
            new = [name for name in values if name not in self.names]
            self.names += new
            with self.path.open("w" if again or new else "a", newline="") as file:
                writer = csv.DictWriter(file, self.names)
                if again or new:
                    writer.writeheader()
                writer.writerows(self.rows.values() if again or new else [row])
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error}).") from error

    def _read(self, number: int) -> bool:
        self.fresh = False
        if number > 0 and self.path.exists():
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.rows = {int(row["number"]): row for row in rows if int(row["number"]) < number}
            self.names = list(rows[0]) if rows else self.names
        return True


def loggers(targets) -> list[Log]:
    """A function for each of one logger or several."""
    if targets is None:
        return []
    several = isinstance(targets, (list, tuple))
    return [logger(target) for target in (targets if several else [targets])]
