"""The exponential race behind weighted sampling: fixed-point tables of two logarithms (ARCHITECTURE decision 3).

Edge ``e`` finishes at the time ``Exponential(1) / weight[e]``; the k first are a weighted sample without replacement
(Efraimidis and Spirakis 2006). What is compared is the base-2 logarithm of that time as an integer with ``FRACTION``
fractional bits, so that every machine picks the same edges: floating-point logarithms differ between machines.

With a random 32-bit word, ``v = (2 word + 1) / 2**33`` is uniform in (0, 1), ``-log2(1 - v)`` is exponential, and

    key = log2(v) + g(v) - log2(weight),    g(v) = log2(-log2(1 - v) / v)

Split like this, ``g`` is smooth at v = 0, where an exponential variable needs its precision most.
"""

from decimal import Decimal, localcontext
from functools import cache

import torch
from torch import Tensor

FRACTION = 24
"""Fractional bits of a key."""

INTERVALS = 4096
"""Intervals of each table; between entries, values are interpolated linearly."""


@cache
def table() -> Tensor:
    """Both tables in one int64 tensor ``[2 * (INTERVALS + 1)]`` on the CPU, made once; do not write to it.

    Entries ``i = 0..INTERVALS``: ``log2(1 + i / INTERVALS)``, then ``g(i / INTERVALS)``, rounded to ``FRACTION`` bits.
    ``g(0)`` is its limit ``log2(1 / ln 2)``; the last entry is ``g(1 - 2**-33)``, the largest v. Made with decimal
    arithmetic of 40 digits: no rounding of a maths library takes part.
    """
    with localcontext() as context:
        context.prec = 40
        one, ln2 = Decimal(1), Decimal(2).ln()
        logs = [(one + Decimal(i) / INTERVALS).ln() / ln2 for i in range(INTERVALS + 1)]
        values = [-ln2.ln() / ln2]
        values += [_log2(-_log2_ratio(INTERVALS - i, logs) * INTERVALS / i, ln2) for i in range(1, INTERVALS)]
        values.append(_log2(33 / (one - Decimal(2) ** -33), ln2))
        fixed = [int((value * 2**FRACTION).to_integral_value()) for value in logs + values]
    return torch.tensor(fixed, dtype=torch.int64, device="cpu")


def _log2(x: Decimal, ln2: Decimal) -> Decimal:
    return x.ln() / ln2


def _log2_ratio(count: int, logs: list[Decimal]) -> Decimal:
    """``log2(count / INTERVALS)`` for a count of at least 1, from the table of logarithms of [1, 2]."""
    doublings = 0
    while count < INTERVALS:
        count, doublings = 2 * count, doublings + 1
    return logs[count - INTERVALS] - doublings


def __getattr__(name: str) -> Tensor:
    """``TABLE`` is ``table()``, made when it is first asked for."""
    if name == "TABLE":
        return table()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
