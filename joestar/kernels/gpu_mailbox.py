"""What the host has to know of a step, written to pinned host memory by a kernel in the middle of the step."""

import triton
import triton.language as tl
from torch import Tensor

TAG_BITS = 20
"""Low bits of every word that hold the number of the message: a word tells by itself whether it is new."""
_TAG = tl.constexpr((1 << TAG_BITS) - 1)
_SHIFT = tl.constexpr(TAG_BITS)


@triton.jit
def _post(sequence, ok, counts, words, n, BLOCK: tl.constexpr):
    number = tl.load(sequence) + 1
    tl.store(sequence, number)
    tag = number & _TAG
    at = tl.arange(0, BLOCK)
    value = tl.load(counts + at, at < n, 0)
    tl.store(words + 1 + at, (value << _SHIFT) | tag, at < n)
    tl.store(words, (tl.load(ok).to(tl.int64) << _SHIFT) | tag)


def post(sequence: Tensor, ok: Tensor, counts: Tensor, words: Tensor) -> None:
    """Counts ``sequence`` (0-d int64) up and writes ``(value << TAG_BITS) | tag`` for ``ok`` and every count.

    Args:
        ok: int8, 0-d; counts: int64 ``[n]``; words: int64 ``[n + 1]``, pinned host memory or on the device.
    """
    n = counts.numel()
    _post[(1,)](sequence, ok, counts, words, n, BLOCK=max(16, triton.next_power_of_2(n)), num_warps=1)
