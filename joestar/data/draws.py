"""Random numbers of planted graphs: in order from a generator, or each from its own position.

``Counted`` gives the number at any position without those before it, and the same bits on a CPU and on a GPU: it
hashes integers, and what is not uniform is looked up in tables that NumPy makes. So a graph does not depend on how it
is cut into pieces.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64, as int64."""
STREAMS = ("degree", "near", "far", "inside", "noise", "mixed", "other", "centre", "ids", "splits")
TABLE = 16
"""Bits that choose a quantile."""


class Sequence:
    """Numbers as a ``torch.Generator`` gives them, in the order in which they are asked for."""

    def __init__(self, seed: int, device: str | torch.device):
        self.random = torch.Generator(device).manual_seed(seed)
        self.device = self.random.device

    def uniform(self, stream: str, first: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[count]`` numbers in [0, 1)."""
        return torch.rand(count, generator=self.random, device=self.device, dtype=dtype)

    def normal(self, stream: str, first: int, count: int) -> Tensor:
        """``[count]`` normal numbers, float32."""
        return torch.randn(count, generator=self.random, device=self.device, dtype=torch.float32)

    def degrees(self, first: int, count: int, mean: float, spread: float) -> Tensor:
        """Log-normal whole numbers of at least 1, int64 ``[count]``."""
        noise = self.normal("degree", first, count)
        return (mean * torch.exp(spread * noise - spread**2 / 2) + 0.5).long().clamp(min=1)

    def power(self, values: Tensor, exponent: float) -> Tensor:
        """``values ** exponent``, in place."""
        return values.pow_(exponent)


class Counted:
    """Numbers by position; see the module."""

    def __init__(self, seed: int, device: str | torch.device):
        self.seed, self.device = seed, torch.device(device)
        self._tables: dict[tuple, Tensor] = {}

    def bits(self, stream: str, first: int, count: int) -> Tensor:
        """int64 ``[count]`` of 64 random bits each, of the positions from ``first``."""
        positions = torch.arange(first, first + count, device=self.device, dtype=torch.int64)
        return _finalized(positions.mul_(GOLDEN).add_(self._key(stream)))

    def uniform(self, stream: str, first: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[count]`` numbers in [0, 1), of 24 bits (float32) or 53 (float64)."""
        width = 24 if dtype == torch.float32 else 53
        return _shifted(self.bits(stream, first, count), 64 - width).to(dtype).mul_(2.0**-width)

    def normal(self, stream: str, first: int, count: int) -> Tensor:
        """``[count]`` normal numbers, float32, of 16 bits each; four come of one hash."""
        begin, end = first // 4, -(-(first + count) // 4)
        bits = self.bits(stream, begin, end - begin)
        parts = torch.stack([(bits >> (TABLE * i)) & ((1 << TABLE) - 1) for i in range(4)], dim=1).view(-1)
        offset = first - 4 * begin
        return self._table("normal", lambda z: z, np.float32)[parts[offset : offset + count]]

    def degrees(self, first: int, count: int, mean: float, spread: float) -> Tensor:
        """Log-normal whole numbers of at least 1, int64 ``[count]``."""
        table = self._table(
            ("degree", mean, spread),
            lambda z: np.maximum(np.floor(mean * np.exp(spread * z - spread**2 / 2) + 0.5), 1),
            np.int64,
        )
        return table[_shifted(self.bits("degree", first, count), 64 - TABLE)]

    def power(self, values: Tensor, exponent: float) -> Tensor:
        """``values ** exponent``; of halves by roots and products, which all processors round alike."""
        if exponent * 2 != int(exponent * 2) or not 0 < exponent <= 16:
            return values.pow_(exponent)
        made = values.sqrt() if exponent % 1 else torch.ones_like(values)
        for _ in range(int(exponent)):
            made.mul_(values)
        return made

    def permutation(self, stream: str, size: int) -> "Permutation":
        """A random order of ``size`` ids that needs no table."""
        return Permutation(size, self._key(stream))

    def _key(self, stream: str) -> int:
        key = _mixed(_mixed(self.seed & ((1 << 64) - 1)) + STREAMS.index(stream) + 1)
        return key - (1 << 64) if key >> 63 else key

    def _table(self, name, make: Callable, dtype) -> Tensor:
        if name not in self._tables:
            from scipy.special import ndtri  # slow to import

            quantiles = ndtri((np.arange(1 << TABLE) + 0.5) / (1 << TABLE))
            self._tables[name] = torch.from_numpy(np.asarray(make(quantiles), dtype=dtype)).to(self.device)
        return self._tables[name]


class Permutation:
    """A bijection of ``[0, size)``: products with odd numbers and shifts of the bits, walked until it is inside."""

    ROUNDS = 4

    def __init__(self, size: int, key: int):
        self.size = size
        self.width = max(2, (size - 1).bit_length())
        self.mask, self.shift = (1 << self.width) - 1, (self.width + 1) // 2
        draws = [_mixed((key + i) & ((1 << 64) - 1)) for i in range(2 * self.ROUNDS)]
        self.factors = [(draw & self.mask) | 1 for draw in draws[: self.ROUNDS]]
        self.addends = [draw & self.mask for draw in draws[self.ROUNDS :]]

    def __call__(self, ids: Tensor) -> Tensor:
        """Where ids go, int64 of the same shape."""
        return self._walk(ids, self._forth)

    def inverse(self, ids: Tensor) -> Tensor:
        """Where ids come from."""
        return self._walk(ids, self._back)

    def _walk(self, ids: Tensor, step: Callable) -> Tensor:
        made = step(ids.to(torch.int64))
        while len(outside := torch.nonzero(made >= self.size).view(-1)):
            made[outside] = step(made[outside])
        return made

    def _forth(self, x: Tensor) -> Tensor:
        for factor, addend in zip(self.factors, self.addends, strict=True):
            x = (x * factor).add_(addend).bitwise_and_(self.mask)
            x ^= x >> self.shift
        return x

    def _back(self, x: Tensor) -> Tensor:
        for factor, addend in zip(reversed(self.factors), reversed(self.addends), strict=True):
            x = x ^ (x >> self.shift)
            x = x.sub_(addend).mul_(pow(factor, -1, 1 << self.width)).bitwise_and_(self.mask)
        return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x >> by`` of the bits, without the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _finalized(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place."""
    x ^= _shifted(x, 30)
    x *= FIRST
    x ^= _shifted(x, 27)
    x *= SECOND
    x ^= _shifted(x, 31)
    return x


def _mixed(x: int) -> int:
    """splitmix64 of a whole number, without PyTorch."""
    whole = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & whole
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & whole
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & whole
    return x ^ (x >> 31)
