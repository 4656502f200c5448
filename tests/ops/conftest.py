"""One thread (the tensors are tiny) and memory that is poisoned until it is written."""

import pytest
import torch

from joestar import _native


@pytest.fixture(autouse=True)
def single_thread():
    """Threads would only wait for each other."""
    threads, native = torch.get_num_threads(), _native.num_threads()
    torch.set_num_threads(1)
    _native.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    _native.set_num_threads(native)


@pytest.fixture
def poisoned():
    """``torch.empty`` gives NaN, or the largest integer: a kernel that leaves a slot unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
