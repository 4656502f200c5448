import pytest
import torch
from native_support import IDS, VALUES, close, edges, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference

SHAPES = [((), ()), ((1,), ()), ((37,), ()), ((128,), ()), ((3, 5), ()), ((3, 5), (3,)), ((4, 1), (4,))]


def make(shape, seed, dtype, grid=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ((values * 2).round() / 2 if grid else values).to(dtype)


def aligned(weight, rows):
    return weight.reshape(weight.shape + (1,) * (rows.dim() - weight.dim()))


def naive(indptr, indices, x, weight, reduce):
    """In float64, one row at a time."""
    x = x.double()
    y = torch.zeros((indptr.numel() - 1, *x.shape[1:]), dtype=torch.float64)
    for row in range(y.shape[0]):
        span = slice(int(indptr[row]), int(indptr[row + 1]))
        message = x[indices[span].long()]
        if weight is not None:
            message = message * aligned(weight[span].double(), message)
        if message.shape[0]:
            y[row] = {"sum": message.sum, "mean": message.mean, "max": message.amax, "min": message.amin}[reduce](0)
    return y


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_forward(dtype, ids, reduce, weighted, any_threads):
    indptr, indices = random_csc(90, 70, dtype=ids, tail=4)
    for trailing, heads in SHAPES:
        x = make((70, *trailing), 1, dtype)
        weight = make((indices.numel(), *heads), 2, dtype) if weighted else None
        y = any_threads(lambda x=x, w=weight: cpu.spmm(indptr, indices, x, w, reduce))
        assert y.dtype == dtype
        assert y.shape == (90, *trailing)
        assert close(y, naive(indptr, indices, x, weight, reduce), 60 if reduce in ("sum", "mean") else 4)
        assert same(y, reference.spmm(indptr, indices, x, weight, reduce))


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_src", [70, 2000])
def test_gradients_of_sums(dtype, reduce, weighted, num_src, any_threads):
    indptr, indices = random_csc(90, 70, tail=3)
    for trailing, heads in SHAPES:
        x, grad = make((num_src, *trailing), 1, dtype), make((90, *trailing), 3, dtype)
        weight = make((indices.numel(), *heads), 2, dtype)
        args = (indptr, indices, grad, weight if weighted else None, num_src, reduce)
        grad_x = any_threads(lambda args=args: cpu.spmm_grad_x(*args))
        assert same(grad_x, reference.spmm_grad_x(*args))
        grad_weight = any_threads(lambda x=x, g=grad, w=weight: cpu.spmm_grad_weight(indptr, indices, x, g, w, reduce))
        wide = (x.double(), grad.double(), weight.double())
        assert grad_weight.shape == weight.shape
        assert close(grad_weight, reference.spmm_grad_weight(indptr, indices, *wide, reduce), 60)


def test_gradients_are_autograds():
    indptr, indices = random_csc(40, 30, tail=2)
    x = make((30, 2, 3), 1, torch.float64).requires_grad_()
    weight = make((indices.numel(), 2), 2, torch.float64).requires_grad_()
    grad = make((40, 2, 3), 3, torch.float64)
    for reduce in ("sum", "mean"):
        y = torch.stack([torch.zeros(2, 3, dtype=torch.float64)] * 40)
        for source, row, edge in edges(indptr, indices):
            scale = 1 / float(indptr[row + 1] - indptr[row]) if reduce == "mean" else 1.0
            y = y.index_add(0, torch.tensor([row]), (x[source] * weight[edge][:, None] * scale)[None])
        expected = torch.autograd.grad(y, (x, weight), grad)
        with torch.no_grad():
            assert close(cpu.spmm_grad_x(indptr, indices, grad, weight, 30, reduce), expected[0], 100)
            assert close(cpu.spmm_grad_weight(indptr, indices, x, grad, weight, reduce), expected[1], 100)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremum_gradient_shares_ties(dtype, weighted, reduce, any_threads):
    indptr, indices = random_csc(60, 25, tail=3)
    for trailing, heads in SHAPES:
        x = make((25, *trailing), 1, dtype, grid=True)
        weight = make((indices.numel(), *heads), 2, dtype).sign() if weighted else None
        y = cpu.spmm(indptr, indices, x, weight, reduce)
        args = (indptr, indices, x, weight, y, make((60, *trailing), 3, dtype))
        grad_x, grad_weight = any_threads(lambda args=args: cpu.spmm_extremum_grad(*args))
        expected = reference.spmm_extremum_grad(*args)
        assert same(grad_x, expected[0])
        assert (grad_weight is None) == (not weighted)
        if weighted:
            assert close(grad_weight, expected[1], 60)


def test_extremum_gradient_is_scatter_reduces():
    indptr, indices = random_csc(60, 25)
    x = make((25, 4), 1, torch.float64, grid=True).requires_grad_()
    row = cpu.edge_dst(indptr, indices.numel(), indptr)
    y = torch.full((60, 4), float("nan"), dtype=torch.float64)  # torch counts equal starting values as ties
    y = y.scatter_reduce(0, row[:, None].expand(-1, 4), x[indices.long()], "amax", include_self=False)
    grad = make((60, 4), 2, torch.float64)
    (expected,) = torch.autograd.grad(y, x, grad)
    got, _ = cpu.spmm_extremum_grad(indptr, indices, x.detach(), None, y.detach(), grad)
    assert close(got, expected, 40)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_scatters(dtype, any_threads):
    indptr, indices = random_csc(90, 70, tail=5)
    for trailing in ((), (4,), (2, 3)):
        e = make((indices.numel(), *trailing), 1, dtype)
        by_source = any_threads(lambda e=e: cpu.scatter_src(indptr, indices, e, 75))
        assert same(by_source, reference.scatter_src(indptr, indices, e, 75))
        assert same(any_threads(lambda e=e: cpu.scatter_dst(indptr, e)), reference.scatter_dst(indptr, e))
        naive_sum = torch.zeros((75, *trailing), dtype=torch.float64)
        for source, _, edge in edges(indptr, indices):
            naive_sum[source] += e[edge].double()
        assert close(by_source, naive_sum, 60)


def test_a_large_transposition_is_stable(any_threads):
    indptr, indices = random_csc(6000, 9000, mean=20)
    grad = make((6000, 3), 1, torch.float32)
    got = any_threads(lambda: cpu.spmm_grad_x(indptr, indices, grad, None, 9000, "mean"))
    assert same(got, reference.spmm_grad_x(indptr, indices, grad, None, 9000, "mean"))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_nothing_to_aggregate(reduce):
    x = torch.full((3, 2), float("nan"))
    empty = torch.empty(0, dtype=torch.int32)
    assert cpu.spmm(torch.zeros(1, dtype=torch.int64), empty, x, None, reduce).shape == (0, 2)
    assert torch.equal(cpu.spmm(torch.zeros(5, dtype=torch.int64), empty, x, None, reduce), torch.zeros(4, 2))
    none = cpu.spmm(torch.tensor([0, 1]), torch.tensor([2]), torch.empty(3, 0), None, reduce)
    assert none.shape == (1, 0)
    grad_x = cpu.spmm_grad_x(torch.zeros(5, dtype=torch.int64), empty, torch.ones(4, 2), None, 3, "sum")
    assert torch.equal(grad_x, torch.zeros(3, 2))


def test_nan_and_infinity_pass_through():
    indptr, indices = torch.tensor([0, 2, 4, 5]), torch.tensor([0, 1, 1, 2, 2])
    x = torch.tensor([1.0, float("nan"), -float("inf")])
    for reduce in ("max", "min"):
        y = cpu.spmm(indptr, indices, x, None, reduce)
        assert y[:2].isnan().all()
        assert y[2] == -float("inf")


def test_views_and_mixed_precision():
    indptr, indices = random_csc(40, 30)
    x, weight = make((30, 16), 1, torch.float32), make((indices.numel(),), 2, torch.float32)
    strided = make((16, 30), 1, torch.float32).T
    assert same(
        cpu.spmm(indptr, indices, strided, None, "sum"), cpu.spmm(indptr, indices, strided.contiguous(), None, "sum")
    )
    for pair in ((x.bfloat16(), weight), (x, weight.half()), (x.half(), weight.bfloat16())):
        y = cpu.spmm(indptr, indices, *pair, "sum")
        assert y.dtype == pair[0].dtype
        assert same(y, reference.spmm(indptr, indices, *pair, "sum"))


def test_mistakes_are_named():
    indptr, indices = random_csc(40, 30)
    x = torch.ones(30, 3, 2)
    with pytest.raises(ValueError, match=r"weights \[E\] or"):
        cpu.spmm(indptr, indices, x, torch.ones(indices.numel(), 2), "sum")
    with pytest.raises(ValueError, match="floating-point dtype"):
        cpu.spmm(indptr, indices, x.int(), None, "sum")
    with pytest.raises(KeyError):
        cpu.spmm(indptr, indices, x, None, "median")
    with pytest.raises(ValueError, match="on the CPU"):
        cpu.spmm(indptr, indices, x.to("meta"), None, "sum")
