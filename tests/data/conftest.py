"""Features and labels of the small graph."""

import numpy as np
import pytest

from .small import NUM_NODES


@pytest.fixture
def features():
    """Float features [7, 3]."""
    return np.random.default_rng(0).standard_normal((NUM_NODES, 3)).astype(np.float32)


@pytest.fixture
def labels():
    """Class ids [7] of three classes."""
    return np.array([0, 1, 2, 0, 1, 2, 0])
