"""The counter-based hash of ``joestar.ops.hashing`` and Floyd's algorithm over it, as Triton device functions.

Words are uint32 and wrap; everything else is integer arithmetic, so picks have the reference's bits.
"""

import triton
import triton.language as tl

UNROLLED = 16
"""Largest fanout whose picks are variables of their own: compilation takes their number squared."""


@triton.jit
def mix32(x):
    """Bijective finaliser on 32-bit words."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def absorb(a, b, word):
    """Mixes one 32-bit word into both lanes of the state."""
    return mix32((a ^ word) + 0x9E3779B9), mix32((b ^ word) + 0x7F4A7C15)


@triton.jit
def key_state(key, site):
    """State of one call site in one step; ``key`` points to int64 (seed, epoch, step)."""
    seed = tl.load(key)
    epoch = tl.load(key + 1)
    step = tl.load(key + 2)
    a = tl.full((), 0x243F6A88, tl.uint32)
    b = tl.full((), 0x85A308D3, tl.uint32)
    a, b = absorb(a, b, seed.to(tl.uint32))
    a, b = absorb(a, b, (seed >> 32).to(tl.uint32))
    a, b = absorb(a, b, epoch.to(tl.uint32))
    a, b = absorb(a, b, step.to(tl.uint32))
    a, b = absorb(a, b, (step >> 32).to(tl.uint32))
    return absorb(a, b, site.to(tl.uint32))


@triton.jit
def hashed(node_ids, node):
    """What nodes hash as, int64: themselves without a table of ids."""
    if node_ids is not None:
        node = tl.load(node_ids + node).to(tl.int64)
    return node


@triton.jit
def row_state(a, b, node):
    """State of every node; ``node`` is int64."""
    a, b = absorb(a, b, node.to(tl.uint32))
    return absorb(a, b, (node >> 32).to(tl.uint32))


@triton.jit
def draw(a, b, j):
    """The ``j``-th 32-bit word of a row; ``j`` is an integer or a block of non-negative integers."""
    return mix32(mix32(a ^ (tl.full((), 0x9E3779B9, tl.uint32) * tl.cast(j, tl.uint32))) + b)


@triton.jit
def picks(a, b, degree, K: tl.constexpr, REPLACE: tl.constexpr):
    """Picks of every row as a tuple of ``K`` blocks of int32 positions, ``K <= UNROLLED``.

    Only the first ``min(K, degree)`` (with replacement: all, if there is an edge) mean anything.
    """
    degree = degree.to(tl.int32)
    out = ()
    for j in tl.static_range(K):
        if REPLACE:
            pick = tl.umulhi(draw(a, b, j), degree.to(tl.uint32)).to(tl.int32)
        else:
            top = degree - K + j
            pick = tl.umulhi(draw(a, b, j), (top + 1).to(tl.uint32)).to(tl.int32)
            repeated = top < 0
            for i in tl.static_range(j):
                repeated = repeated | (out[i] == pick)
            pick = tl.where(degree > K, tl.where(repeated, top, pick), j)
        out = out + (pick,)  # noqa: RUF005 (Triton's tuples have no unpacking)
    return out


@triton.jit
def pick_tile(a, b, degree, K: tl.constexpr, WIDE: tl.constexpr, REPLACE: tl.constexpr):
    """``picks`` for large ``K`` as int32 ``[rows, WIDE]``, ``WIDE >= K`` a power of two; the rest is ``[rows, 1]``."""
    degree = degree.to(tl.int32)
    column = tl.arange(0, WIDE)[None, :]
    if REPLACE:
        return tl.umulhi(draw(a, b, column), degree.to(tl.uint32)).to(tl.int32)
    slots = column + tl.zeros_like(degree)
    for j in range(K):
        top = degree - K + j
        pick = tl.umulhi(draw(a, b, j), (top + 1).to(tl.uint32)).to(tl.int32)
        repeated = tl.max(((slots == pick) & (column < j)).to(tl.int32), 1, keep_dims=True) > 0
        slots = tl.where((column == j) & (degree > K), tl.where(repeated, top, pick), slots)
    return slots
