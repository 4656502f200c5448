"""Inductor's start: what it needs before it can look into its caches, found while a program is still being traced.

Some things take long and need little of Python: hashes of Triton's library, of PyTorch's sources and of ours, parts of
every key, and the process that tries which vector instructions the C++ compiler can use. And two dozen templates of
Triton kernels are compiled when Inductor is imported, of which graphs like ours seldom use one: they are compiled when
they are used.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import torch

from joestar.ops.ahead import hash_triton
from joestar.ops.digest import source_digest


@functools.cache
def begin(device: str) -> "list[Future]":
    """Begins with what graphs on a type of device will need, once a process."""
    from joestar.torch_private import codecache, cpu_vec_isa

    needed = [cpu_vec_isa.valid_vec_isa_list] if device == "cpu" else []
    prefetch = getattr(getattr(codecache, "triton_key", None), "prefetch", None)
    if device == "cuda":  # kernels that sample need it first
        needed.append(hash_triton)
    elif prefetch is not None:  # PyTorch waits for it by itself
        prefetch()
    needed += [source_digest, *filter(None, [getattr(codecache, "torch_key", None)])]  # all remember what they found
    executor = ThreadPoolExecutor(len(needed), "joestar-beforehand")
    begun = [executor.submit(function) for function in needed]
    executor.shutdown(wait=False)
    return begun


if hasattr(os, "register_at_fork"):  # the threads do not exist in a child
    os.register_at_fork(after_in_child=begin.cache_clear)


def finish(device: torch.device) -> None:
    """Waits for it; what failed there is tried again, and reported, by Inductor."""
    for each in begin(device.type):
        each.exception()


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
