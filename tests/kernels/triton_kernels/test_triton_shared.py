"""Sums of rows that several heads share."""

import pytest
import torch
from kernel_checks import check_close, tensors
from ops.database import OPS

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]

NAMES = ["spmm", "spmm_grad_x", "spmm_grad_weight"]
HARD = ("no sources", "duplicates", "hub", "padded,")


def _samples(name, dtype, ids):
    return [s for s in OPS[name].samples(dtype, ids) if "shared" in s.case and s.case.startswith(HARD)]


def _check(name, dtype, ids, stride=1):
    exact = _samples(name, torch.float64, ids)[::stride]
    for sample, wide in zip(_samples(name, dtype, ids)[::stride], exact, strict=True):
        args = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in sample.args]
        assert wide.case == sample.case
        (ours,) = tensors(getattr(gpu, name)(*sample.args))
        check_close(ours, getattr(reference, name)(*args), dtype, f"{name}: {sample.case}")


@pytest.mark.parametrize("name", NAMES)
def test_against_the_reference(name):
    _check(name, torch.float32, torch.int32)
    _check(name, torch.bfloat16, torch.int64, 7)


def test_gradient_along_lists_of_edges(atomic):
    _check("spmm_grad_x", torch.float32, torch.int64)
    _check("spmm_grad_x", torch.float16, torch.int32, 7)


@pytest.mark.parametrize("width", [100, 260])
def test_wide_rows_and_many_heads(width, atomic):
    indptr, indices = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 0, 1, 4], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((5, 1, width), (4, 12), (3, 12, width)))
    calls = {
        "spmm": (x, weight, "mean"),
        "spmm_grad_x": (grad, weight, 5, "mean", True),
        "spmm_grad_weight": (x, grad, weight, "mean"),
    }
    for name, args in calls.items():
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        exact = getattr(reference, name)(indptr, indices, *wide)
        check_close(getattr(gpu, name)(indptr, indices, *args), exact, torch.float32, name)
