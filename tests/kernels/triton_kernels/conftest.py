"""Kernels in Triton's interpreter (see ``tests/conftest.py``), on memory that is poisoned until it is written."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned():
    """``torch.empty`` gives NaN, or the largest integer: a kernel that leaves a slot unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def atomic(poisoned):
    """Gradients by atomic additions, which deterministic mode replaces."""
    torch.use_deterministic_algorithms(False)
