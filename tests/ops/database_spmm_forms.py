"""The op database: sparse-dense products of structures given by source, or as a sorted list of edges."""

import torch

from joestar.ops import reference

from .samples import (
    EDGES,
    NOT_FLOAT,
    NUM_DST,
    NUM_SRC,
    SHAPES,
    TINY,
    WIDE,
    Op,
    Sample,
    W,
    every,
    few_values,
    ints,
    large_x,
    values,
    weights,
)

REDUCES = ("sum", "mean", "max", "min")


def _spmm_csr(dtype, ids):
    """The structures by source: what is a source elsewhere is a destination here."""
    for s in every(ids):
        for shape in SHAPES:
            x = values((s.num_dst, *shape), dtype, 1, s.rows)
            for name, weight in weights(s, shape, dtype):
                for reduce in REDUCES:
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, weight, s.num_src, reduce), reduce in ("max", "min"))


def _spmm_csr_extremum_grad(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            x, grad = few_values((s.num_dst, *shape), dtype, 1), values((s.num_src, *shape), dtype, 4)
            chosen = [None, few_values((s.indices.numel(),), dtype, 2)]
            if len(shape) == 2:
                chosen.append(few_values((s.indices.numel(), shape[0]), dtype, 3))
            for weight in chosen:
                for reduce in ("max", "min"):
                    y = reference.spmm_csr(s.indptr, s.indices, x, weight, s.num_src, reduce)
                    case = f"{s.name}, x {list(x.shape)}, {None if weight is None else list(weight.shape)}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, weight, y, grad))


def _edges(s):
    """(src, dst) of a structure; the padding of dst is the number of rows."""
    dst = torch.full_like(s.indices, s.num_dst)
    dst[: s.edges] = reference.edge_dst(s.indptr, s.edges, s.indices)
    return s.indices, dst


def _spmm_coo(dtype, ids):
    for s in every(ids):
        src, dst = _edges(s)
        for shape in SHAPES:
            x = values((s.num_src, *shape), dtype, 1)
            for name, weight in weights(s, shape, dtype):
                for reduce in REDUCES:
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (src, dst, x, weight, s.num_dst, reduce), reduce in ("max", "min"))


def _large_extremum(dtype: torch.dtype) -> tuple:
    x, weight = few_values((NUM_DST, 2), dtype, 1), few_values((EDGES,), dtype, 2)
    y = reference.spmm_csr(*WIDE, x, weight, NUM_SRC, "max")
    return (*WIDE, x, weight, y, large_x(dtype, NUM_SRC, 2))


_PAIR = (torch.tensor([0, 0]), torch.tensor([0, 1]))
_X = torch.ones(1, 2)

OPS = {
    "spmm_csr": Op(
        _spmm_csr, lambda t: (*WIDE, large_x(t, NUM_DST, 70), values((EDGES,), t, 2), NUM_SRC, "mean"),
        gradients=(2, 3),
        errors=(
            ((*TINY, ints(1, 2), None, 1, "sum"), NOT_FLOAT),
            ((*TINY, torch.ones(3, 2), None, 1, "sum"), r"x with one row for each of 1, got \[3, 2\]"),
            ((*TINY, _X, torch.ones(4), 1, "sum"), r"weight with one row for each of 1, got \[4\]"),
            ((torch.tensor([0, 2]), torch.tensor([0]), _X, None, 1, "sum"), r"at least indptr\[-1\] = 2 ids, got 1"),
        ),
    ),
    "spmm_csr_extremum_grad": Op(
        _spmm_csr_extremum_grad, _large_extremum,
        errors=(
            ((*TINY, torch.ones(1).half(), torch.ones(1), torch.ones(1).half(), torch.ones(1).half()), "no wider"),
            ((*TINY, _X, None, torch.ones(3, 2), torch.ones(2, 2)), "grad with one row for each of 3"),
        ),
    ),
    "spmm_coo": Op(
        _spmm_coo, lambda t: (*_edges(W), large_x(t), values((EDGES,), t, 2), NUM_DST, "mean"), gradients=(2, 3),
        errors=(
            ((_PAIR[0], _PAIR[1].flip(0), _X, None, 2, "sum"), "ascending order; sort the edges by destination"),
            ((_PAIR[0], _PAIR[1] - 1, _X, None, 2, "sum"), "ids >= 0"),
            ((_PAIR[0], _PAIR[1].int(), _X, None, 2, "sum"), "ids of one dtype"),
            ((_PAIR[0], _PAIR[1][:1], _X, None, 2, "sum"), "a destination for every source, 2, got 1"),
            ((*_PAIR, _X, torch.ones(3), 2, "sum"), "weight with one row for each of 2"),
        ),
    ),
}  # fmt: skip
