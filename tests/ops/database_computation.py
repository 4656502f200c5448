"""The op database: aggregation, edge values, and their gradients."""

import torch

from joestar.ops import reference

from .samples import (
    EDGES,
    INT_OFFSETS,
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

SHARED = (((1,), 3), ((1, 0), 2), ((1, 5), 2), ((1, 17), 4), ((1, 18), 7))
"""Rows that several heads share, and how many."""


def _shared(s, dtype):
    """(name, shape of a row of x, shape of a result row, weights ``[E, H]``, reduce)."""
    for shape, heads in SHARED:
        weight = values((s.indices.numel(), heads), dtype, 3, s.edges)
        for reduce in ("sum", "mean"):
            yield f"{s.name}, shared {list(shape)}, {heads} heads, {reduce}", shape, (heads, *shape[1:]), weight, reduce


# --- computation ----------------------------------------------------------------------------------------------------


def _spmm(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            x = values((s.num_src, *shape), dtype, 1)
            for name, weight in weights(s, shape, dtype):
                for reduce in ("sum", "mean", "max", "min"):
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, weight, reduce), reduce in ("max", "min"))
        for case, row, _, weight, reduce in _shared(s, dtype):
            yield Sample(case, (s.indptr, s.indices, values((s.num_src, *row), dtype, 1), weight, reduce))


def _spmm_grad_x(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            grad = values((s.num_dst, *shape), dtype, 1, s.rows)
            for name, weight in weights(s, shape, dtype):
                for reduce in ("sum", "mean"):
                    case = f"{s.name}, grad {list(grad.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, grad, weight, s.num_src, reduce))
        for case, _, row, weight, reduce in _shared(s, dtype):
            grad = values((s.num_dst, *row), dtype, 1, s.rows)
            yield Sample(case, (s.indptr, s.indices, grad, weight, s.num_src, reduce, True))


def _spmm_grad_weight(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            x, grad = values((s.num_src, *shape), dtype, 1), values((s.num_dst, *shape), dtype, 4, s.rows)
            for name, weight in weights(s, shape, dtype)[1:]:
                for reduce in ("sum", "mean"):
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, grad, weight, reduce))
        for case, row, result, weight, reduce in _shared(s, dtype):
            x, grad = values((s.num_src, *row), dtype, 1), values((s.num_dst, *result), dtype, 4, s.rows)
            yield Sample(case, (s.indptr, s.indices, x, grad, weight, reduce))


def _spmm_extremum_grad(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            x, grad = few_values((s.num_src, *shape), dtype, 1), values((s.num_dst, *shape), dtype, 4)
            weights = [None, few_values((s.indices.numel(),), dtype, 2)]
            if len(shape) == 2:
                weights.append(few_values((s.indices.numel(), shape[0]), dtype, 3))
            for weight in weights:
                for reduce in ("max", "min"):
                    y = reference.spmm(s.indptr, s.indices, x, weight, reduce)
                    case = f"{s.name}, x {list(x.shape)}, {None if weight is None else list(weight.shape)}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, weight, y, grad))


def _sddmm(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            lhs, rhs = values((s.num_src, *shape), dtype, 1), values((s.num_dst, *shape), dtype, 4, s.rows)
            divisor = (rhs.abs() + 0.5) * few_values(rhs.shape, dtype, 5).sign()
            pairs = {"add": (lhs, rhs), "sub": (lhs, rhs), "mul": (lhs, rhs), "div": (lhs, divisor)}
            pairs |= {"copy_lhs": (lhs, None), "copy_rhs": (None, rhs), "dot": (lhs, rhs)}
            for op, (left, right) in pairs.items():
                if op != "dot" or shape:
                    case = f"{s.name}, {list(lhs.shape)}, {op}"
                    yield Sample(case, (s.indptr, s.indices, left, right, op), op != "dot")


def _scatter_src(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            e = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, e {list(e.shape)}", (s.indptr, s.indices, e, s.num_src))


def _scatter_dst(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            e = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, e {list(e.shape)}", (s.indptr, e))


def _edge_softmax(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            scores = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, {list(scores.shape)}", (s.indptr, scores))
            yield Sample(f"{s.name}, {list(scores.shape)}, large", (s.indptr, scores * 200))


def _edge_softmax_grad(dtype, ids):
    for s in every(ids):
        for shape in SHAPES:
            scores = values((s.indices.numel(), *shape), torch.float64, 1, s.edges)
            out = reference.edge_softmax(s.indptr, scores).to(dtype)
            grad = values(tuple(out.shape), dtype, 4, s.edges)
            yield Sample(f"{s.name}, {list(out.shape)}", (s.indptr, out, grad))


# --- the table ------------------------------------------------------------------------------------------------------


def _large_extremum(dtype: torch.dtype) -> tuple:
    x, weight = few_values((NUM_SRC, 2), dtype, 1), few_values((EDGES,), dtype, 2)
    return (*WIDE, x, weight, reference.spmm(*WIDE, x, weight, "max"), large_x(dtype, NUM_DST, 2))


OPS = {
    "spmm": Op(
        _spmm, lambda t: (*WIDE, large_x(t), values((EDGES,), t, 2), "mean"), gradients=(2, 3),
        errors=(
            ((*TINY, ints(1, 2), None, "sum"), NOT_FLOAT),
            ((*INT_OFFSETS[0], torch.ones(1), None, "sum"), INT_OFFSETS[1]),
            ((*TINY, torch.ones(1, 2, 3), torch.ones(1, 3), "sum"), r"\[E, H\].*weights \[1, 3\]"),
            ((*TINY, torch.ones(1, 1, 3), torch.ones(1, 2), "max"), "sum or mean of rows shared by heads.*max"),
        ),
    ),
    "spmm_grad_x": Op(_spmm_grad_x, lambda t: (*WIDE, large_x(t, NUM_DST), values((EDGES,), t, 2), NUM_SRC, "mean")),
    "spmm_grad_weight": Op(
        _spmm_grad_weight, lambda t: (*WIDE, large_x(t), large_x(t, NUM_DST), values((EDGES,), t, 2), "mean"),
        errors=(
            (
                (*TINY, torch.ones(1, 1, 3), torch.ones(1, 3, 3), torch.ones(1, 2), "sum"),
                r"rows \[2, 3\], got \[3, 3\]",
            ),
        ),
    ),
    "spmm_extremum_grad": Op(
        _spmm_extremum_grad, _large_extremum,
        errors=(
            ((*TINY, torch.ones(1).half(), torch.ones(1), torch.ones(1).half(), torch.ones(1).half()), "no wider"),
        ),
    ),
    "sddmm": Op(
        _sddmm, lambda t: (*WIDE, large_x(t), large_x(t, NUM_DST), "dot"), gradients=(2, 3),
        errors=(((*TINY, torch.ones(1, 2), torch.ones(1, 3), "add"), r"\[2\], got \[3\]"),),
    ),
    "scatter_src": Op(_scatter_src, lambda t: (*WIDE, large_x(t, EDGES, 2), NUM_SRC)),
    "scatter_dst": Op(_scatter_dst, lambda t: (W.indptr, large_x(t, EDGES, 2))),
    "edge_softmax": Op(
        _edge_softmax, lambda t: (W.indptr, large_x(t, EDGES, 2)), gradients=(1,),
        errors=(((TINY[0], ints(1)), NOT_FLOAT),),
    ),
    "edge_softmax_grad": Op(
        _edge_softmax_grad, lambda t: (W.indptr, large_x(t, EDGES, 2).sigmoid(), large_x(t, EDGES, 2))
    ),
}  # fmt: skip
