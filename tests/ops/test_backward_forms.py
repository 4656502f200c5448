"""Aggregations with a backward form of choice: the result of the plain op, and its gradient up to rounding."""

import itertools

import pytest
import torch
from torch import Tensor

from joestar.ops import reference
from joestar.ops.aggregate.backward_forms import FORMS, by_source, grad_x

from .database import FLOATS, IDS, TOLERANCE, values
from .structures import structures

ops = torch.ops.joestar
STRUCTURES = structures()
EACH = pytest.mark.parametrize("s", STRUCTURES, ids=[s.name for s in STRUCTURES])
CPU = FORMS["spmm"]["cpu"]


def _leaves(*values: Tensor | None) -> list:
    return [None if v is None else v.clone().requires_grad_() for v in values]


def _gradients(y: Tensor, inputs: list, seed: int) -> list[Tensor]:
    grad = values(tuple(y.shape), y.dtype, seed)
    return list(torch.autograd.grad(y, [v for v in inputs if v is not None], grad))


def _near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    assert ours.dtype == dtype and ours.shape == exact.shape
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    return ours.numel() == 0 or (ours.double() - exact).abs().max().item() <= 2 * TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@EACH
def test_spmm_by(s, dtype):
    s = s.to(IDS[0])
    edges = s.indices.numel()
    shapes = [((), None), ((3,), (edges,)), ((2, 3), (edges, 2)), ((17,), None)]
    for (row, weight), reduce, form in itertools.product(shapes, ("sum", "mean"), CPU):
        x = values((s.num_src, *row), dtype, 1)
        w = None if weight is None else values(weight, dtype, 2)
        inputs = _leaves(x, w)
        y = ops.spmm_by(s.indptr, s.indices, *inputs, reduce, form)
        assert torch.equal(y, ops.spmm(s.indptr, s.indices, x, w, reduce))
        exact = _leaves(x.double(), None if w is None else w.double())
        expected = _gradients(reference_spmm(s, *exact, reduce), exact, 3)
        for ours, theirs in zip(_gradients(y, inputs, 3), expected, strict=True):
            assert _near(ours, theirs, dtype), (row, weight, reduce, form)


def reference_spmm(s, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``spmm`` in plain PyTorch, differentiable by PyTorch itself."""
    dst = reference.edge_dst(s.indptr, s.edges, s.indptr)
    message = x[s.indices[: s.edges].long()]
    if weight is not None:
        message = message * weight[: s.edges].reshape(*weight[: s.edges].shape, *[1] * (x.dim() - weight.dim()))
    total = torch.zeros((s.num_dst, *x.shape[1:]), dtype=x.dtype).index_add(0, dst, message)
    degree = (s.indptr[1:] - s.indptr[:-1]).clamp(min=1).to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    return total / degree if reduce == "mean" else total


@pytest.mark.parametrize("masked", [False, True])
@EACH
def test_aggregate_cat_by(s, masked):
    rows = max(s.num_src, s.num_dst)
    x = values((rows, 40), torch.float64, 1)
    bits = values((rows, 2), torch.float64, 5).mul(1e9).to(torch.int32) if masked else None
    for reduce in ("sum", "mean"):
        (plain,) = _leaves(x)
        args = bits, 1.5 if masked else 1.0, reduce
        expected = ops.aggregate_cat(s.indptr, s.indices, plain, *args)
        (gradient,) = _gradients(expected, [plain], 3)
        for form in FORMS["aggregate_cat"]["cpu"]:
            (other,) = _leaves(x)
            y = ops.aggregate_cat_by(s.indptr, s.indices, other, *args, form)
            assert torch.equal(y, expected)
            torch.testing.assert_close(_gradients(y, [other], 3)[0], gradient, rtol=1e-12, atol=1e-12)


@EACH
def test_transposed_where_scattering_is_the_plain_form(s, monkeypatch):
    """What a GPU does: the edges are ordered, and each source gathers."""
    monkeypatch.setitem(FORMS["spmm"], "cpu", ("scatter", "transposed"))
    for row, weight, reduce in itertools.product(((), (2, 3)), (None, 1), ("sum", "mean")):
        w = None if weight is None else values((s.indices.numel(), *row[:1]), torch.float64, 2)
        grad = values((s.num_dst, *row), torch.float64, 3)
        ours = grad_x(s.indptr, s.indices, grad, w, s.num_src, reduce, "transposed")
        exact = reference.spmm_grad_x(s.indptr, s.indices, grad, w, s.num_src, reduce)
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@EACH
def test_edges_by_source(s):
    """What the ``transposed`` form gathers over: valid edges, each source's in edge order."""
    offsets, dst, order = by_source(s.indptr, s.indices, s.num_src)
    rows = reference.edge_dst(s.indptr, s.edges, s.indptr)
    wanted = [[e for e in range(s.edges) if int(s.indices[e]) == source] for source in range(s.num_src)]
    found = [order[offsets[i] : offsets[i + 1]].tolist() for i in range(s.num_src)]
    assert found == wanted
    assert dst[: s.edges].tolist() == rows[order[: s.edges]].tolist()


@pytest.mark.parametrize("form", CPU)
def test_opcheck(form):
    s = STRUCTURES[0]
    x, w = _leaves(values((s.num_src, 3), torch.float64, 1), values((s.indices.numel(),), torch.float64, 2))
    torch.library.opcheck(ops.spmm_by, (s.indptr, s.indices, x, w, "mean", form))
    rows = max(s.num_src, s.num_dst)
    (x,) = _leaves(values((rows, 3), torch.float64, 1))
    torch.library.opcheck(ops.aggregate_cat_by, (s.indptr, s.indices, x, None, 1.0, "mean", form))


def test_errors():
    indptr, indices, x = torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2)
    with pytest.raises(ValueError, match="backward on cpu must be one of scatter, transposed; got 'linked'"):
        ops.spmm_by(indptr, indices, x, None, "sum", "linked")
    with pytest.raises(ValueError, match="reduce must be sum or mean; got 'max'"):
        ops.spmm_by(indptr, indices, x, None, "max", "scatter")
    with pytest.raises(ValueError, match="expected a row per head"):
        ops.spmm_by(indptr, indices, torch.ones(1, 1, 2), torch.ones(1, 3), "sum", "scatter")
