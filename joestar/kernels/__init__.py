"""Machine level: kernels behind the ops, whose files name theirs (``joestar/ops``)."""

import functools
import importlib
from collections.abc import Callable

NAMED: dict[str, dict[str, Callable]] = {"cpu": {}, "cuda": {}}
"""Device type -> op -> its kernel, filled by the ops: what ``joestar.kernels.cpu`` and ``joestar.kernels.gpu`` show."""


@functools.cache
def has_native() -> bool:
    """Whether the extension with the C++ kernels is built.

    It is loaded behind PyTorch: with one that was loaded first, ``import torch`` has ended in a segmentation fault
    (PyTorch 2.11 for CUDA 13), in the C++ library that both use.
    """
    return _imports("torch") and _imports("joestar._native")


@functools.cache
def has_triton() -> bool:
    """Whether there is Triton."""
    return _imports("triton")


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def find(named: str) -> Callable | None:
    """The kernel ``"module.function"`` of this folder, ``None`` where what it needs is not there.

    Modules ``gpu_*`` need Triton, others the extension.
    """
    if not (has_triton() if named.startswith("gpu") else has_native()):
        return None
    module, _, function = named.partition(".")
    return getattr(importlib.import_module(f"joestar.kernels.{module}"), function)


def of_op(device: str, name: str):
    """The kernel of an op; for the name ``__all__`` the names of all ops with one.

    Raises:
        AttributeError: there is none.
    """
    importlib.import_module("joestar.ops")  # which name their kernels, if nothing has asked for them yet
    if name == "__all__":
        return sorted(NAMED[device])
    if name not in NAMED[device]:
        raise AttributeError(f"no op of the name {name!r} has a kernel for {device}")
    return NAMED[device][name]
