"""Rows that several heads share: sums, and their gradients, straight from the definition."""

import pytest
import torch
from native_support import IDS, VALUES, close, edges, random_csc, same

from joestar.kernels import cpu


def make(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive(indptr, indices, x, weight, grad, reduce):
    """(y, gradient for x, gradient for the weights) in float64, one edge at a time."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    y, grad_x, grad_weight = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    for source, row, edge in edges(indptr, indices):
        scale = float(indptr[row + 1] - indptr[row]) if reduce == "mean" else 1.0
        y[row] += weight[edge][:, None] * x[source] / scale
        grad_x[source, 0] += (weight[edge][:, None] * grad[row]).sum(0) / scale
        grad_weight[edge] = (x[source] * grad[row]).sum(-1) / scale
    return y, grad_x, grad_weight


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_against_the_definition(dtype, ids, reduce, any_threads):
    indptr, indices = random_csc(60, 70, mean=3, dtype=ids, tail=4)
    for heads, width in ((2, 1), (3, 5), (4, 32), (7, 18), (8, 64)):
        x, grad = make((75, 1, width), 1, dtype), make((60, heads, width), 2, dtype)
        weight = make((indices.numel(), heads), 3, dtype)
        y = any_threads(lambda x=x, w=weight: cpu.spmm(indptr, indices, x, w, reduce))
        grad_x = any_threads(lambda g=grad, w=weight: cpu.spmm_grad_x(indptr, indices, g, w, 75, reduce, True))
        grad_weight = any_threads(lambda x=x, g=grad, w=weight: cpu.spmm_grad_weight(indptr, indices, x, g, w, reduce))
        ours = (y, grad_x, grad_weight)
        for value, expected in zip(ours, naive(indptr, indices, x, weight, grad, reduce), strict=True):
            assert value.dtype == dtype
            assert value.shape == expected.shape
            assert close(value, expected, 200)


def test_mixed_precision_and_views():
    indptr, indices = random_csc(40, 30)
    x, weight = make((30, 1, 16), 1, torch.float32), make((indices.numel(), 4), 2, torch.float32)
    y = cpu.spmm(indptr, indices, x.bfloat16(), weight, "sum")
    assert y.dtype == torch.bfloat16
    assert close(y, cpu.spmm(indptr, indices, x.bfloat16().expand(-1, 4, -1), weight, "sum"), 4)
    strided = make((16, 30), 1, torch.float32).T[:, None]
    assert same(cpu.spmm(indptr, indices, strided, weight, "sum"),
                cpu.spmm(indptr, indices, strided.contiguous(), weight, "sum"))  # fmt: skip


def test_one_head_is_not_shared():
    indptr, indices = random_csc(40, 30)
    x, weight = make((30, 1, 8), 1, torch.float32), make((indices.numel(), 1), 2, torch.float32)
    assert torch.isfinite(cpu.spmm(indptr, indices, x, weight, "max")).all()
    assert same(cpu.spmm(indptr, indices, x, weight, "sum"), cpu.spmm(indptr, indices, x, weight[:, 0], "sum"))
