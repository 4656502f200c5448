"""Numbers of files in float32, which models compute in."""

import numpy as np

from joestar.errors import DataError


def in_float32(values: np.ndarray, name: str) -> np.ndarray:
    """The values in float32.

    Raises:
        DataError: a finite one is beyond float32.
    """
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    lost = np.isinf(found) & ~np.isinf(values)
    if lost.any():
        place = np.argwhere(lost)[0].tolist()
        raise DataError(
            f"{name}: {values[tuple(place)]:g} at {place} is beyond float32, whose largest number is 3.4e38: scale the "
            "values."
        )
    return found
