"""Captures are made here as in the tests of lowering, but by the quicker way: what is tested are the passes."""

import pytest
from lowering.conftest import quiet  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def _quick(cheapest_captures):
    """Every program of these tests."""
