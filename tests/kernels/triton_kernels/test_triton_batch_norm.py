"""Batch norm of rows in Triton's interpreter: what the op database does not have."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.batch_norms import SHAPES, compare

from joestar.kernels import gpu, gpu_batch_norm
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_sums(dtype):
    compare(gpu.batch_norm_rows, gpu.batch_norm_rows_sums, dtype, SHAPES[:5])


@pytest.mark.fuzz
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_several_tiles(dtype):
    compare(gpu.batch_norm_rows, gpu.batch_norm_rows_sums, dtype, SHAPES[4:])


ROWS, COUNT = torch.ones(2, 3), torch.tensor(2)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((ROWS.long(), None, None, COUNT, 1e-3), "floating-point dtype"),
        ((ROWS, torch.ones(2), None, COUNT, 1e-3), r"weight \[3\]"),
        ((ROWS, None, None, COUNT.int(), 1e-3), r"count int64 \[\]"),
        ((ROWS[0], None, None, COUNT, 1e-3), r"x \[n, D\]"),
    ],
)  # fmt: skip
def test_errors(args, match):
    with pytest.raises(ValueError, match=match):
        gpu.batch_norm_rows(*args)


def test_digits_that_do_not_cancel():
    """A mean ten thousand times the deviation, in float32: the sum of squares would have lost all of it."""
    random = torch.Generator().manual_seed(0)
    x = (10_000 + torch.randn(3000, 5, generator=random, dtype=torch.float64)).float()
    _, mean, var, scale = gpu.batch_norm_rows(x, None, None, torch.tensor(3000), 1e-5)
    torch.testing.assert_close(mean.double(), x.double().mean(0), rtol=3e-7, atol=0)
    torch.testing.assert_close(var.double(), x.double().var(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(scale.double(), (x.double().var(0, unbiased=False) + 1e-5).rsqrt(), rtol=1e-3, atol=0)


def test_one_row_and_none():
    x = torch.tensor([[2.0, 3.0], [torch.nan, torch.nan]])
    y, mean, var, _ = gpu.batch_norm_rows(x, None, torch.tensor([0.5, 0.25]), torch.tensor(1), 1e-5)
    assert y.tolist() == [[0.5, 0.25], [0.5, 0.25]] and mean.tolist() == [2, 3] and var.isnan().all()
    for rows in (x, x[:0]):
        y, mean, var, scale = gpu.batch_norm_rows(rows, None, None, torch.tensor(0), 0.25)
        expected = reference.batch_norm_rows(rows, None, None, torch.tensor(0), 0.25)
        for ours, theirs in zip((y, mean, var, scale), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_many_programs(monkeypatch):
    """Parts of more programs than are put together at a time, some of which have no valid row."""
    monkeypatch.setattr(gpu_batch_norm, "_TILE", 4)
    monkeypatch.setattr(gpu_batch_norm, "_PARTS", 8)
    monkeypatch.setattr(gpu_batch_norm, "_PROGRAMS", 50)
    random, count = torch.Generator().manual_seed(0), torch.tensor(41)
    x = torch.randn(120, 3, generator=random, dtype=torch.float64) + 7
    found, expected = (run(x, None, None, count, 1e-3) for run in (gpu.batch_norm_rows, reference.batch_norm_rows))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
