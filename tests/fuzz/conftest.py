"""Captures are made here as in the tests of lowering."""

import pytest
from lowering.conftest import quiet  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Bad programs may write files before they are refused: not into the checkout."""
    monkeypatch.chdir(tmp_path)
