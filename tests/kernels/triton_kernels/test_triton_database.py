"""The Triton kernels against their references, over the op database."""

import pytest
import torch
from kernel_checks import check_op
from ops.database import OPS

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
    pytest.mark.every(3),
]

SLOW = {
    "weighted_sample": 0,
    "sample_aggregate": 0,
    "attend": 0,
    "attend_grad": 0,
    "rowwise_sample": 10,
    "sample_cols": 12,
    "sample_eids": 8,
    "spmm_extremum_grad": 4,
}
"""Samples of ops that the interpreter takes long for; those with 0 have tests of their own."""
NAMES = [name for name in sorted(set(gpu.__all__) & set(OPS)) if SLOW.get(name, 1)]


MORE = pytest.mark.parametrize(
    "most", [6, pytest.param(9, marks=pytest.mark.fuzz), pytest.param(18, marks=pytest.mark.slow)]
)
"""Samples of an op, at most."""


@pytest.mark.every(2)
@MORE
@pytest.mark.parametrize("name", NAMES)
def test_kernel_against_reference(name, most):
    limit = min(SLOW.get(name, most), most)
    if not OPS[name].floats:
        check_op(getattr(gpu, name), name, None, torch.int32, "cpu", limit)
        check_op(getattr(gpu, name), name, None, torch.int64, "cpu", limit // 2)
        return
    check_op(getattr(gpu, name), name, torch.float32, torch.int32, "cpu", limit)
    check_op(getattr(gpu, name), name, torch.float64, torch.int64, "cpu", limit // 3)
    check_op(getattr(gpu, name), name, torch.float16, torch.int64, "cpu", limit // 3)
    check_op(getattr(gpu, name), name, torch.bfloat16, torch.int32, "cpu", limit // 3, rounds_exactly=False)


LINKED = [
    "aggregate_activated_grad",
    "aggregate_cat_grad",
    "aggregate_cat_kept_grad",
    "aggregate_rows_grad",
    "aggregate_rows_kept_grad",
]


@MORE
@pytest.mark.parametrize("name", ["spmm_grad_x", "scatter_src", *LINKED])
def test_atomic_gradients(name, most, atomic):
    check_op(getattr(gpu, name), name, torch.float32, torch.int32, "cpu", most)
    check_op(getattr(gpu, name), name, torch.bfloat16, torch.int64, "cpu", most // 2, rounds_exactly=False)


READS = {"spmm_csr", "spmm_csr_extremum_grad", "spmm_coo"}
"""Ops whose errors on a CPU are found by reading ids, which a GPU's launcher must not wait for."""


def test_forms_refuse_wrong_shapes():
    offsets, ids = torch.tensor([0, 1]), torch.tensor([0])
    with pytest.raises(ValueError, match="x with one row for each of 1"):
        gpu.spmm_csr(offsets, ids, torch.ones(3, 2), None, 1, "sum")
    with pytest.raises(ValueError, match="weight with one row for each of 1"):
        gpu.spmm_csr(offsets, ids, torch.ones(1, 2), torch.ones(4), 1, "sum")
    with pytest.raises(ValueError, match="destinations with one row for each of 1"):
        gpu.spmm_coo(ids, torch.tensor([0, 0]), torch.ones(1, 2), None, 1, "sum")


@pytest.mark.parametrize("name", sorted(name for name in set(gpu.__all__) & set(OPS) - READS if OPS[name].errors))
def test_errors(name):
    for args, message in OPS[name].errors:
        with pytest.raises(ValueError, match=message):
            getattr(gpu, name)(*args)
