"""Kernels of several launches compiled side by side, before the first of them runs.

Triton compiles a kernel when it is launched first, and the launching thread waits: a third of a second each, half of it
for another process. Launches within ``compiled_only`` only compile, and ``triton.AsyncCompileMode`` has threads do it.

What is known to be launched soon can be compiled while something else is done (``begin``, ``wait``): ops are called
with tensors of the meta device, which have shapes and no memory. What a call decides by numbers, or fails in, is
compiled when it is launched.
"""

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.runtime.jit import JITFunction

from joestar.kernels.gpu_launch import INTERPRETED
from joestar.locks import ProcessLock

THREADS = 8
"""That compile at a time, at most: Python's lock is theirs for half of the time."""
_HASH, _PATCH = ProcessLock(), ProcessLock()
_patched: list[Callable] = []
"""``JITFunction.run`` as it was, once for every thread that is within ``compiled_only``."""
_here = threading.local()
_begun: list[threading.Thread] = []
_together: set[tuple] = set()


def hash_triton() -> None:
    """Triton's hash of its own library, a part of every key of its cache, which takes 0.4 s: made once, by whoever asks
    first; others wait in place of making it, too."""
    with _HASH, contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def is_compiling() -> bool:
    """Whether launches of this thread compile and do not run: what they would write is not there."""
    return getattr(_here, "compiling", False)


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Launches of this thread within only compile; those of other threads run, but for threads that are within, too."""
    before = is_compiling()
    with _PATCH:
        run = _patched[0] if _patched else JITFunction.run
        _patched.append(run)
        if len(_patched) == 1:

            def compiled(self, *args, warmup: bool, **kwargs):
                return run(self, *args, warmup=warmup or is_compiling(), **kwargs)

            JITFunction.run = compiled
    try:
        _here.compiling = True
        yield
    finally:
        _here.compiling = before
        with _PATCH:
            if not _patched[1:]:
                JITFunction.run = _patched[0]
            _patched.pop()


def compile_all(launches: Iterable[Callable[[], object]]) -> None:
    """Compiles the kernels of launches that are yet to come; what fails will fail, and be told, when it is launched.

    A launch is called once, on this thread: what it does beside kernels of Triton happens.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    threads = min(THREADS, os.cpu_count() or 1)
    if mode is None or threads < 2 or is_compiling():
        return
    hash_triton()

    def compile_here() -> None:
        with mode(pool, ignore_errors=True):
            for launch in launches:
                with contextlib.suppress(Exception):
                    launch()

    with ThreadPoolExecutor(threads, "joestar-compile") as pool, compiled_only():
        try:
            contextvars.copy_context().run(compile_here)  # an interrupt leaves no mode behind, whenever it comes
        except RuntimeError as error:  # somebody has such a mode already
            if "AsyncCompileMode" not in str(error):
                raise


def together(call: Callable[[], object], *key) -> None:
    """Compiles the kernels of a call side by side, if none with this key came before; launches nothing.

    What ``call`` reads of tensors is not there (``is_compiling``).
    """
    if key in _together or INTERPRETED or is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    _together.add(key)
    compile_all([call])


def begin(calls: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Begins to compile what calls with tensors of the meta device launch, in the background, for a GPU.

    Calls must read no numbers of tensors, and write nothing that lasts.
    """
    if device.type != "cuda" or INTERPRETED:
        return

    def run() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            compile_all(calls)

    thread = threading.Thread(target=run, name="joestar-compile-ahead")
    thread.start()
    _begun.append(thread)


def wait() -> None:
    """Until all is compiled that was begun with."""
    while _begun:
        _begun[-1].join()
        with contextlib.suppress(IndexError):  # another thread waits, too
            _begun.pop()
