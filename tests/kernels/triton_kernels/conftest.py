"""Kernels in Triton's interpreter (see ``tests/conftest.py``), on memory that is poisoned until it is written."""

import pytest
import torch
from quick_interpreter import quick


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """A session of this folder spends most of its time in the interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton: pip install triton (Linux)")
    with quick(interpreter):
        yield


@pytest.fixture(autouse=True)
def short_hub(monkeypatch):
    """The interpreter takes time for every edge of the longest row; this one still is longer than two tiles."""
    monkeypatch.setattr("ops.structures.HUB", 75)


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


@pytest.fixture
def ranges(monkeypatch):
    """Bounds of loops may be arguments: the interpreter's are arrays of one number, which NumPy no longer takes."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
