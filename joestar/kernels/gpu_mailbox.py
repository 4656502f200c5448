"""Messages to the host from the middle of a step: words in pinned memory, each with the number of its message."""

import contextlib
import threading
from collections.abc import Iterator

import triton.language as tl
from torch import Tensor

TAG_BITS = 20
"""Low bits of every word that hold the number of the message: a word tells by itself whether it is new."""
TAG = tl.constexpr((1 << TAG_BITS) - 1)
SHIFT = tl.constexpr(TAG_BITS)

_local = threading.local()


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
    """What is open in this thread."""
    return getattr(_local, "mailbox", None)
