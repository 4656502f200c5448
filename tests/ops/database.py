"""The op database: per op its samples, how exact its kernel is, which arguments have gradients, and its errors.

``OPS`` maps the name of every op with a kernel of its own to an ``Op``; the tests of this folder are generated from it.
Float operands carry NaN wherever an op must not read: behind the last edge and in rows past the count.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.ops import reference

from .structures import Structure, queries, structures, wide

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
KEY = torch.tensor([7, 2, 11])
BIG_KEY = torch.tensor([-(2**40) + 5, 3, 2**34 + 1])
SHAPES = ((), (0,), (1,), (17,), (2, 0), (2, 3), (3, 18))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error relative to the largest value of the float64 result."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call; ``case`` names it. ``exact``: equal to the reference in the same dtype, bit for bit."""

    case: str
    args: tuple
    exact: bool = False


@dataclass(frozen=True)
class Op:
    """``samples(dtype, ids)`` are the calls; ``large(dtype)`` one that all kernels run in parallel."""

    samples: Callable[[torch.dtype | None, torch.dtype], Iterator[Sample]]
    large: Callable[[torch.dtype], tuple]
    floats: bool = True
    gradients: tuple[int, ...] = ()
    errors: tuple[tuple, ...] = ()


def values(shape: tuple, dtype: torch.dtype | None, seed: int, valid: int | None = None) -> Tensor:
    """Normal values ``shape``, the same for every dtype up to rounding; NaN in the rows from ``valid`` on."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if valid is not None:
        out[valid:] = math.nan
    return out


def few_values(shape: tuple, dtype: torch.dtype, seed: int) -> Tensor:
    """Values out of {-1, -0.5, 0.5, 1}: many ties, and products without rounding."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, 4, shape, generator=generator)
    return torch.tensor([-1.0, -0.5, 0.5, 1.0], dtype=dtype)[choice]


def _all(ids: torch.dtype) -> list[Structure]:
    return [structure.to(ids) for structure in structures()]


def _weights(s: Structure, shape: tuple, dtype: torch.dtype) -> list[tuple[str, Tensor | None]]:
    edges = s.indices.numel()
    out = [("no weight", None), ("weight [E]", values((edges,), dtype, 2, s.edges))]
    if len(shape) == 2:
        out.append(("weight [E, H]", values((edges, shape[0]), dtype, 3, s.edges)))
    return out


# --- structure ------------------------------------------------------------------------------------------------------


def _edge_dst(_, ids):
    for s in _all(ids):
        yield Sample(s.name, (s.indptr, s.indices.numel(), s.indices), True)


def _add_self_loops(_, ids):
    for s in _all(ids):
        if s.num_dst <= s.num_src:
            yield Sample(s.name, (s.indptr, s.indices, torch.tensor(s.rows)), True)


def _out_degrees(_, ids):
    for s in _all(ids):
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
            for bound in _bounds(int(reference.rowwise_sample(*args, -1)[2])):
                yield Sample(f"{q.name}, k={draws[0]} replace={draws[1]} bound={bound}", (*args, bound), True)


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


# --- computation ----------------------------------------------------------------------------------------------------


def _spmm(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            x = values((s.num_src, *shape), dtype, 1)
            for name, weight in _weights(s, shape, dtype):
                for reduce in ("sum", "mean", "max", "min"):
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, weight, reduce), reduce in ("max", "min"))


