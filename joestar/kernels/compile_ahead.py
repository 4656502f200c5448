"""Kernels of several launches compiled side by side, before the first of them runs.

Triton compiles a kernel when it is launched first, and the launching thread waits: a third of a second each, half of it
for another process. Launches within ``compiled_only`` only compile, and ``triton.AsyncCompileMode`` has threads do it.
"""

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import triton
from triton.runtime.jit import JITFunction

from joestar.locks import ProcessLock

THREADS = 8
"""That compile at a time, at most: Python's lock is theirs for half of the time."""
_RUN = ProcessLock()
_here = threading.local()


def is_compiling() -> bool:
    """Whether launches of this thread compile and do not run: what they would write is not there."""
    return getattr(_here, "compiling", False)


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Launches of this thread within only compile; those of other threads run."""
    owner = threading.get_ident()
    with _RUN:  # of several threads that take their turns, each puts back what was there before
        run, before = JITFunction.run, is_compiling()

        def compiled(self, *args, warmup: bool, **kwargs):
            return run(self, *args, warmup=warmup or threading.get_ident() == owner, **kwargs)

        JITFunction.run, _here.compiling = compiled, True
        try:
            yield
        finally:
            JITFunction.run, _here.compiling = run, before


def compile_all(launches: Iterable[Callable[[], object]]) -> None:
    """Compiles the kernels of launches that are yet to come; what fails will fail, and be told, when it is launched.

    A launch is called once, on this thread: what it does beside kernels of Triton happens.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    threads = min(THREADS, os.cpu_count() or 1)
    if mode is None or threads < 2 or is_compiling():
        return

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
