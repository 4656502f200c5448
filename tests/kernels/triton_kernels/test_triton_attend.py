"""Graph attention in one kernel, and its gradients with and without atomic additions."""

import pytest
import torch
from kernel_checks import check_close, in_double, tensors
from ops.database import OPS
from ops.test_attend_own import check

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]

HARD = ("no sources", "duplicates", "padded,", "hub, x [37, 1, 5]")


def _check(name, dtype, ids, first, stride):
    samples = [s for s in OPS[name].samples(dtype, ids) if s.case.startswith(HARD)][first::stride]
    assert samples
    for sample in samples:
        ours = tensors(getattr(gpu, name)(*sample.args))
        expected = tensors(getattr(reference, name)(*in_double(sample.args)))
        for position, (value, good) in enumerate(zip(ours, expected, strict=True)):
            own = OPS[name].result_dtype(position, dtype, sample.args)
            check_close(value, good, own, f"{name}: {sample.case}, output {position}")


@pytest.mark.parametrize("name", ["attend", "attend_grad"])
def test_against_the_reference(name):
    _check(name, torch.float32, torch.int32, 0, 3)
    _check(name, torch.float64, torch.int64, 1, 10)
    _check(name, torch.bfloat16, torch.int64, 2, 10)


def test_gradient_by_atomic_additions(atomic):
    _check("attend_grad", torch.float32, torch.int64, 1, 4)
    _check("attend_grad", torch.float16, torch.int32, 0, 12)


@pytest.mark.parametrize("shared", [False, True])
def test_wide_rows_and_many_heads(shared, atomic):
    indptr, indices = torch.tensor([0, 6, 6, 7]), torch.tensor([1, 0, 1, 4, 3, 3, 2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 12), (3, 12), (5, 1 if shared else 12, 260), (3, 12, 260), (7, 12))
    *scores, x, grad, of_edges = (torch.randn(shape, generator=generator) for shape in shapes)
    y, top, total = gpu.attend(indptr, indices, *scores, x, 0.1, None, 1.0, of_edges)
    exact = reference.attend(indptr, indices, *in_double((*scores, x)), 0.1, None, 1.0, of_edges.double())
    for value, good in zip((y, top, total), exact, strict=True):
        check_close(value, good, torch.float32, "attend")
    args = (indptr, indices, *scores, x, top, total, grad, 0.1, None, 1.0, True, of_edges)
    for value, good in zip(gpu.attend_grad(*args), reference.attend_grad(*in_double(args)), strict=True):
        check_close(value, good, torch.float32, "attend_grad")


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_scores_of_the_rows_themselves(heads, atomic):
    """With more than 4 heads the gradients of the vectors are products of the library."""
    check(gpu.attend_own_grad, torch.float64, torch.int64, 1e-11, heads)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_float32(dtype, shared, atomic):
    indptr, indices = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 3, 1, 4], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    s_src, s_dst = torch.rand(5, 2, generator=generator) + 1e5, torch.rand(3, 2, generator=generator)
    x, grad = (torch.randn(n, h, 8, generator=generator).to(dtype) for n, h in ((5, 1 if shared else 2), (3, 2)))
    outputs = gpu.attend(indptr, indices, s_src, s_dst, x, 0.1, None, 1.0)
    exact = reference.attend(indptr, indices, s_src, s_dst, x, 0.1, None, 1.0)
    grads = gpu.attend_grad(indptr, indices, s_src, s_dst, x, *exact[1:], grad, 0.1, None, 1.0, True)
    good = reference.attend_grad(indptr, indices, s_src, s_dst, x, *exact[1:], grad, 0.1, None, 1.0, True)
    for value, other in zip((*outputs, *grads), (*exact, *good), strict=True):
        assert value.dtype == other.dtype
        check_close(value, other.double(), value.dtype, "attend")
