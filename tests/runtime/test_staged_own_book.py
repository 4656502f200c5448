"""Steps over macro-batches whose slots the device gives, as a GPU does: all that holds of others holds of them."""

import threading

import pytest

from joestar.staged import planning
from tests.runtime.test_staged import *  # noqa: F403  (its tests, once more)

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton: pip install triton (Linux)")


@pytest.fixture(autouse=True)
def own_book(monkeypatch):
    """Triton's interpreter changes its language while a kernel runs: one thread at a time."""
    monkeypatch.setattr(planning, "keeps_book", lambda device: True)
    one_at_a_time, call = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(*args, **kwargs):
        with one_at_a_time:
            return call(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)
