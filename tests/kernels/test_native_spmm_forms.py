import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import IDS, VALUES, close, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference

ops = torch.ops.joestar
REDUCES = ["sum", "mean", "max", "min"]


def make(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def forms(num_src, num_dst, mean=6, dtype=torch.int32):
    """One set of edges by source, by destination, and as a list: (csr, csc, coo, csr's edges in the others' order)."""
    indptr, indices = random_csc(num_src, num_dst, mean=mean, dtype=dtype)
    order = torch.argsort(indices.long(), stable=True)
    src, dst = reference.edge_dst(indptr, indices.numel(), indices)[order], indices[order]
    by_dst = torch.searchsorted(dst.long(), torch.arange(num_dst + 1))
    return (indptr, indices), (by_dst, src), (src, dst), order


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (16,), (37,), (200,), (4, 32), (3, 5)], ids=str)
def test_three_forms_have_the_same_bits(dtype, ids, shape, any_threads):
    csr, csc, coo, order = forms(150, 90, dtype=ids)
    x, edges = make((150, *shape), 1, dtype), order.numel()
    weights = [None, make((edges,), 2, dtype)]
    if len(shape) == 2:
        weights.append(make((edges, shape[0]), 3, dtype))
    for weight in weights:
        ordered = None if weight is None else weight[order]
        for reduce in REDUCES:
            gathered = cpu.spmm(*csc, x, ordered, reduce)
            assert same(any_threads(lambda w=weight, r=reduce: cpu.spmm_csr(*csr, x, w, 90, r)), gathered)
            assert same(any_threads(lambda w=ordered, r=reduce: cpu.spmm_coo(*coo, x, w, 90, r)), gathered)
            exact = reference.spmm(*csc, x.double(), None if ordered is None else ordered.double(), reduce)
            assert close(gathered, exact, 40)


@pytest.mark.every(2)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_gradients(shape, reduce):
    csr, _, coo, order = forms(9, 7, mean=2)
    x = make((9, *shape), 1).requires_grad_()
    for size in [(order.numel(),), (order.numel(), 2)][: 1 + (len(shape) == 2)]:
        weight = make(size, 2).requires_grad_()
        for form, structure in ((ops.spmm_csr, csr), (ops.spmm_coo, coo)):
            run = lambda x, w, form=form, structure=structure: form(*structure, x, w, 7, reduce)  # noqa: E731
            assert torch.autograd.gradcheck(run, (x, weight))
            assert torch.autograd.gradcheck(lambda x, run=run: run(x, None), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_of_the_forms_agree(dtype, reduce):
    csr, csc, coo, order = forms(80, 60)
    grads = []
    for form, structure, reordered in ((ops.spmm_csr, csr, False), (ops.spmm_coo, coo, True), (ops.spmm, csc, True)):
        x, weight = make((80, 2, 9), 1, dtype).requires_grad_(), make((order.numel(), 2), 2, dtype).requires_grad_()
        bound = () if form is ops.spmm else (60,)
        y = form(*structure, x, weight[order] if reordered else weight, *bound, reduce)
        grads.append(torch.autograd.grad(y, (x, weight), make(y.shape, 3, dtype)))
    for grad_x, grad_weight in grads[:2]:
        assert grad_x.dtype == grad_weight.dtype == dtype
        assert torch.allclose(grad_x.double(), grads[2][0].double(), atol=64 * torch.finfo(dtype).eps)
        assert torch.allclose(grad_weight.double(), grads[2][1].double(), atol=64 * torch.finfo(dtype).eps)


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30),
    pad=st.integers(0, 3),
    reduce=st.sampled_from(REDUCES),
)
def test_lists_with_gaps_and_padding(edges, pad, reduce):
    edges = sorted(edges, key=lambda edge: edge[1])
    src = torch.tensor([s for s, _ in edges] + [0] * pad, dtype=torch.int64)
    dst = torch.tensor([d for _, d in edges] + [10] * pad, dtype=torch.int64)
    x = make((5, 3), 1)
    y = cpu.spmm_coo(src, dst, x, None, 10, reduce)
    for row in range(10):
        rows = x[[s for s, d in edges if d == row]]
        expected = torch.zeros(3, dtype=torch.float64)
        if len(rows):
            expected = {"max": rows.amax, "min": rows.amin, "sum": rows.sum, "mean": rows.mean}[reduce](0)
        assert torch.allclose(y[row], expected)


def test_sixteen_bits_accumulate_wider():
    rows = 4096
    x, into_one = torch.ones(rows, 1, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    assert cpu.spmm_csr(torch.arange(rows + 1), into_one, x, None, 1, "sum").item() == rows
    assert cpu.spmm_coo(into_one, into_one, x[:1], None, 1, "sum").item() == rows


def test_an_unsorted_list_is_refused_by_the_op():
    src, dst = torch.tensor([0, 1]), torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"ascending order; sort the edges by destination \(torch.sort"):
        ops.spmm_coo(src, dst, torch.ones(2, 1), None, 2, "sum")
