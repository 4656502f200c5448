"""Triton's products with an epilogue, against their references (Triton's interpreter has no bfloat16 products)."""

import pytest
import torch
from kernel_checks import check_close, in_double

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_heads, gpu_mm_relu, tune
from joestar.kernels.dropout import positive_bits
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")

SHAPES = [(1, 3, 1), (150, 100, 128), (200, 33, 47), (64, 16, 64), (70, 24, 100), (0, 8, 4)]
OTHERS = [(20, 130, 5), (20, 5, 70), (20, 5, 130)]
"""Weights that no program keeps: too long a column, bits of three words, more than one tile."""


def operands(n, width, columns, dtype):
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=random).to(dtype) for shape in ((n, width), (width, columns)))
    bits = torch.randint(-(2**31), 2**31, (n, -(-columns // 32)), generator=random, dtype=torch.int32)
    return x, weight, torch.randn(columns, generator=random).to(dtype), bits


def epilogues(bias, bits):
    """(bias, bits of dropout, its scale, what of these there is)."""
    for b, m in ((bias, bits), (None, bits), (bias, None)):
        yield b, m, 1.0 if m is None else 2.0, f"bias {b is not None} dropout {m is not None}"


def kept_of(y, bits):
    """Bits where rows are not 0 that dropout, if any, keeps; what is rounded to 0 in between may have either sign."""
    every = torch.full((y.shape[0], -(-y.shape[1] // 32)), -1, dtype=torch.int32)
    return positive_bits(y, every if bits is None else bits)


def check(dtype, shapes):
    for n, width, columns in shapes:
        x, weight, bias, bits = operands(n, width, columns, dtype)
        for w in (weight, weight.t().contiguous().t()):
            for b, m, scale, what in epilogues(bias, bits):
                case = f"{n} {width} {columns} {what} {w.stride()}"
                y, kept = gpu.mm_bias_relu(x, w, b, m, scale)
                check_close(y, reference.mm_bias_relu(*in_double((x, w, b, m, scale)))[0], dtype, case)
                assert torch.equal(kept, kept_of(y, m)), case
            for biased in (False, True):
                found = gpu.mm_bias_relu_grad(x, w, bits, 2.0, biased)
                good = reference.mm_bias_relu_grad(x.double(), w.double(), bits, 2.0, biased)
                for ours, right in zip(found, good, strict=True):
                    check_close(ours, right, dtype, f"gradient {n} {width} {columns} {biased} {w.stride()}")


HEADS = [(150, 4, 100, 32), (70, 2, 24, 64), (33, 2, 5, 16), (20, 4, 16, 64), (9, 1, 16, 32), (0, 2, 8, 32)]


def check_heads(dtype, shapes):
    """``shapes``: rows, heads, columns in front of the product and behind it."""
    for n, heads, width, columns in shapes:
        x, _, bias, bits = operands(n, heads * width, heads * columns, dtype)
        rows = x.view(n, heads, width)
        weight = torch.randn(heads, columns, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        grad = operands(n, heads * columns, 1, dtype)[0]
        for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            for b, m, scale, what in epilogues(bias, bits):
                case = f"{n} {heads} {width} {columns} {what} {w.stride()}"
                y, kept = gpu.head_linear_bias_relu(rows, w, b, m, scale)
                check_close(y, reference.head_linear_bias_relu(*in_double((rows, w, b, m, scale)))[0], dtype, case)
                assert torch.equal(kept, kept_of(y, m)), case
            for biased in (False, True):
                found = gpu.head_linear_bias_relu_grad(grad, bits, 2.0, biased, rows, w)
                good = reference.head_linear_bias_relu_grad(*in_double((grad, bits, 2.0, biased, rows, w)))
                for ours, right in zip(found, good, strict=True):
                    assert ours.shape == right.shape
                    check_close(ours, right, dtype, f"gradient {n} {heads} {width} {columns} {biased} {w.stride()}")


@pytest.mark.parametrize("shape", HEADS[1:] + HEADS[:1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.every(12)
def test_heads(shape, dtype, ranges, tf32):
    check_heads(dtype, [shape])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_against_product_and_epilogue(dtype, ranges, tf32):
    check(dtype, SHAPES + OTHERS)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[1], OTHERS[0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.every(12)
def test_without_tensor_cores(shape, dtype):
    check(dtype, [shape])


@pytest.mark.parametrize("cores", [1, 2, 132])
@pytest.mark.parametrize("place", range(max(len(gpu_mm_relu.CONFIGS), len(gpu_heads._GRAD_CONFIGS))))
@pytest.mark.every(6)
def test_settings(place, cores, monkeypatch, ranges, tf32):
    """Fewer programs than tiles, as many, and more."""
    monkeypatch.setattr(tune, "choose", lambda kernel, shape, candidates, *rest: candidates[place % len(candidates)])
    monkeypatch.setattr(gpu_mm_relu, "multiprocessors", lambda device: cores)
    check(torch.float32, [(290, 20, 37)])
    check_heads(torch.float32, [(290, 2, 20, 32)])


def test_nan_passes_and_infinities_stay(ranges, tf32):
    x = torch.tensor([[float("nan")], [float("inf")], [float("-inf")], [0.0]])
    y, kept = gpu.mm_bias_relu(x, torch.ones(1, 2), None, None, 1.0)
    assert y[0].isnan().all() and torch.equal(y[1:, 0], torch.tensor([float("inf"), 0.0, 0.0]))
    assert kept[:, 0].tolist() == [3, 3, 0, 0]


def test_errors(ranges, tf32):
    x, weight, bias, bits = operands(4, 3, 5, torch.float32)
    heads = torch.ones(1, 32, 3)
    for call, message in (
        (lambda: gpu.mm_bias_relu(x, weight[:2], bias, bits, 1.0), "a weight"),
        (lambda: gpu.mm_bias_relu(x, weight.half(), bias, bits, 1.0), "one dtype"),
        (lambda: gpu.mm_bias_relu(x, weight, bias[:2], bits, 1.0), "a bias"),
        (lambda: gpu.mm_bias_relu(x.int(), weight.int(), None, None, 1.0), "floating-point"),
        (lambda: gpu.mm_bias_relu_grad(x, weight, bits[:2], 1.0, True), "bits"),
        (lambda: gpu.head_linear_bias_relu(x, heads, None, None, 1.0), "rows"),
        (lambda: gpu.head_linear_bias_relu(x.view(4, 1, 3), heads, bias, None, 1.0), "a bias"),
        (lambda: gpu.head_linear_bias_relu(x.view(4, 1, 3), heads, None, bits[:2], 1.0), "bits"),
        (
            lambda: gpu.head_linear_bias_relu(x.view(4, 1, 3), heads[:, :24], None, None, 1.0),
            "weights that programs keep",
        ),
        (lambda: gpu.head_linear_bias_relu_grad(x, bits, 1.0, True, x.view(4, 1, 3), heads), "gradients"),
        (
            lambda: gpu.head_linear_bias_relu_grad(x[:, :1].expand(4, 32), bits[:2], 1.0, True, x[:, None], heads),
            "bits",
        ),
        (lambda: gpu.head_linear_bias_relu_grad(x, bits, 1.0, True, x, heads), "rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
