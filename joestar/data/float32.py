"""Numbers of files in float32, which models compute in."""

import numpy as np

from joestar.errors import DataError
from joestar.graph_api.arrays import from_array, to_float32


def in_float32(values: np.ndarray, name: str) -> np.ndarray:
    """The values in float32.

    Raises:
        DataError: a finite one is beyond float32.
    """
    return to_float32(from_array(values, name, DataError), name, DataError).numpy()
