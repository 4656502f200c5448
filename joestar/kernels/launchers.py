"""Launchers of Triton's kernels: made by the C compiler while the kernels themselves are being compiled.

Triton (3.6) writes a C function that launches for every signature of a kernel, and has the system's compiler make it
behind the kernel: a third of a second each, twenty times in the first step of a three-layer SAGE with empty caches. The
signature is known before the kernel is compiled, and the compiler is a process of its own: both take place at once.
"""

import contextlib
import functools
import hashlib
import sysconfig
import threading
from collections.abc import Callable

import triton

_NAME = "__triton_launcher"
_making: dict[tuple, threading.Thread] = {}
_seen: set[str] = set()


@functools.cache
def make_beside() -> None:
    """From now on, in this process; nothing where this Triton makes launchers in another way.

    Goes by Triton's hooks around a compilation, in front of hooks that are there.
    """
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    with contextlib.suppress(ImportError):
        from triton.backends.nvidia import driver
        from triton.runtime import build

        if not hasattr(driver, "make_launcher") or not hasattr(build, "compile_module_from_src"):
            return
        if hasattr(runtime, "jit_cache_hook") and hasattr(runtime, "jit_post_compile_hook"):
            runtime.jit_cache_hook = _in_front(_begin, runtime.jit_cache_hook)
            runtime.jit_post_compile_hook = _in_front(_end, runtime.jit_post_compile_hook)


def _in_front(own: Callable[..., None], before: Callable | None) -> Callable:
    """A hook: ``own``, whose failures are nobody's business, then the one that was there."""

    def hook(*args, **kwargs):
        with contextlib.suppress(Exception):
            own(*args, **kwargs)
        return None if before is None else before(*args, **kwargs)

    return hook


def _begin(*, key: str, fn, compile: dict, **others) -> None:
    source = _source(compile["signature"])
    if source in _seen:
        return
    _seen.add(source)
    if _is_cached(source):
        return
    thread = threading.Thread(target=_make, args=(source,), name="joestar-launcher", daemon=True)
    _making[fn.module, fn.name, key] = thread
    thread.start()


def _end(*, key: str, fn, **others) -> None:
    """The kernel is there: it will look for its launcher now."""
    thread = _making.pop((fn.module, fn.name, key), None)
    if thread is not None:
        thread.join()


def _source(signature: dict) -> str:
    from triton.backends.nvidia.driver import make_launcher

    return make_launcher({}, signature, None)


def _is_cached(source: str) -> bool:
    """Whether it is on disk: the files of Triton's ``compile_module_from_src``."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    held = get_cache_manager(hashlib.sha256((source + platform_key()).encode()).hexdigest())
    return held.get_file(_NAME + sysconfig.get_config_var("EXT_SUFFIX")) is not None


def _make(source: str) -> None:
    """Leaves it where Triton will look. What fails here fails there again, and is told."""
    from triton.backends.nvidia import driver

    with contextlib.suppress(Exception):
        driver.compile_module_from_src(
            src=source, name=_NAME, library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )  # fmt: skip
