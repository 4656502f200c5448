"""Triton's small products and turned matrices, against PyTorch (Triton's interpreter has no bfloat16 products)."""

import pytest
import torch
from kernel_checks import check_close

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_turn
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")

SHAPES = [(1, 3, 1), (100, 256, 47), (70, 47, 130), (33, 300, 5), (0, 8, 4), (4, 0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_products(dtype, ranges, tf32):
    """However the weight lies, in one part along the sum or several."""
    random = torch.Generator().manual_seed(0)
    for n, width, columns in SHAPES:
        x, weight, bias = (
            torch.randn(*shape, generator=random).to(dtype) for shape in ((n, width), (width, columns), (columns,))
        )
        for w in (weight, weight.t().contiguous().t()):
            for b in (None, bias):
                right = reference.mm_unaligned(x.double(), w.double(), None if b is None else b.double())
                check_close(gpu.mm_unaligned(x, w, b), right, dtype, f"{n} {width} {columns} {w.stride()} {b is None}")


def test_without_tf32_float32_is_exact():
    x, weight = torch.tensor([[1 + 2.0**-20]]), torch.ones(1, 3)
    assert torch.equal(gpu.mm_unaligned(x, weight, None), x.expand(1, 3))


def test_nan_and_infinities_stay(ranges, tf32):
    x = torch.tensor([[float("nan")], [float("inf")], [0.0]])
    y = gpu.mm_unaligned(x, torch.ones(1, 2), None)
    assert y[0].isnan().all() and torch.equal(y[1:, 0], torch.tensor([float("inf"), 0.0]))


@pytest.mark.parametrize("together", [1, 3, 16])
def test_turned_matrices(together, monkeypatch, ranges):
    """In one launch or several; of the edges of tiles, and empty ones."""
    monkeypatch.setattr(gpu_turn, "_TOGETHER", together)
    matrices = [torch.randn(*shape) for shape in ((5, 70), (32, 32), (100, 47), (0, 3), (1, 9), (64, 33))]
    matrices += [torch.randn(8, 6).t(), torch.randn(40, 3).double()]
    for turned, matrix in zip(gpu.turn_all(matrices), matrices, strict=True):
        assert torch.equal(turned, matrix.t()) and turned.is_contiguous()


def test_errors():
    x, weight, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)
    for call, message in (
        (lambda: gpu.mm_unaligned(x, weight[:2], bias), "a weight"),
        (lambda: gpu.mm_unaligned(x, weight.half(), bias), "one dtype"),
        (lambda: gpu.mm_unaligned(x, weight, bias[:2]), "a bias"),
        (lambda: gpu.mm_unaligned(x.int(), weight.int(), None), "floating-point"),
        (lambda: gpu.turn_all([x[0]]), "matrices"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
