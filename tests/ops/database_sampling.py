"""The op database: structure, sampling and relabelling."""

from collections.abc import Iterator

import torch

from joestar.ops import reference

from .samples import (
    BIG_KEY,
    DRAWS,
    EDGES,
    INT_OFFSETS,
    KEY,
    NOT_FLOAT,
    NUM_DST,
    NUM_SRC,
    ONE,
    TINY,
    WIDE,
    Op,
    Sample,
    W,
    every,
    ints,
    large_columns,
    large_x,
    other_ids,
    values,
)
from .structures import queries

# --- structure ------------------------------------------------------------------------------------------------------


def _edge_dst(_, ids):
    for s in every(ids):
        yield Sample(s.name, (s.indptr, s.indices.numel(), s.indices), True)


def _add_self_loops(_, ids):
    for s in every(ids):
        if s.num_dst <= s.num_src:
            yield Sample(s.name, (s.indptr, s.indices, torch.tensor(s.rows)), True)


def _block_self_loops(_, ids):
    """Local ids are positions in a list of global ids in which nodes may stand twice."""
    for s in every(ids):
        if s.num_dst <= s.num_src:
            names = (torch.arange(max(s.num_src, 1)) * 7919 % 11).to(ids)
            sources = torch.index_select(names, 0, s.indices.long().clamp(0, names.numel() - 1)).to(ids)
            for num_src in (s.num_src, 0):
                case = f"{s.name}, {'with' if num_src else 'without'} degrees"
                args = (s.indptr, s.indices, sources, names[: s.num_dst], torch.tensor(s.rows), num_src)
                yield Sample(case, args, True)


def _sampled_self_loops(_, ids):
    """Destinations and sources are global ids, in which nodes may stand twice."""
    for s in every(ids):
        if s.num_dst <= s.num_src:
            names = (torch.arange(max(s.num_src, 1)) * 7919 % 11).to(ids)
            sources = torch.index_select(names, 0, s.indices.long().clamp(0, names.numel() - 1)).to(ids)
            yield Sample(s.name, (s.indptr, sources, names[: s.num_dst], torch.tensor(s.rows)), True)


def _out_degrees(_, ids):
    for s in every(ids):
        yield Sample(s.name, (s.indptr, s.indices, s.num_src), True)
        yield Sample(f"{s.name}, padded sources", (s.indptr, s.indices, s.num_src + 4), True)


# --- sampling -------------------------------------------------------------------------------------------------------

FANOUTS = (1, 2, 5, 64, 65, -1)


