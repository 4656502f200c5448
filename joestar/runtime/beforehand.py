"""Inductor's start: what it needs before it can look into its caches, found while a program is still being traced.

Two things take long and need no Python: the hash of Triton's library, a part of every key, and the process that tries
which vector instructions the C++ compiler can use. And two dozen templates of Triton kernels are compiled when Inductor
is imported, of which graphs like ours seldom use one: they are compiled when they are used.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import torch


@functools.cache
def begin(device: str) -> "Future | None":
    """Begins with what graphs on a type of device will need, once a process."""
    from joestar.torch_private import codecache, cpu_vec_isa

    prefetch = getattr(getattr(codecache, "triton_key", None), "prefetch", None)
    if prefetch is not None:  # PyTorch waits for it by itself
        prefetch()
    if device != "cpu":
        return None
    executor = ThreadPoolExecutor(1, "joestar-vector-instructions")
    found = executor.submit(cpu_vec_isa.valid_vec_isa_list)  # remembered there
    executor.shutdown(wait=False)
    return found


def finish(device: torch.device) -> None:
    """Waits for it; what failed there is tried again, and reported, by Inductor."""
    found = begin(device.type)
    if found is not None:
        found.exception()


class Later:
    """Something that is made at its first use."""

    def __init__(self, make: Callable[[], object]):
        self._make = functools.cache(make)

    def __getattr__(self, name: str):
        return getattr(self._make(), name)


@contextlib.contextmanager
def templates_later() -> Iterator[None]:
    """Modules that are imported within get templates that are compiled when they are used."""
    from joestar.torch_private import KernelTemplate

    compiled = getattr(KernelTemplate, "_template_from_string", None)
    if compiled is None or importlib.util.find_spec("jinja2") is None:  # without it, templates are None
        yield
        return
    later = staticmethod(lambda source: Later(lambda: compiled(source)))
    with mock.patch.object(KernelTemplate, "_template_from_string", later):
        yield


def import_inductor() -> None:
    """Imports all of Inductor, if that has not happened."""
    if "torch._inductor.compile_fx" not in sys.modules:
        with templates_later():
            from joestar.torch_private import compile_fx  # noqa: F401
