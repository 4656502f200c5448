"""The op database: weighted and collective sampling, rows of a slice."""

from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.ops import reference

from .samples import BIG_KEY, EDGES, KEY, NUM_DST, NUM_SRC, ONE, TINY, WIDE, Op, Sample, W, large_columns, other_ids
from .structures import Query, queries

PICKS = ((1, False), (2, True), (5, False), (64, False), (65, True), (-1, False), (-1, True))
BAD = (0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-40, 1e-38, 3e38)
"""Weights that are never picked, or at the end of their range."""


def some_weights(number: int, seed: int = 0) -> Tensor:
    """float32 ``[number]`` over many magnitudes, with ties, zeros and every oddity."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.exp(torch.randn(number, generator=generator) * 3)
    kind = torch.randint(0, 4 * len(BAD), (number,), generator=generator)
    for position, value in enumerate(BAD):
        weight[kind == position] = value
    weight[kind == len(BAD)] = 1.0
    return weight


def _cases(ids: torch.dtype) -> Iterator[tuple[str, Query, tuple]]:
    """(name, query, (indptr, indices) of its slice)."""
    for q in (q.to(ids) for q in queries()):
        yield q.name, q, reference.slice_cols(q.graph.indptr, q.graph.indices, q.dsts, q.count, -1)[:2]


def _bounds(demand: int) -> tuple[int, ...]:
    return (-1, demand + 7, demand // 2)


def _weighted_sample(_, ids):
    for name, q, (sub, _) in _cases(ids):
        for position, (k, replace) in enumerate(PICKS):
            for sliced, indptr in ((False, q.graph.indptr), (True, sub)):
                weight = some_weights(int(indptr[-1]), position)
                draws = (k, replace, BIG_KEY if position % 2 else KEY, position)
                args = (indptr, weight, q.dsts, q.count, sliced, *draws)
                demand = int(reference.weighted_sample(*args, -1)[2])
                for bound in _bounds(demand):
                    yield Sample(f"{name}, sliced={sliced} k={k} replace={replace} bound={bound}", (*args, bound), True)
                named = (*args, demand + 1, other_ids(q.graph.num_dst, ids))
                yield Sample(f"{name}, sliced={sliced} k={k} replace={replace}, other ids", named, True)
                ranks = torch.arange(weight.numel(), dtype=torch.int32).flip(0) * 3
                ranked = (*args, demand + 1, None if k % 2 else named[-1], ranks)
                yield Sample(f"{name}, sliced={sliced} k={k} replace={replace}, ranks", ranked, True)


def _collective_sample(_, ids):
    for name, q, (sub, indices) in _cases(ids):
        nodes = q.graph.num_dst
        for position, weight in enumerate((None, some_weights(nodes), torch.zeros(nodes))):
            for k in (1, 3, 12, 100):
                args = (sub, indices, weight, nodes, k, BIG_KEY if k == 3 else KEY, k)
                yield Sample(f"{name}, weight {position}, k={k}", args, True)
                yield Sample(f"{name}, weight {position}, k={k}, other ids", (*args, other_ids(nodes, ids)), True)
        padded = torch.cat([indices, indices.new_zeros(5)])
        yield Sample(f"{name}, padded edges", (sub, padded, None, nodes, 4, KEY, 0), True)


def _slice_rows(_, ids):
    for name, q, (sub, indices) in _cases(ids):
        everyone = torch.arange(q.graph.num_dst, dtype=ids)
        for which, srcs in (("none", everyone[:0]), ("one", everyone[2:3]), ("some", everyone.flip(0)[::3])):
            for count in {srcs.numel(), srcs.numel() // 2, srcs.numel() + 3}:
                args = (sub, indices, q.dsts, srcs, torch.tensor(count))
                for bound in _bounds(int(reference.slice_rows(*args, -1)[2])):
                    yield Sample(f"{name}, {which}, count {count}, bound={bound}", (*args, bound), True)


def _large_slice() -> tuple:
    indptr, indices, dsts, count = large_columns()
    return (*reference.slice_cols(indptr, indices, dsts, count, -1)[:2], dsts)


_ONES = torch.ones(1)
_DRAWS = (False, 2, False, KEY, 0, -1)
_HALF = torch.arange(0, NUM_SRC, 2).flip(0)

OPS = {
    "weighted_sample": Op(
        _weighted_sample,
        lambda _: (W.indptr, some_weights(EDGES), torch.arange(NUM_DST), torch.tensor(NUM_DST - 3), *_DRAWS),
        floats=False,
        errors=(
            ((TINY[0].int(), _ONES, *ONE, *_DRAWS), "indptr int64"),
            ((TINY[0], _ONES.double(), *ONE, *_DRAWS), r"weights float32 \[n\], got torch.float64"),
            ((TINY[0], _ONES[:, None], *ONE, *_DRAWS), r"weights float32 \[n\], got torch.float32 \[1, 1\]"),
            ((TINY[0], _ONES, torch.tensor([0, 0]), ONE[1], True, *_DRAWS[1:]), "one row id per row"),
            ((TINY[0], _ONES, *ONE, *_DRAWS[:3], torch.tensor([1]), 0, -1), "key: expected an int64 tensor of 3"),
            ((TINY[0], _ONES, *ONE, *_DRAWS, None, torch.tensor([0])), r"ranks int32 \[1\], got torch.int64"),
        ),
    ),
    "collective_sample": Op(
        _collective_sample,
        lambda _: (*_large_slice()[:2], some_weights(NUM_SRC), NUM_SRC, 700, KEY, 1),
        floats=False,
        errors=(
            ((*TINY, torch.ones(2), 1, 3, KEY, 0), "one weight per node, 1, got 2"),
            ((*TINY, _ONES.half(), 1, 3, KEY, 0), "weights float32"),
            ((TINY[0], _ONES, None, 1, 3, KEY, 0), "int32 or int64"),
            ((*TINY, None, 1, 3, KEY, 0, torch.tensor([1, 2])), "node_ids for each of 1 nodes, got 2"),
        ),
    ),
    "slice_rows": Op(
        _slice_rows,
        lambda _: (*WIDE, torch.arange(NUM_DST), _HALF, torch.tensor(_HALF.numel() - 5), -1),
        floats=False,
        errors=(((*TINY, ONE[0], torch.tensor([0], dtype=torch.int32), ONE[1], -1), "node ids of one dtype"),),
    ),
}
