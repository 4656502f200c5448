"""Keys of the exponential race (``joestar.kernels.race``) as Triton device functions, in integer arithmetic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import race

NEVER = tl.constexpr(2**63 - 1)
"""What an edge that may not be picked contends with: larger than any other."""
_FRACTION = tl.constexpr(race.FRACTION)
_SHIFT = tl.constexpr(33 << race.FRACTION)
_SECOND = tl.constexpr(race.INTERVALS + 1)
_TABLES: dict[torch.device, Tensor] = {}


def race_table(device: torch.device) -> Tensor:
    """Both tables on the device; copied there by the first call, which must not be inside a CUDA graph capture."""
    if device not in _TABLES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "GPU weighted sampling: expected the table of logarithms on the device before a CUDA graph is captured,"
                " and it is not; run the step once without capture first"
            )
        _TABLES[device] = race.table().to(device)
    return _TABLES[device]


@triton.jit
def _interpolate(table, index, rest, BITS: tl.constexpr):
    start = tl.load(table + index)
    return start + (((tl.load(table + index + 1) - start) * rest) >> BITS)


@triton.jit
def race_key(table, word, weight):
    """(fixed-point key with 24 fractional bits, int64; whether the weight is above 0) of uint32 words."""
    word = word.to(tl.int64)
    x = 2 * word + 1
    exponent = (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023  # exact: x has 33 bits
    leading = x << (33 - exponent)
    log = (exponent << _FRACTION) + _interpolate(table, (leading >> 21) & 0xFFF, leading & 0x1FFFFF, 21)
    key = log - _SHIFT + _interpolate(table + _SECOND, word >> 20, word & 0xFFFFF, 20)
    bits = weight.to(tl.int32, bitcast=True).to(tl.int64)
    positive = (bits >= 0x00800000) & (bits <= 0x7F800000)  # neither 0, subnormal, negative nor NaN
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7F7FFFFF)
    mantissa = bits & 0x7FFFFF
    log_weight = (((bits >> 23) - 127) << _FRACTION) + _interpolate(table, mantissa >> 11, mantissa & 0x7FF, 11)
    return key - log_weight, positive
