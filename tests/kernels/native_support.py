"""Random structures and naive Python implementations that the native kernels are compared with."""

import numpy as np
import torch

MASK = 0xFFFFFFFF
KEY = torch.tensor([-5, 3, 2**35 + 17])
VALUES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IDS = [torch.int32, torch.int64]


def random_csc(rows, num_src, mean=6, dtype=torch.int32, seed=0, tail=0, hub=True):
    """(indptr, indices): every fifth row empty, row 1 a hub, duplicate edges and self-loops; ``tail`` padded edges."""
    random = np.random.default_rng(seed)
    degrees = random.integers(0, 2 * mean + 1, rows)
    degrees[4::5] = 0
    if hub and rows > 1:
        degrees[1] = 40 * mean
    indptr = np.zeros(rows + 1, np.int64)
    np.cumsum(degrees, out=indptr[1:])
    indices = random.integers(0, max(num_src, 1), int(indptr[-1]))
    indices = np.concatenate([indices, np.zeros(tail, np.int64)])
    return torch.from_numpy(indptr), torch.from_numpy(indices).to(dtype)


def edges(indptr, indices):
    """(source, row, edge) of every valid edge, in edge order."""
    for row in range(indptr.numel() - 1):
        for edge in range(int(indptr[row]), int(indptr[row + 1])):
            yield int(indices[edge]), row, edge


def mix32(x):
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & MASK
    x ^= x >> 15
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def absorb(state, words):
    a, b = state
    for word in words:
        a = mix32(((a ^ (word & MASK)) + 0x9E3779B9) & MASK)
        b = mix32(((b ^ (word & MASK)) + 0x7F4A7C15) & MASK)
    return a, b


def picks_of(degree, k, replace, key, site, node):
    """Positions picked in a row of ``degree`` neighbours, from the definition."""
    if k < 0 or (not replace and degree <= k):
        return list(range(degree))
    seed, epoch, step = (int(word) for word in key)
    state = absorb((0x243F6A88, 0x85A308D3), [seed, seed >> 32, epoch, step, step >> 32, site])
    a, b = absorb(state, [node, node >> 32])
    picks = []
    for j in range(k if degree else 0):
        word = mix32((mix32(a ^ ((j * 0x9E3779B9) & MASK)) + b) & MASK)
        if replace:
            picks.append((word * degree) >> 32)
        else:
            top = degree - k + j
            pick = (word * (top + 1)) >> 32
            picks.append(top if pick in picks else pick)
    return picks


def sampled_positions(indptr, nodes, count, k, replace, key, site):
    """CSC positions of the picks of every row."""
    rows = []
    for i, node in enumerate(nodes.tolist()):
        start = int(indptr[node])
        degree = int(indptr[node + 1]) - start if i < count else 0
        rows.append([start + pick for pick in picks_of(degree, k, replace, key, site, node)])
    return rows


def same(got, expected):
    """Equal dtypes, shapes and bits, in every tensor of a result."""
    if isinstance(got, tuple):
        return len(got) == len(expected) and all(same(a, b) for a, b in zip(got, expected, strict=True))
    if got is None or expected is None:
        return got is expected
    return got.dtype == expected.dtype and torch.equal(got, expected)


def close(got, expected, scale=4):
    """Within a few units of the dtype of ``got`` from a float64 result."""
    bound = scale * torch.finfo(got.dtype).eps
    return torch.allclose(got.double(), expected.double(), rtol=bound, atol=bound)
