"""Process-wide settings of allocators: glibc's, for training on a CPU, and Python's, for tracing."""

import os

OPT_OUT = "JOESTAR_KEEP_MEMORY"


def keep_freed_memory() -> bool:
    """Lets glibc keep the memory of freed tensors for the next ones, instead of returning it to the system; idempotent.

    By default every large tensor is mapped anew, and the system zeroes its pages at the first touch: a third of a
    training step on a CPU. The price is that the process does not shrink between steps. ``JOESTAR_KEEP_MEMORY=0`` in
    the environment leaves the allocator alone, as do systems without glibc.

    Returns:
        Whether the setting is on.
    """
    return _asked("keep_freed_memory")


def keep_stack_chunks() -> bool:
    """Lets Python keep up to 256 KiB for the frames of functions that come and go; idempotent.

    By default it maps 16 KiB whenever calls reach the end of a chunk, and unmaps them when they return, over and over
    where a loop runs at such a depth of the stack. What a trace loses by that depends on how deep it was called from:
    on Python 3.11 a twentieth of a cold first step in a script, a seventh of the tests of passes.
    ``JOESTAR_KEEP_MEMORY=0`` leaves that allocator alone, too; Python without a global lock has another one.

    Returns:
        Whether the setting is on.
    """
    return _asked("keep_stack_chunks")


def _asked(setting: str) -> bool:
    if os.environ.get(OPT_OUT, "1") == "0":
        return False
    try:
        from joestar import _native
    except ImportError:
        return False
    return bool(getattr(_native, setting)())
