"""The random choices in plain Python integers, written from their definition and not from the package's code."""

import struct

MASK = 0xFFFFFFFF
DROPOUT_SITE = 1 << 20


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= x >> 15
    x = x * 0x735A2D97 & MASK
    return x ^ x >> 15


def absorb(state: tuple, word: int) -> tuple:
    return mix32((state[0] ^ word) + 0x9E3779B9 & MASK), mix32((state[1] ^ word) + 0x7F4A7C15 & MASK)


def key_state(seed: int, epoch: int, step: int, site: int) -> tuple:
    state = (0x243F6A88, 0x85A308D3)
    for word in (seed, seed >> 32, epoch, step, step >> 32, site):
        state = absorb(state, word & MASK)
    return state


def row_state(key: tuple, node: int) -> tuple:
    return absorb(absorb(key, node & MASK), node >> 32 & MASK)


def draw(state: tuple, j: int) -> int:
    return mix32(mix32(state[0] ^ j * 0x9E3779B9 & MASK) + state[1] & MASK)


def picks(degree: int, k: int, replace: bool, state: tuple) -> list:
    """Positions within a row, in slot order: Floyd's algorithm without replacement."""
    if k < 0 or (not replace and degree <= k):
        return list(range(degree))
    if replace:
        return [draw(state, j) * degree >> 32 for j in range(k)] if degree else []
    chosen = []
    for j in range(k):
        top = degree - k + j
        pick = draw(state, j) * (top + 1) >> 32
        chosen.append(top if pick in chosen else pick)
    return chosen


def sampled_positions(indptr: list, nodes: list, k: int, replace: bool, key: tuple, site: int) -> list:
    """CSC positions of the picks of every node, a list per node."""
    state = key_state(*key, site)
    rows = [(indptr[node], indptr[node + 1] - indptr[node], node) for node in nodes]
    return [
        [start + pick for pick in picks(degree, k, replace, row_state(state, node))] for start, degree, node in rows
    ]


def keeps(state: tuple, column: int, columns: int, p: float) -> bool:
    """Whether dropout keeps a column of a row of so many: one bit of a 24-digit coin of probability 1 - p."""
    words = -(-columns // 32)
    probability, mask = min(max(round((1 - p) * 2**24), 1), 2**24 - 1), 0
    first = next(i for i in range(24) if probability >> i & 1)
    for digit in range(first, 24):
        word = draw(state, column % words * 32 + digit)
        mask = word | mask if probability >> digit & 1 else word & mask
    return bool(mask >> column // words & 1)


def between(table: list, index: int, rest: int, bits: int) -> int:
    """Linear interpolation, rounded down."""
    return table[index] + ((table[index + 1] - table[index]) * rest >> bits)


def race_key(word: int, weight: float, logs: list, rest: list) -> int | None:
    """Key of the exponential race in 24 fractional bits; ``None`` for a weight that never wins."""
    (bits,) = struct.unpack("<I", struct.pack("<f", weight))
    if not 0x00800000 <= bits <= 0x7F800000:  # zero, subnormal, NaN, negative
        return None
    bits = min(bits, 0x7F7FFFFF)
    x = 2 * word + 1
    exponent = x.bit_length() - 1
    fraction = (x << (33 - exponent)) - (1 << 33)
    log_v = (exponent - 33 << 24) + between(logs, fraction >> 21, fraction & 0x1FFFFF, 21)
    log_weight = ((bits >> 23) - 127 << 24) + between(logs, (bits & 0x7FFFFF) >> 11, bits & 0x7FF, 11)
    return log_v + between(rest, word >> 20, word & 0xFFFFF, 20) - log_weight


def weighted_picks(weights: list, k: int, replace: bool, state: tuple, tables: tuple) -> list:
    """Positions within a row of weights: the smallest keys, ties by position."""

    def order(state):
        keys = [(race_key(draw(state, p), weight, *tables), p) for p, weight in enumerate(weights)]
        return [p for key, p in sorted(pair for pair in keys if pair[0] is not None)]

    if k < 0 or not replace:
        return sorted(order(state)[: len(weights) if k < 0 else k])
    return [first for j in range(k) for first in order(absorb(state, j))[:1]]
