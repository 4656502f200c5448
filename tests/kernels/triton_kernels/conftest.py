"""Kernels in Triton's interpreter (see ``tests/conftest.py``), on memory that is poisoned until it is written."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """Triton's interpreter patches its language anew in every function that a kernel calls: once per launch will do."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton: pip install triton (Linux)")
    language, patch = interpreter.tl, interpreter._patch_lang

    def unless_patched(fn):
        seen = [module for module in fn.__globals__.values() if module is language or module is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            return patch(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", unless_patched)
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
