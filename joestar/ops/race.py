"""Keys of the exponential race in torch integer arithmetic: see ``joestar.kernels.race`` for what they are.

All values are int64 in fixed point with 24 fractional bits: the same on every device, and in C++ and Triton.
"""

import torch
from torch import Tensor

from joestar.kernels.race import FRACTION, INTERVALS, table

LARGEST = 0x7F7FFFFF
"""Bits of the largest finite float32; infinite weights count as that."""

NEVER = 1 << 62
"""Key of an edge that may not be picked: larger than any other."""


def _interpolate(values: Tensor, index: Tensor, rest: Tensor, bits: int) -> Tensor:
    """Entry ``index`` plus the part ``rest / 2**bits`` of the way to the next, rounded down."""
    start = values[index]
    return start + (((values[index + 1] - start) * rest) >> bits)


def log2_fixed(x: Tensor, logs: Tensor) -> Tensor:
    """``log2`` of integers ``1 <= x < 2**33``; ``logs`` is the first table."""
    exponent = torch.frexp(x.to(torch.float64)).exponent.to(torch.int64) - 1  # exact: x has 33 bits
    leading = x << (33 - exponent)
    return (exponent << FRACTION) + _interpolate(logs, (leading >> 21) & 0xFFF, leading & 0x1FFFFF, 21)


def log2_weight(weight: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """(``log2`` of float32 weights from their bits, which of them are above 0); the log of others means nothing."""
    bits = weight.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
    positive = (bits >= 0x00800000) & (bits <= 0x7F800000)  # neither 0, subnormal, negative nor NaN
    bits = bits.clamp(0x00800000, LARGEST)
    mantissa = bits & 0x7FFFFF
    return (((bits >> 23) - 127) << FRACTION) + _interpolate(logs, mantissa >> 11, mantissa & 0x7FF, 11), positive


def race_key(word: Tensor, weight: Tensor | None) -> Tensor:
    """Key of every contender, int64 ``[n]``: the smallest win; ``NEVER`` where the weight is not above 0.

    Args:
        word: 32-bit random words, int64 ``[n]``; weight: float32 ``[n]``, ``None`` if all are 1.
    """
    values = table().to(word.device)
    logs, rest = values[: INTERVALS + 1], values[INTERVALS + 1 :]
    key = log2_fixed(2 * word + 1, logs) - (33 << FRACTION) + _interpolate(rest, word >> 20, word & 0xFFFFF, 20)
    if weight is None:
        return key
    log, positive = log2_weight(weight, logs)
    return torch.where(positive, key - log, NEVER)