def _bounds(demand: int) -> list[int]:
    return [-1, demand, demand + 7, demand // 2, 0]


def _draws() -> Iterator[tuple]:
    """(k, replace, key, site) of sampling ops."""
    for position, k in enumerate(FANOUTS):
        for replace in (False, True):
            yield k, replace, BIG_KEY if position % 2 else KEY, position


def _sample_cols(_, ids):
    for q in (q.to(ids) for q in queries()):
        for draws in _draws():
            args = (q.graph.indptr, q.graph.indices, q.dsts, q.count, *draws)
            demand = int(reference.sample_cols(*args, -1)[2])
            for bound in _bounds(demand):
                yield Sample(f"{q.name}, k={draws[0]} replace={draws[1]} bound={bound}", (*args, bound), True)
            named = (*args, demand + 1, other_ids(q.graph.num_dst, ids))
            yield Sample(f"{q.name}, k={draws[0]} replace={draws[1]}, other ids", named, True)


def _sample_eids(_, ids):
    for sample in _sample_cols(None, ids):
        yield Sample(sample.case, (sample.args[0], *sample.args[2:]), True)


def _slice_cols(_, ids):
    for q in (q.to(ids) for q in queries()):
        args = (q.graph.indptr, q.graph.indices, q.dsts, q.count)
        for bound in _bounds(int(reference.slice_cols(*args, -1)[2])):
            yield Sample(f"{q.name}, bound={bound}", (*args, bound), True)


def _rowwise_sample(_, ids):
    for q in (q.to(ids) for q in queries()):
        indptr, indices, _ = reference.slice_cols(q.graph.indptr, q.graph.indices, q.dsts, q.count, -1)
        for draws in _draws():
            args = (indptr, indices, q.dsts, *draws)
            demand = int(reference.rowwise_sample(*args, -1)[2])
            for bound in _bounds(demand):
                yield Sample(f"{q.name}, k={draws[0]} replace={draws[1]} bound={bound}", (*args, bound), True)
            named = (*args, demand + 1, other_ids(q.graph.num_dst, ids))
            yield Sample(f"{q.name}, k={draws[0]} replace={draws[1]}, other ids", named, True)


def _compact(_, ids):
    for q in (q.to(ids) for q in queries()):
        for k, edges in ((3, -1), (3, 90), (-1, -1), (1, 4)):
            graph = q.graph
            sub, picked, _ = reference.sample_cols(
                graph.indptr, graph.indices, q.dsts, q.count, k, False, KEY, 0, edges
            )
            args = (q.dsts, q.count, sub, picked, graph.num_dst)
            for bound in _bounds(int(reference.compact(*args, -1)[2])):
                yield Sample(f"{q.name}, k={k} edges={edges} bound={bound}", (*args, bound), True)


def _sample_aggregate(dtype, ids):
    for q in (q.to(ids) for q in queries()):
        for shape, position in (((1,), 0), ((17,), 1), ((5,), 2)):
            x = values((q.graph.num_dst, *shape), dtype, 1)
            for draws in list(_draws())[position::3]:
                for reduce in ("sum", "mean", "max"):
                    args = (q.graph.indptr, q.graph.indices, q.dsts, q.count, *draws, x, reduce)
                    case = f"{q.name}, {list(shape)} k={draws[0]} replace={draws[1]} {reduce}"
                    yield Sample(case, args, reduce in ("max", "min"))
                    named = (*args, other_ids(q.graph.num_dst, ids))
                    yield Sample(f"{case}, other ids", named, reduce in ("max", "min"))


# --- the table ------------------------------------------------------------------------------------------------------


def _large_compact(dtype=None) -> tuple:
    indptr, indices, dsts, count = large_columns()
    sub, picked, _ = reference.slice_cols(indptr, indices, dsts, count, -1)
    return dsts, count, sub, picked, NUM_SRC, -1


OPS = {
    "edge_dst": Op(_edge_dst, lambda _: (W.indptr, EDGES + 5, W.indices), floats=False),
    "add_self_loops": Op(_add_self_loops, lambda _: (*WIDE, torch.tensor(NUM_DST)), floats=False),
    "block_self_loops": Op(
        _block_self_loops,
        lambda _: (*WIDE, WIDE[1], torch.arange(NUM_DST, dtype=WIDE[1].dtype), torch.tensor(NUM_DST), NUM_SRC),
        floats=False,
    ),
    "sampled_self_loops": Op(
        _sampled_self_loops,
        lambda _: (*WIDE, torch.arange(NUM_DST, dtype=WIDE[1].dtype), torch.tensor(NUM_DST)),
        floats=False,
    ),
    "out_degrees": Op(_out_degrees, lambda _: (*WIDE, NUM_SRC), floats=False),
    "slice_cols": Op(_slice_cols, lambda _: (*large_columns(), -1), floats=False),
    "rowwise_sample": Op(
        _rowwise_sample, lambda _: (*WIDE, torch.arange(NUM_DST), *DRAWS, -1), floats=False,
        errors=(((*TINY, torch.tensor([0, 0]), *DRAWS, -1), "one row id per row, got 2 ids"),),
    ),
    "sample_cols": Op(
        _sample_cols, lambda _: (*large_columns(), *DRAWS, -1), floats=False,
        errors=(
            ((*INT_OFFSETS[0], *ONE, *DRAWS, -1), INT_OFFSETS[1]),
            ((*TINY, torch.tensor([0], dtype=torch.int32), ONE[1], *DRAWS, -1), "node ids of one dtype"),
            ((*TINY, torch.tensor([0.0]), ONE[1], *DRAWS, -1), "int32 or int64"),
            ((*TINY, *ONE, 5, False, torch.tensor([1, 2]), 0, -1), "key: expected an int64 tensor of 3"),
            ((*TINY, *ONE, *DRAWS, -1, torch.tensor([1, 2])), "node_ids for each of 1 nodes, got 2"),
            ((*TINY, *ONE, *DRAWS, -1, torch.tensor([0.5])), "int32 or int64"),
        ),
    ),
    "sample_eids": Op(
        _sample_eids, lambda _: (large_columns()[0], *large_columns()[2:], *DRAWS, -1), floats=False
    ),
    "compact": Op(
        _compact, _large_compact, floats=False,
        errors=(((torch.tensor([0], dtype=torch.int32), ONE[1], *TINY, 1, -1), "node ids of one dtype"),),
    ),
    "sample_aggregate": Op(
        _sample_aggregate, lambda t: (*large_columns(), *DRAWS, large_x(t), "mean"),
        errors=(((*TINY, *ONE, *DRAWS, ints(1, 2), "sum"), NOT_FLOAT),),
    ),
}  # fmt: skip
