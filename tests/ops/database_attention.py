"""The op database: attention over in-edges."""

import torch

from joestar.ops import reference

from .samples import EDGES, NUM_DST, NUM_SRC, TINY, WIDE, Op, Sample, every, ints, values

SHAPES = ((1, 3, False), (2, 0, False), (4, 17, False), (2, 5, True), (4, 18, True), (33, 2, True))
"""(heads, features of a head, whether heads share rows)."""
SLOPE, SCALE = 0.2, 1.6


def _bits(edges: int, heads: int):
    words = (edges, -(-heads // 32))
    return torch.randint(-(2**31), 2**31, words, generator=torch.Generator().manual_seed(6), dtype=torch.int32)


def _calls(dtype, ids, largest):
    """(structure, case, the arguments of ``attend``); in the last ones scores are ``largest`` times as large."""
    for s in every(ids):
        for heads, width, shared in SHAPES:
            x = values((s.num_src, 1 if shared else heads, width), dtype, 1)
            scores = values((s.num_src, heads), dtype, 2), values((s.num_dst, heads), dtype, 3, s.rows)
            case = f"{s.name}, x {list(x.shape)}, {heads} heads"
            args = (s.indptr, s.indices, *scores, x, SLOPE)
            yield s, case, (*args, None, 1.0)
            dropped = (*args, _bits(s.indices.numel(), heads), SCALE)
            yield s, f"{case}, dropout", dropped
            of_edges = values((s.indices.numel(), heads), dtype, 5, s.edges)
            yield s, f"{case}, scores of edges, dropout", (*dropped, of_edges)
        large = tuple(score * largest for score in scores)
        yield s, f"{case}, large scores", (s.indptr, s.indices, *large, x, SLOPE, None, 1.0)


def _attend(dtype, ids):
    for _, case, args in _calls(dtype, ids, 200):
        yield Sample(case, args)


def _attend_grad(dtype, ids):
    for s, case, args in _calls(dtype, ids, 20):
        _, *saved = reference.attend(*args)
        grad = values((*args[3].shape, args[4].shape[2]), dtype, 4, s.rows)
        yield Sample(case, (*args[:5], *saved, grad, *args[5:8], True, *args[8:]))
        if "dropout" in case:
            rest = (*args[5:8], False, *args[8:])
            yield Sample(f"{case}, rows without gradients", (*args[:5], *saved, grad, *rest))


def _large(dtype: torch.dtype) -> tuple:
    scores = values((NUM_SRC, 4), dtype, 2), values((NUM_DST, 4), dtype, 3)
    return (*WIDE, *scores, values((NUM_SRC, 4, 8), dtype, 1), SLOPE, _bits(EDGES, 4), SCALE)


def _large_grad(dtype: torch.dtype) -> tuple:
    args = _large(dtype)
    return (*args[:5], *reference.attend(*args)[1:], values((NUM_DST, 4, 8), dtype, 4), *args[5:], True)


_ONE = (torch.ones(1, 2), torch.ones(1, 2))

OPS = {
    "attend": Op(
        _attend, _large, gradients=(2, 3, 4), wide=(1, 2),
        errors=(
            ((*TINY, ints(1, 2), *_ONE, 0.2, None, 1.0), "floating-point dtype"),
            ((*TINY, torch.ones(1, 2).half(), *_ONE, 0.2, None, 1.0), "of the rows.* dtype"),
            ((*TINY, *_ONE, torch.ones(1, 3, 5), 0.2, None, 1.0), r"\[N, 1, F\], got .*\[1, 3, 5\]"),
            ((*TINY, torch.ones(1, 2), torch.ones(2, 2), torch.ones(1, 1, 5), 0.2, None, 1.0), "one row for each of 1"),
            ((*TINY, *_ONE, torch.ones(1, 1, 5), 0.2, ints(1, 1), 1.0), r"bits int32 \[1, 1\]"),
            ((*TINY, *_ONE, torch.ones(1, 1, 5), 0.2, None, 1.0, torch.ones(1, 1)), r"s_edge torch.float32 \[1, 2\]"),
            ((*TINY, *_ONE, torch.ones(1, 1, 5), 0.2, None, 1.0, torch.ones(1, 2).double()), "s_edge torch.float32"),
        ),
    ),
    "attend_grad": Op(_attend_grad, _large_grad),
}  # fmt: skip
