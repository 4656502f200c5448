"""What ``test_compile_ahead.py`` runs in a process of its own: Triton compiles for a GPU that is not there.

Prints JSON: numbers of binaries and of launches that ran after every part.
"""

import json
import threading
from unittest import mock

import compile_only  # noqa: F401  (a driver)
import torch
import triton
import triton.language as tl
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction, KernelInterface

from joestar.kernels import compile_ahead

JITFunction.__getitem__ = KernelInterface.__getitem__
RUN = JITFunction.run
ran = []


def run(self, *args, grid, warmup, **kwargs):
    """In place of ``JITFunction.run``: no GPU would launch anything."""
    if not warmup:
        ran.append(kwargs["SIZE"])
        return None
    return RUN(self, *args, grid=grid, warmup=True, **kwargs)


@triton.jit
def _fill(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), 1)


@triton.jit
def _wrong(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE + 1), 1)  # no power of two


def binaries() -> int:
    return sum(len(cache[0]) for cache in _fill.device_caches.values())


def main() -> None:
    JITFunction.run = run
    out, found = torch.zeros(1024), {}

    def launch(size: int, kernel=_fill) -> None:
        assert compile_ahead.is_compiling()
        kernel[(1,)](out, SIZE=size)
        compile_ahead.compile_all([lambda: launch(2048)])  # within another one: nothing

    def elsewhere() -> None:
        _fill[(1,)](out, SIZE=7)  # another thread's launches run

    def both() -> None:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()

    def fails() -> None:
        raise ValueError("told when it is launched")

    compile_ahead.compile_all([lambda: launch(16), lambda: launch(32), fails, lambda: launch(64), lambda: launch(16)])
    found["compiled"] = binaries(), list(ran)
    compile_ahead.compile_all([both, lambda: launch(16, _wrong), lambda: launch(128)])
    found["others"] = binaries(), list(ran)
    found["restored"] = JITFunction.run is run, compile_ahead.is_compiling()
    with mock.patch.object(
        _async_compile, "as_completed", side_effect=KeyboardInterrupt
    ):  # while it waits for the last
        try:
            compile_ahead.compile_all([lambda: launch(512)])
        except KeyboardInterrupt:
            found["interrupted"] = _async_compile.active_mode.get() is None, JITFunction.run is run
    with triton.AsyncCompileMode(compile_ahead.ThreadPoolExecutor(1)):  # the user's own
        compile_ahead.compile_all([lambda: launch(256)])
    found["user's"] = binaries(), list(ran)
    _fill[(1,)](out, SIZE=16)
    found["ran"] = list(ran)
    print(json.dumps(found))


main()
