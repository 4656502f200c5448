"""Several reductions of the same rows: against one ``spmm`` each, with gradients, in every dtype."""

import math

import pytest
import torch

from joestar.kernels.layout import REDUCTIONS

from .samples import FLOATS, TOLERANCE, every, few_values, values

ops = torch.ops.joestar
ALL = ",".join(REDUCTIONS)
SETS = (ALL, "mean,max,min,mean2", "max,mean", "sum2,sum", "min", "mean2")


def calls(dtype, ids, widths=(1, 5, 18)):
    """(case, offsets, edges, rows): every structure, values with ties and without, ids behind the last edge."""
    for s in every(ids):
        for width in widths:
            indices = s.indices.clone()
            indices[s.edges :] = 2**30
            for name, make in (("values", values), ("ties", few_values)):
                yield f"{s.name}, {width} {name}", s.indptr, indices, make((s.num_src, width), dtype, 1)


def expected(indptr, indices, x, reduces):
    """One ``spmm`` per reduction over the edges that there are."""
    indices = indices[: int(indptr[-1])]
    rows = [x * x if kind.endswith("2") else x for kind in reduces.split(",")]
    kinds = [kind.removesuffix("2") for kind in reduces.split(",")]
    return [ops.spmm(indptr, indices, row, None, kind) for row, kind in zip(rows, kinds, strict=True)]


def ties_of(indptr, indices, x, y):
    """How many edges attain a result, one destination after the other."""
    counts = torch.zeros(y.shape, dtype=torch.int32)
    for i in range(y.shape[0]):
        counts[i] = (x[indices[indptr[i] : indptr[i + 1]].long()] == y[i]).sum(0)
    return counts


def check(run, grad_of, dtype, ids, tolerance, sets=SETS, widths=(1, 5, 18), names=()):
    """Values, ties and gradients of ``run`` and ``grad_of`` against autograd of the parts in float64."""
    for case, indptr, indices, x in calls(dtype, ids, widths):
        if names and not case.startswith(names):
            continue
        for reduces in sets:
            wide = x.double().requires_grad_()
            good = expected(indptr, indices, wide, reduces)
            kinds, found = reduces.split(","), run(indptr, indices, x, reduces, True)
            for kind, value, other in zip(kinds, found, good, strict=False):
                assert value.dtype == dtype and value.shape == other.shape, (case, kind)
                limit = tolerance * max(1.0, float(other.detach().abs().max())) if other.numel() else 0
                torch.testing.assert_close(value.double(), other.detach(), rtol=0, atol=limit, msg=f"{case}, {kind}")
            extremes = [found[kinds.index(kind)] for kind in kinds if kind in ("max", "min")]
            for y, ties in zip(extremes, found[len(kinds) :], strict=True):
                assert torch.equal(ties, ties_of(indptr, indices, x, y)), case
            through = [values(y.shape, torch.float64, seed) for seed, y in enumerate(good)]
            (wanted,) = torch.autograd.grad(good, wide, through)
            ours = grad_of(indptr, indices, x, *parts(indptr, reduces, through, extremes, found[len(kinds) :], dtype))
            assert ours.dtype == dtype and ours.shape == x.shape, case
            limit = tolerance * max(1.0, float(wanted.abs().max())) * 4 if wanted.numel() else 0
            torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=limit, msg=f"{case}, {reduces}: gradient")


def parts(indptr, reduces, grads, extremes, ties, dtype):
    """What the backward pass hands to ``multi_aggregate_grad``."""
    of, wide = dict(zip(reduces.split(","), grads, strict=True)), torch.promote_types(dtype, torch.float32)
    degree = indptr.diff().clamp(min=1)[:, None]
    sums = []
    for total, mean in (("sum", "mean"), ("sum2", "mean2")):
        terms = ([of[total]] if total in of else []) + ([of[mean] / degree] if mean in of else [])
        sums.append(sum(terms).to(wide) if terms else None)
    shares = [of[kind] for kind in of if kind in ("max", "min")]
    return *sums, extremes, [(g / t.clamp(min=1)).to(wide) for g, t in zip(shares, ties, strict=True)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "ids"),
    [pytest.param(dtype, ids, marks=pytest.mark.slow if (n + m) % 2 else ())
     for n, dtype in enumerate(FLOATS) for m, ids in enumerate((torch.int32, torch.int64))],
    ids=str,
)  # fmt: skip
def test_values_ties_and_gradients(dtype, ids):
    check(ops.multi_aggregate, ops.multi_aggregate_grad, dtype, ids, TOLERANCE[dtype])


