"""Attention over rows of a table and self-loops by global ids, in Triton, against float64."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.test_gather_attend import check

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")
RUN = gpu.gather_attend, gpu.gather_attend_grad, gpu.row_dots


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (4, 18), (33, 2)], ids=str)
def test_float32(shape):
    check(RUN, torch.float32, torch.int32, 2e-5, (shape,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 5e-3)], ids=str)
def test_other_dtypes(dtype, tolerance):
    check(RUN, dtype, torch.int64, tolerance, ((2, 5),))


@pytest.mark.parametrize("transposed", [False, True])
def test_block_diagonal(transposed):
    weight = torch.randn(3, 4, 5)
    weight = weight.transpose(1, 2) if transposed else weight
    assert torch.equal(gpu.block_diagonal(weight), torch.block_diag(*weight))
    assert torch.equal(gpu.block_diagonal(weight[:, 1:]), torch.block_diag(*weight[:, 1:]))