def _spmm_grad_x(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            grad = values((s.num_dst, *shape), dtype, 1, s.rows)
            for name, weight in _weights(s, shape, dtype):
                for reduce in ("sum", "mean"):
                    case = f"{s.name}, grad {list(grad.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, grad, weight, s.num_src, reduce))


def _spmm_grad_weight(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            x, grad = values((s.num_src, *shape), dtype, 1), values((s.num_dst, *shape), dtype, 4, s.rows)
            for name, weight in _weights(s, shape, dtype)[1:]:
                for reduce in ("sum", "mean"):
                    case = f"{s.name}, x {list(x.shape)}, {name}, {reduce}"
                    yield Sample(case, (s.indptr, s.indices, x, grad, weight, reduce))


def _spmm_extremum_grad(dtype, ids):
    for s in _all(ids):
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
    for s in _all(ids):
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
    for s in _all(ids):
        for shape in SHAPES:
            e = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, e {list(e.shape)}", (s.indptr, s.indices, e, s.num_src))


def _scatter_dst(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            e = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, e {list(e.shape)}", (s.indptr, e))


def _edge_softmax(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            scores = values((s.indices.numel(), *shape), dtype, 1, s.edges)
            yield Sample(f"{s.name}, {list(scores.shape)}", (s.indptr, scores))
            yield Sample(f"{s.name}, {list(scores.shape)}, large", (s.indptr, scores * 200))


def _edge_softmax_grad(dtype, ids):
    for s in _all(ids):
        for shape in SHAPES:
            scores = values((s.indices.numel(), *shape), torch.float64, 1, s.edges)
            out = reference.edge_softmax(s.indptr, scores).to(dtype)
            grad = values(tuple(out.shape), dtype, 4, s.edges)
            yield Sample(f"{s.name}, {list(out.shape)}", (s.indptr, out, grad))


# --- the table ------------------------------------------------------------------------------------------------------

_W = wide()
_E, _D, _S = _W.edges, _W.num_dst, _W.num_src
_WIDE = (_W.indptr, _W.indices)


def _x(dtype: torch.dtype, rows: int = _S, columns: int = 3) -> Tensor:
    return values((rows, columns), dtype, 1)


def _large_extremum(dtype: torch.dtype) -> tuple:
    x, weight = few_values((_S, 2), dtype, 1), few_values((_E,), dtype, 2)
    return (*_WIDE, x, weight, reference.spmm(*_WIDE, x, weight, "max"), _x(dtype, _D, 2))


def _large_columns(dtype=None) -> tuple:
    """A square graph of ``_S`` nodes, and every node twice."""
    indptr = torch.cat([_W.indptr, torch.full((_S - _D,), _E)])
    nodes = torch.arange(_S).flip(0)
    return indptr, _W.indices, torch.cat([nodes, nodes]), torch.tensor(2 * _S - 3)


def _large_compact(dtype=None) -> tuple:
    indptr, indices, dsts, count = _large_columns()
    sub, picked, _ = reference.slice_cols(indptr, indices, dsts, count, -1)
    return dsts, count, sub, picked, _S, -1


_DRAWS = (5, False, KEY, 1)
_TINY = (torch.tensor([0, 1]), torch.tensor([0]))
_ONE = (torch.tensor([0]), torch.tensor(1))
_INT_OFFSETS = ((torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])), "indptr int64")
_NOT_FLOAT = "floating-point dtype"


def _ints(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


OPS = {
    "edge_dst": Op(_edge_dst, lambda _: (_W.indptr, _E + 5, _W.indices), floats=False),
    "add_self_loops": Op(_add_self_loops, lambda _: (*_WIDE, torch.tensor(_D)), floats=False),
    "out_degrees": Op(_out_degrees, lambda _: (*_WIDE, _S), floats=False),
    "slice_cols": Op(_slice_cols, lambda _: (*_large_columns(), -1), floats=False),
    "rowwise_sample": Op(
        _rowwise_sample, lambda _: (*_WIDE, torch.arange(_D), *_DRAWS, -1), floats=False,
        errors=(((*_TINY, torch.tensor([0, 0]), *_DRAWS, -1), "one row id per row, got 2 ids"),),
    ),
    "sample_cols": Op(
        _sample_cols, lambda _: (*_large_columns(), *_DRAWS, -1), floats=False,
        errors=(
            ((*_INT_OFFSETS[0], *_ONE, *_DRAWS, -1), _INT_OFFSETS[1]),
            ((*_TINY, torch.tensor([0], dtype=torch.int32), _ONE[1], *_DRAWS, -1), "node ids of one dtype"),
            ((*_TINY, torch.tensor([0.0]), _ONE[1], *_DRAWS, -1), "int32 or int64"),
            ((*_TINY, *_ONE, 5, False, torch.tensor([1, 2]), 0, -1), "key: expected an int64 tensor of 3"),
        ),
    ),
    "sample_eids": Op(
        _sample_eids, lambda _: (_large_columns()[0], *_large_columns()[2:], *_DRAWS, -1), floats=False
    ),
    "compact": Op(
        _compact, _large_compact, floats=False,
        errors=(((torch.tensor([0], dtype=torch.int32), _ONE[1], *_TINY, 1, -1), "node ids of one dtype"),),
    ),
    "sample_aggregate": Op(
        _sample_aggregate, lambda t: (*_large_columns(), *_DRAWS, _x(t), "mean"),
        errors=(((*_TINY, *_ONE, *_DRAWS, _ints(1, 2), "sum"), _NOT_FLOAT),),
    ),
    "spmm": Op(
        _spmm, lambda t: (*_WIDE, _x(t), values((_E,), t, 2), "mean"), gradients=(2, 3),
        errors=(
            ((*_TINY, _ints(1, 2), None, "sum"), _NOT_FLOAT),
            ((*_INT_OFFSETS[0], torch.ones(1), None, "sum"), _INT_OFFSETS[1]),
            ((*_TINY, torch.ones(1, 2, 3), torch.ones(1, 3), "sum"), r"\[E, H\].*weights \[1, 3\]"),
        ),
    ),
    "spmm_grad_x": Op(_spmm_grad_x, lambda t: (*_WIDE, _x(t, _D), values((_E,), t, 2), _S, "mean")),
    "spmm_grad_weight": Op(
        _spmm_grad_weight, lambda t: (*_WIDE, _x(t), _x(t, _D), values((_E,), t, 2), "mean")
    ),
    "spmm_extremum_grad": Op(
        _spmm_extremum_grad, _large_extremum,
        errors=(
            ((*_TINY, torch.ones(1).half(), torch.ones(1), torch.ones(1).half(), torch.ones(1).half()), "no wider"),
        ),
    ),
    "sddmm": Op(
        _sddmm, lambda t: (*_WIDE, _x(t), _x(t, _D), "dot"), gradients=(2, 3),
        errors=(((*_TINY, torch.ones(1, 2), torch.ones(1, 3), "add"), r"\[2\], got \[3\]"),),
    ),
    "scatter_src": Op(_scatter_src, lambda t: (*_WIDE, _x(t, _E, 2), _S)),
    "scatter_dst": Op(_scatter_dst, lambda t: (_W.indptr, _x(t, _E, 2))),
    "edge_softmax": Op(
        _edge_softmax, lambda t: (_W.indptr, _x(t, _E, 2)), gradients=(1,),
        errors=(((_TINY[0], _ints(1)), _NOT_FLOAT),),
    ),
    "edge_softmax_grad": Op(_edge_softmax_grad, lambda t: (_W.indptr, _x(t, _E, 2).sigmoid(), _x(t, _E, 2))),
}  # fmt: skip