def test_the_same_bits_as_of_single_aggregations():
    for case, indptr, indices, x in calls(torch.float64, torch.int64):
        for ours, other in zip(ops.multi_aggregate(indptr, indices, x, ALL, False), expected(indptr, indices, x, ALL),
                               strict=True):  # fmt: skip
            assert torch.equal(ours, other), case


@pytest.mark.parametrize("make", [values, few_values], ids=["distinct", "ties"])
def test_autograd_is_that_of_single_aggregations(make):
    for s in every(torch.int64):
        x = make((s.num_src, 3), torch.float64, 1).requires_grad_()
        outputs = ops.multi_aggregate(s.indptr, s.indices, x, ALL, True)
        good = expected(s.indptr, s.indices, x, ALL)
        through = [values(y.shape, torch.float64, seed) for seed, y in enumerate(good)]
        (ours,) = torch.autograd.grad(outputs[: len(good)], x, through)
        (wanted,) = torch.autograd.grad(good, x, through)
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12, msg=s.name)


def test_results_that_nobody_reads():
    s = next(s for s in every(torch.int64) if s.name == "bipartite")
    x = values((s.num_src, 3), torch.float64, 1).requires_grad_()
    (ours,) = torch.autograd.grad(ops.multi_aggregate(s.indptr, s.indices, x, ALL, True)[2].sum(), x)
    (wanted,) = torch.autograd.grad(ops.spmm(s.indptr, s.indices, x, None, "max").sum(), x)
    torch.testing.assert_close(ours, wanted)


def nan_and_infinities(run):
    """NaN wins, and an infinity may be an extremum."""
    x = torch.tensor([[1.0, math.nan], [math.inf, 2.0], [-math.inf, 3.0], [math.inf, 4.0]])
    indptr, indices = torch.tensor([0, 2, 4, 5]), torch.tensor([0, 1, 1, 3, 2])
    found = run(indptr, indices, x, "max,min,mean2", True)
    nan, inf = math.nan, math.inf
    for ours, rows in zip(found, (
        [[inf, nan], [inf, 4.0], [-inf, 3.0]], [[1.0, nan], [inf, 2.0], [-inf, 3.0]],
        [[inf, nan], [inf, 10.0], [inf, 9.0]],
    ), strict=False):  # fmt: skip
        assert torch.equal(ours.nan_to_num(77.0, 88.0, 99.0), torch.tensor(rows).nan_to_num(77.0, 88.0, 99.0)), found
    assert found[3][:, 0].tolist() == [1, 2, 1] and found[4][:, 0].tolist() == [1, 2, 1]


def test_nan_and_infinities():
    nan_and_infinities(ops.multi_aggregate)


def test_autograd_and_registration():
    s = next(s for s in every(torch.int64) if s.name == "bipartite")
    x = values((s.num_src, 3), torch.float64, 1).requires_grad_()
    args = (s.indptr, s.indices, x, ALL, True)
    assert torch.autograd.gradcheck(
        lambda x: ops.multi_aggregate(s.indptr, s.indices, x, ALL, True)[: len(REDUCTIONS)], x
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.multi_aggregate, args, test_utils=checks)


def test_errors():
    s = next(s for s in every(torch.int64) if s.name == "bipartite")
    x = values((s.num_src, 3), torch.float64, 1)
    for reduces in ("mean,mean", "median", ""):
        with pytest.raises(ValueError, match=r"expected some of sum, mean, max"):
            ops.multi_aggregate(s.indptr, s.indices, x, reduces, True)
    with pytest.raises(ValueError, match=r"expected rows \[N, F\]"):
        ops.multi_aggregate(s.indptr, s.indices, x[:, None], "mean,max", True)
    with pytest.raises(ValueError, match="indptr int64"):
        ops.multi_aggregate(s.indptr.int(), s.indices, x, "mean,max", True)
    with pytest.raises(RuntimeError, match="no gradient for max without ties"):
        ops.multi_aggregate(s.indptr, s.indices, x.requires_grad_(), "mean,max", False)
