"""What ``test_launchers.py`` runs in a process of its own: Triton compiles for a GPU that is not there.

Prints JSON: which threads had the C compiler make launchers, and what was on disk when a kernel had been compiled.
"""

import json
import os
import threading
from pathlib import Path

import compile_only  # noqa: F401  (a driver)
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import build
from triton.runtime.jit import JITFunction

from joestar.kernels import launchers

BUILD = build._build
made, hooked = [], []


def built(name: str, *args) -> str:
    made.append(threading.current_thread().name)
    if os.environ.get("FAILS"):
        raise RuntimeError("no compiler")
    return BUILD(name, *args)


def on_disk() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/__triton_launcher*.so")))


@triton.jit
def _fill(out, value, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), value)


@triton.jit
def _copy(out, source, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(source + i))


@triton.jit
def _wrong(out, source, factor, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE + 1), 1)  # no power of two


def launched() -> dict:
    """Kernels compiled as a process does that finds what is on disk: how often the C compiler ran, what was there."""
    for kernel in (_fill, _copy, _wrong):
        kernel.device_caches.clear()
    launchers._seen.clear()
    made.clear(), hooked.clear()
    found, numbers, words = [], torch.zeros(1024), torch.zeros(1024, dtype=torch.int32)

    def launch(kernel, *args, size: int = 16) -> None:
        try:
            JITFunction.run(kernel, *args, grid=(1,), warmup=True, SIZE=size)
        except triton.CompilationError:
            hooked.append("failed")
        found.append((len(made), on_disk()))

    launch(_fill, numbers, 2.0)
    launch(_fill, numbers, 2.0, size=32)  # of the same signature
    launch(_copy, numbers, words)
    threads, counted = sorted(set(made)), list(found)
    launch(_wrong, numbers, words, 3)
    for thread in launchers._making.values():  # of what was not compiled
        thread.join()
    return {"found": counted, "threads": threads, "hooked": list(hooked)}


def main() -> None:
    build._build = built
    knobs.runtime.jit_cache_hook = lambda **told: hooked.append("before") and None  # somebody's own
    knobs.runtime.jit_post_compile_hook = lambda **told: hooked.append("behind")
    launchers.make_beside()
    launchers.make_beside()
    os.environ["FAILS"] = "1"
    fails = launched()
    del os.environ["FAILS"]
    print(json.dumps({"fails": fails, "first": launched(), "again": launched()}))


main()
