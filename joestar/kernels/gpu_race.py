"""Keys of the exponential race (``joestar.kernels.race``) as Triton device functions, in integer arithmetic.

A key is 33 bits; what it is made of fits into 32, and is computed in them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import race

NEVER = tl.constexpr(2**63 - 1)
"""What an edge that may not be picked contends with: larger than any other."""
_FRACTION = tl.constexpr(race.FRACTION)
_SHIFT = tl.constexpr(33 << race.FRACTION)
_SECOND = tl.constexpr(race.INTERVALS)
_TABLES: dict[torch.device, Tensor] = {}


def race_table(device: torch.device) -> Tensor:
    """Both tables on the device; copied there by the first call, which must not be inside a CUDA graph capture.

    int64 ``[2 * INTERVALS]``: of each interval, the growth in the upper 32 bits, the value at its start in the lower.
    """
    if device not in _TABLES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "GPU weighted sampling: expected the table of logarithms on the device before a CUDA graph is captured,"
                " and it is not; run the step once without capture first"
            )
        both = race.table().view(2, race.INTERVALS + 1)
        _TABLES[device] = ((both.diff(dim=1) << 32) | both[:, :-1]).flatten().to(device)
    return _TABLES[device]


@triton.jit
def _interpolated(table, index, rest, mask):
    """The value at ``rest / 2**32`` of the interval at ``index``."""
    entry = tl.load(table + index, mask, 0)
    return (entry.to(tl.uint32) + tl.umulhi((entry >> 32).to(tl.uint32), rest)).to(tl.int32)


@triton.jit
def race_key(table, word, weight, mask):
    """(fixed-point key with 24 fractional bits, int64; whether the weight is above 0) of uint32 words.

    Where not ``mask``, the key is anything.
    """
    top = (word.to(tl.float64).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023  # of the highest 1; exact
    leading = tl.where(word == 0, 0, (2 * word + 1) << tl.minimum(31 - top, 31).to(tl.uint32))
    exponent = tl.where(word == 0, 0, top + 1)
    log = (exponent << _FRACTION) + _interpolated(table, leading >> 20, leading << 12, mask)
    key = log - _SHIFT + _interpolated(table + _SECOND, word >> 20, word << 12, mask)
    bits = weight.to(tl.int32, bitcast=True)
    positive = (bits >= 0x00800000) & (bits <= 0x7F800000)  # neither 0, subnormal, negative nor NaN
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7F7FFFFF)
    mantissa = bits.to(tl.uint32) << 9
    log_weight = (((bits >> 23) - 127) << _FRACTION) + _interpolated(table, mantissa >> 20, mantissa << 12, mask)
    return key.to(tl.int64) - log_weight, positive & mask
