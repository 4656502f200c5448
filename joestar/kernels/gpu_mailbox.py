"""Messages to the host from the middle of a step: words in pinned memory, each with the number of its message."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import INTERPRETED

TAG_BITS = 20
"""Low bits of every word that hold the number of the message: a word tells by itself whether it is new."""
TAG = tl.constexpr((1 << TAG_BITS) - 1)
SHIFT = tl.constexpr(TAG_BITS)

_COMPILED = tl.constexpr(not INTERPRETED)

_local = threading.local()


@triton.jit
def show_host(value):
    """What this program has stored so far becomes visible to the host now, not at the end of the graph."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [value.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@contextlib.contextmanager
def opened(sequence: Tensor, words: Tensor) -> Iterator[None]:
    """Within, in this thread, ``overflow`` also writes what it finds to ``words``, and counts ``sequence`` up.

    Args:
        sequence: int64, 0-d, on the device; words: int64 ``[n + 1]`` in pinned host memory, for ``ok`` and n counts.
    """
    _local.mailbox = sequence, words
    try:
        yield
    finally:
        _local.mailbox = None


def mailbox() -> tuple[Tensor, Tensor] | None:
    """What is open in this thread; nothing while somebody hears, who posts by himself what he makes of it."""
    return getattr(_local, "mailbox", None) if getattr(_local, "hear", None) is None else None


@contextlib.contextmanager
def heard(hear: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Within, in this thread, ``overflow`` calls ``hear(counts, ok)`` right behind its launch, and posts nothing."""
    _local.hear = hear
    try:
        yield
    finally:
        _local.hear = None


def tell(counts: Tensor, ok: Tensor) -> None:
    """Calls who hears in this thread, if somebody does; what is launched from there is not heard."""
    hear = getattr(_local, "hear", None)
    if hear is not None:
        _local.hear = None
        try:
            hear(counts, ok)
        finally:
            _local.hear = hear
