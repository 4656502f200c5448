"""The random choices in plain Python integers, written from their definition and not from the package's code."""

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


def keeps(state: tuple, column: int, p: float) -> bool:
    """Whether dropout keeps a column of the row: one bit of a 24-digit coin of probability 1 - p."""
    probability, mask = min(max(round((1 - p) * 2**24), 1), 2**24 - 1), 0
    first = next(i for i in range(24) if probability >> i & 1)
    for digit in range(first, 24):
        word = draw(state, column // 32 * 32 + digit)
        mask = word | mask if probability >> digit & 1 else word & mask
    return bool(mask >> column % 32 & 1)
