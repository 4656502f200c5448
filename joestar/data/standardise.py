"""Columns of features brought to mean 0 and deviation 1."""

import numpy as np

from joestar.errors import DataError

PIECE = 1 << 20
"""Values that are in float64 at a time: 8 MiB."""
NOISE = 4 * np.finfo(np.float64).eps
"""A deviation up to so many times the mean is that of rounding."""
MOST = float(np.finfo(np.float32).max)


def standardised(x: np.ndarray, where: str) -> np.ndarray:
    """The columns with mean 0 and deviation 1, float32 ``[N, F]``; of constant ones 0.

    Mean, deviation and quotient are taken in float64, in pieces: in float32 a year, a time or many rows of a constant
    lose what they differ by.

    Args:
        x: finite numbers ``[N, F]`` of any real dtype.

    Raises:
        DataError: a number is beyond float32.
    """
    rows, width = x.shape
    step = max(1, PIECE // max(width, 1))
    total, squares, made = np.zeros(width), np.zeros(width), np.empty(x.shape, np.float32)
    if not rows:
        return made
    start = x[0].astype(np.float64)  # of sums of differences to it little is rounded off
    for first in range(0, rows, step):
        piece = x[first : first + step]
        _check_range(piece, first, where)
        total += (piece.astype(np.float64) - start).sum(axis=0)
    mean = start + total / rows
    for first in range(0, rows, step):
        squares += np.square(x[first : first + step].astype(np.float64) - mean).sum(axis=0)
    deviation = np.sqrt(squares / rows)
    constant = deviation <= NOISE * np.abs(mean)
    scale = np.where(constant, 1, deviation)
    for first in range(0, rows, step):
        made[first : first + step] = (x[first : first + step].astype(np.float64) - mean) / scale
    made[:, constant] = 0
    return made


def _check_range(piece: np.ndarray, first: int, where: str) -> None:
    if piece.dtype.kind == "f" and piece.dtype.itemsize > 4 and piece.size and max(piece.max(), -piece.min()) > MOST:
        row, column = np.argwhere(np.abs(piece) > MOST)[0]
        raise DataError(
            f"{where}: features holds {piece[row, column]:g} at [{first + row}, {column}], beyond float32, whose "
            "largest number is 3.4e38: scale the column."
        )
