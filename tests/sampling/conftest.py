"""The number of threads of the C++ kernels is restored after every test."""

import pytest

from joestar import _native


@pytest.fixture(autouse=True)
def single_thread():
    """One thread, unless a test says otherwise."""
    threads = _native.num_threads()
    _native.set_num_threads(1)
    yield
    _native.set_num_threads(threads)
