"""The public sample-aggregate operator: one and two hops, values and gradients, against sampling step by step."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import joestar.ops
from joestar.ops import reference

from . import oracle
from .samples import FLOATS, TOLERANCE

KEY = (7, 2, 11)


def _graph(ids: torch.dtype = torch.int32) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    degrees = torch.tensor([0, 3, 1, 7, 2, 0, 4, 12, 5, 1, 6, 9])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, 12, (int(indptr[-1]),), generator=generator).to(ids)
    return SimpleNamespace(indptr=indptr, indices=indices)


def _features(dtype=torch.float64, *shape: int) -> Tensor:
    return torch.randn(shape or (12, 5), generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


SEEDS = torch.tensor([7, 0, 3, 10, 3, 8, 1])


def _expected(graph, x: Tensor, nodes: list[int], fanouts: tuple, reduce: str, replace: bool, hop: int = 0) -> Tensor:
    """By definition, node by node; differentiable."""
    if hop == len(fanouts):
        return x[torch.tensor(nodes, dtype=torch.int64)]
    key = oracle.sampled_positions(graph.indptr.tolist(), nodes, fanouts[hop], replace, KEY, 4 + hop)
    how = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[reduce]
    rows = []
    for positions in key:
        sources = graph.indices[torch.tensor(positions, dtype=torch.int64)].tolist()
        inner = _expected(graph, x, sources, fanouts, reduce, replace, hop + 1)
        rows.append(how(inner, 0) if sources else torch.zeros_like(x[0]))
    return torch.stack(rows) if rows else x[:0]


def _ours(graph, x: Tensor, fanouts, reduce="mean", **options) -> Tensor:
    return joestar.ops.sample_aggregate(graph, x, SEEDS, fanouts, reduce, key=KEY, site=4, **options)


@pytest.mark.parametrize("fanouts", [(3,), (3, 2), (-1, 4), (2, -1), (-1,), (20, 20)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("replace", [False, True])
def test_values_and_gradients(fanouts, reduce, replace):
    graph = _graph()
    x = _features().requires_grad_()
    expected = _expected(graph, x, SEEDS.tolist(), fanouts, reduce, replace)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (good,) = torch.autograd.grad((expected * weights).sum(), x)
    for replay in ("saved", "recomputed"):
        y = _ours(graph, x, fanouts, reduce, replace=replace, replay=replay)
        torch.testing.assert_close(y, expected)
        (grad,) = torch.autograd.grad((y * weights).sum(), x)
        torch.testing.assert_close(grad, good, msg=f"gradient, {replay}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_dtypes(dtype, ids):
    graph, x = _graph(ids), _features(dtype).requires_grad_()
    y = _ours(graph, x, (4, 3))
    expected = _expected(graph, x.detach().double(), SEEDS.tolist(), (4, 3), "mean", False)
    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() <= 2 * TOLERANCE[dtype]
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert x.grad.shape == x.shape


def test_picks_are_those_of_two_samples():
    graph, x = _graph(), _features(torch.float32)
    key, count = torch.tensor(KEY), torch.tensor(7)
    sub, picked, total = reference.sample_cols(graph.indptr, graph.indices, SEEDS.int(), count, 3, False, key, 4, -1)
    inner, _ = reference.sample_aggregate(graph.indptr, graph.indices, picked, total, 2, False, key, 5, x, "max")
    y = reference.spmm(sub, torch.arange(picked.numel()), inner, None, "max")
    assert torch.equal(_ours(graph, x, (3, 2), "max"), y)


def test_a_key_that_moves_on_does_not_change_the_replay():
    graph, x, key = _graph(), _features().requires_grad_(), torch.tensor(KEY)
    y = joestar.ops.sample_aggregate(graph, x, SEEDS, (3, 2), key=key, site=4)
    key[2] += 1
    (grad,) = torch.autograd.grad(y.sum(), x)
    (good,) = torch.autograd.grad(_ours(graph, x, (3, 2)).sum(), x)
    torch.testing.assert_close(grad, good)


def test_no_seeds_and_features_of_more_dimensions():
    graph = _graph()
    assert joestar.ops.sample_aggregate(graph, _features(), SEEDS[:0], (3, 2)).shape == (0, 5)
    x = _features(torch.float64, 12, 2, 3)
    torch.testing.assert_close(_ours(graph, x, (3, 2)), _ours(graph, x.flatten(1), (3, 2)).view(7, 2, 3))


def test_it_traces_with_the_ops_it_is_made_of():
    graph, x = _graph(), _features(torch.float32)
    compiled = torch.compile(lambda x: _ours(graph, x, (3, 2)) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), _ours(graph, x, (3, 2)) * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fanouts": (1, 2, 3)}, "one or two fanouts"),
        ({"fanouts": (-2,)}, "each -1 or more"),
        ({"reduce": "median"}, "reduce to be one of sum, mean, max, min, got 'median'"),
        ({"replay": "never"}, "'saved' or 'recomputed', got 'never'"),
        ({"x": torch.zeros(3, 2)}, "each of the 12 nodes, got \\[3, 2\\]"),
    ],
)
def test_errors(options, message):
    arguments = {"x": _features(), "fanouts": (3,), **options}
    with pytest.raises(ValueError, match=message):
        _ours(_graph(), **arguments)
