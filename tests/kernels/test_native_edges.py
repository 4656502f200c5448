import pytest
import torch
from native_support import IDS, VALUES, close, edges, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference

OPS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


def make(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("trailing", [(), (1,), (5,), (3, 7), (2, 64)], ids=str)
def test_sddmm(dtype, ids, trailing, any_threads):
    indptr, indices = random_csc(60, 45, dtype=ids, tail=3)
    lhs, rhs = make((45, *trailing), 1, dtype), make((60, *trailing), 2, dtype)
    for op in ("add", "sub", "mul", "div", "copy_lhs", "copy_rhs"):
        e = any_threads(lambda op=op: cpu.sddmm(indptr, indices, lhs, rhs, op))
        assert same(e, reference.sddmm(indptr, indices, lhs, rhs, op))
        assert e.shape == (indices.numel(), *trailing)
        assert not e[int(indptr[-1]) :].any()
    for source, row, edge in edges(indptr, indices):
        for op, value in OPS.items():
            assert torch.equal(cpu.sddmm(indptr, indices, lhs, rhs, op)[edge], value(lhs[source], rhs[row]))
        if edge > 5:
            break
    assert same(cpu.sddmm(indptr, indices, lhs, None, "copy_lhs"), cpu.sddmm(indptr, indices, lhs, rhs, "copy_lhs"))
    assert same(cpu.sddmm(indptr, indices, None, rhs, "copy_rhs"), cpu.sddmm(indptr, indices, lhs, rhs, "copy_rhs"))
    if trailing:
        dots = any_threads(lambda: cpu.sddmm(indptr, indices, lhs, rhs, "dot"))
        assert dots.dtype == dtype
        assert close(dots, reference.sddmm(indptr, indices, lhs.double(), rhs.double(), "dot"), 60)


def test_sddmm_refuses_rows_of_two_shapes():
    indptr, indices = random_csc(10, 10)
    with pytest.raises(ValueError, match="rows of one shape"):
        cpu.sddmm(indptr, indices, torch.ones(10, 3), torch.ones(10, 4), "add")


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("trailing", [(), (1,), (4,), (17,)], ids=str)
def test_edge_softmax(dtype, trailing, any_threads):
    indptr, indices = random_csc(80, 60, tail=4)
    s, grad = make((indices.numel(), *trailing), 1, dtype) * 20, make((indices.numel(), *trailing), 2, dtype)
    out = any_threads(lambda: cpu.edge_softmax(indptr, s))
    assert out.dtype == dtype
    expected = torch.zeros(s.shape, dtype=torch.float64)
    expected_grad = torch.zeros(s.shape, dtype=torch.float64)
    for row in range(80):
        span = slice(int(indptr[row]), int(indptr[row + 1]))
        expected[span] = torch.softmax(s[span].double(), 0)
        p, g = out[span].double(), grad[span].double()
        expected_grad[span] = p * g - p * (p * g).sum(0)
    assert close(out, expected, 8)
    got = any_threads(lambda: cpu.edge_softmax_grad(indptr, out, grad))
    assert close(got, expected_grad, 60)
    assert not got[int(indptr[-1]) :].any()
    assert close(out, reference.edge_softmax(indptr, s), 8)
    assert close(got, reference.edge_softmax_grad(indptr, out, grad), 60)


def test_softmax_of_extreme_scores():
    indptr = torch.tensor([0, 3, 5, 6])
    infinity = float("inf")
    s = torch.tensor([1e30, -1e30, 1e30, -infinity, 0.0, -500.0])
    assert cpu.edge_softmax(indptr, s).tolist() == [0.5, 0.0, 0.5, 0.0, 1.0, 1.0]
    assert cpu.edge_softmax(torch.tensor([0, 2]), torch.tensor([float("nan"), 1.0])).isnan().all()


def test_no_edges():
    indptr = torch.zeros(4, dtype=torch.int64)
    assert cpu.edge_softmax(indptr, torch.empty(0, 2)).shape == (0, 2)
    assert torch.equal(cpu.edge_softmax(indptr, torch.full((3,), float("nan"))), torch.zeros(3))
    indices = torch.empty(0, dtype=torch.int32)
    assert cpu.sddmm(indptr, indices, torch.ones(2, 5), torch.ones(3, 5), "dot").shape == (0,)
