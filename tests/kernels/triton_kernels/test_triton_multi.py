"""Several reductions of the same rows in one pass, and their gradient, in Triton, against float64."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.test_multi_aggregate import ALL, check, nan_and_infinities

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]
RUN = gpu.multi_aggregate, gpu.multi_aggregate_grad


def test_every_structure():
    check(*RUN, torch.float32, torch.int32, 2e-5, (ALL,), (5,))


@pytest.mark.parametrize("reduces", ["mean,max,min,mean2", "max,mean", "sum2,sum", "min", "mean2"])
def test_some_reductions(reduces):
    check(*RUN, torch.float32, torch.int64, 2e-5, (reduces,), (3,), ("duplicates", "padded,", "isolated"))


@pytest.mark.parametrize("width", [1, 70, 300])
def test_rows_of_any_width(width):
    check(*RUN, torch.float32, torch.int32, 2e-5, (ALL,), (width,), ("isolated", "padded,"))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=str
)
def test_other_dtypes(dtype, tolerance):
    check(*RUN, dtype, torch.int64, tolerance, (ALL,), (5,), ("duplicates", "isolated", "padded,"))


def test_nan_and_infinities():
    nan_and_infinities(gpu.multi_aggregate)


def test_errors():
    indptr, indices, x = torch.tensor([0, 1]), torch.tensor([0]), torch.ones(2, 3)
    with pytest.raises(ValueError, match="indptr int64"):
        gpu.multi_aggregate(indptr.int(), indices, x, "mean,max", True)
    with pytest.raises(ValueError, match=r"expected x \[N, F\]"):
        gpu.multi_aggregate(indptr, indices, x[0], "mean,max", True)
    with pytest.raises(ValueError, match="expected some of sum, mean"):
        gpu.multi_aggregate(indptr, indices, x, "mean,mean", True)
    with pytest.raises(ValueError, match="indptr int64"):
        gpu.multi_aggregate_grad(indptr.int(), indices, x, x[:1], None, [], [])
    with pytest.raises(ValueError, match="a share for each of at most two extrema"):
        gpu.multi_aggregate_grad(indptr, indices, x, None, None, [x[:1]], [])
