"""The counter-based hash behind every random choice, as torch integer arithmetic.

All words are unsigned 32-bit values held in int64, so that products stay below 2**63: nothing wraps, and the result is
the same in eager torch, under Inductor, in C++ (``csrc/include/joestar/hash.hpp``) and on a GPU.

A pick is a pure function of (seed, epoch, step, call site, node, draw): it does not depend on the order of rows, the
number of threads or the device.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
SECOND = 0x7F4A7C15
INITIAL = (0x243F6A88, 0x85A308D3)


def mix32(x: Tensor) -> Tensor:
    """Bijective finaliser on 32-bit words (two rounds of xor-shift and odd multiplication)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def absorb(a: Tensor, b: Tensor, word: Tensor | int) -> tuple[Tensor, Tensor]:
    """Mixes one 32-bit word into both lanes of the state."""
    return mix32(((a ^ word) + GOLDEN) & MASK), mix32(((b ^ word) + SECOND) & MASK)


def key_state(key: Tensor, site: int) -> tuple[Tensor, Tensor]:
    """State of one call site in one step. ``key`` is int64 ``[3]`` = (seed, epoch, step); returns two 0-d words."""
    seed, epoch, step = key[0], key[1], key[2]
    a = torch.zeros_like(seed) + INITIAL[0]
    b = torch.zeros_like(seed) + INITIAL[1]
    for word in (seed & MASK, (seed >> 32) & MASK, epoch & MASK, step & MASK, (step >> 32) & MASK, site & MASK):
        a, b = absorb(a, b, word)
    return a, b


def host_key_state(seed: int, epoch: int, step: int, site: int) -> tuple[int, int]:
    """``key_state`` of numbers on the host."""
    a, b = INITIAL
    for word in (seed, seed >> 32, epoch, step, step >> 32, site):
        a, b = _mix((a ^ word & MASK) + GOLDEN), _mix((b ^ word & MASK) + SECOND)
    return a, b


def _mix(x: int) -> int:
    """``mix32`` of a number, of which the low 32 bits count."""
    x &= MASK
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & MASK
    x ^= x >> 15
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def row_state(state: tuple[Tensor, Tensor], nodes: Tensor) -> tuple[Tensor, Tensor]:
    """State of every node: ``nodes`` is any integer tensor ``[n]``; returns two int64 tensors ``[n]`` of words."""
    nodes = nodes.to(torch.int64)
    a, b = absorb(state[0], state[1], nodes & MASK)
    return absorb(a, b, (nodes >> 32) & MASK)


def draw(a: Tensor, b: Tensor, j: Tensor | int) -> Tensor:
    """The ``j``-th 32-bit random word of a row."""
    return mix32((mix32(a ^ ((j * GOLDEN) & MASK)) + b) & MASK)


def bounded(word: Tensor, n: Tensor | int) -> Tensor:
    """Maps a 32-bit word to ``[0, n)``, ``n < 2**31``."""
    return (word * n) >> 32
