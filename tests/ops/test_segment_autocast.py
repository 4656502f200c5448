"""Segment programs under autocast: leaves of several dtypes, against the composed program in float64."""

import pytest
import torch

from joestar.kernels.segment_program import SegmentProgram
from joestar.ops.aggregate.segment import _result_dtype

ops = torch.ops.joestar
INDPTR, INDICES = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 1, 1, 3])
ROWS = torch.tensor([0, 0, 2, 2, 2])


def operands(src=torch.bfloat16, dst=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return [draw(4, 6).to(src), draw(3, 6).to(dst), draw(5, 2), draw(6, 2), draw(6), draw(5)]


@pytest.mark.parametrize("src", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dst", [torch.bfloat16, torch.float32])
def test_results_are_as_wide_as_pytorch_s(src, dst):
    """The fp32 number per edge makes all of it fp32, though rows are read in 16 bits; gradients in leaves' dtypes."""
    leaves = operands(src, dst)
    trained = [leaves[i].requires_grad_() for i in (0, 1, 3, 4, 5)]
    program = "src dst narrow scalar | add 0 1 | mul 2 3 | sub 4 5 | tanh 6 -> sum 7"
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = ops.segment(INDPTR, INDICES, leaves, program, 1)
    assert y.dtype == torch.float32
    x, own, f, weight, bias, scale = (leaf.detach().double().requires_grad_() for leaf in leaves)
    value = (x[INDICES] + own[ROWS] - (f @ weight.t() + bias) * scale[:, None]).tanh()
    expected = torch.zeros(3, 6, dtype=torch.float64).index_add(0, ROWS, value)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.05)
    y.double().sum().backward()
    expected.sum().backward()
    for leaf, reference in zip(trained, (x, own, weight, bias, scale), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=0.03, atol=0.1)


def test_without_sources():
    """Rows of destinations count next, then products; one dtype stays as it is."""
    _, own, f, weight, bias, scale = operands()
    with torch.autocast("cpu", torch.bfloat16):
        short = [own, f, weight.bfloat16()]
        (y,) = ops.segment(INDPTR, INDICES, short, "dst narrow_plain | add 0 1 -> mean 2", 1)
        assert y.dtype == own.dtype
        mixed = [f.bfloat16(), weight, bias, scale]
        (y,) = ops.segment(INDPTR, INDICES, mixed, "narrow scalar | mul 0 1 | total 2 -> edges 3", 2)
        assert y.dtype == torch.float32, "a number per edge is fp32"
        (alike,) = ops.segment(INDPTR, INDICES, [own, bias], "dst vector | mul 0 1 -> sum 2", 1)
        two = [torch.ones(6), torch.ones(5, dtype=torch.bfloat16)]
        (of_edges,) = ops.segment(INDPTR, INDICES, two, "vector scalar | mul 0 1 -> sum 2", 1)
    assert alike.dtype == of_edges.dtype == torch.float32


def test_float16_holds_no_more_than_pytorch_would_put_into_it():
    """Rows of fp16 times a large fp32 number per edge: an fp32 result, which fp16 could not hold on the way."""
    leaves = [torch.ones(4, 6).half().requires_grad_(), torch.full((5,), 1e5).requires_grad_()]
    with torch.autocast("cpu", torch.float16):
        (y,) = ops.segment(INDPTR, INDICES, leaves, "src scalar | mul 0 1 -> sum 2", 1)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.detach(), torch.tensor([2e5, 0, 3e5])[:, None].expand(3, 6))
    (y * 1e-4).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.float16, torch.float32]
    torch.testing.assert_close(leaves[0].grad[1], torch.full((6,), 20.0).half())
    torch.testing.assert_close(leaves[1].grad, torch.full((5,), 6e-4))
    with torch.autocast("cpu", torch.float16):
        (short,) = ops.segment(INDPTR, INDICES, leaves[:1], "src | mul 0 0 -> sum 1", 1)
        weights = [torch.ones(5, 2), torch.full((6, 2), 5e-4)]
        (product,) = ops.segment(INDPTR, INDICES, [leaves[0], *weights], "src narrow_plain | mul 0 1 -> sum 2", 1)
        (alike,) = ops.segment(INDPTR, INDICES, weights, "narrow_plain -> sum 0", 1)
    assert short.dtype == product.dtype == torch.float16, "PyTorch has nothing wider there"
    assert alike.dtype == torch.float32, "leaves of one dtype keep it"


@pytest.mark.parametrize("program", ["src | exp 0 -> sum 1", "src | total 0 -> edges 1", "src | mul 0 0 -> sum 1"])
def test_what_cuda_computes_in_float32(program):
    """``exp``, ``sum`` and ``pow`` there, whose square is a product here; not so on a CPU."""
    parsed = SegmentProgram.parse(program)
    found = [_result_dtype(parsed, [torch.ones(4, 6).half()], torch.float16, device) for device in ("cuda", "cpu")]
    assert found == [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", ["src edge | dot 0 1 -> softmax 2 1", "src edge | add 0 1 -> softmax 2 1"])
def test_the_only_edge_of_a_destination_leaves_its_score_without_gradient(dtype, program):
    """Its weight is 1 whatever the score is: what reaches the score is rounding of float32, not of 16 bits."""
    generator = torch.Generator().manual_seed(0)
    indptr, indices = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([2, 0, 1])
    rows, edge = (torch.randn(3, 6, generator=generator).to(dtype) for _ in range(2))
    rows.requires_grad_()
    y, *_ = ops.segment(indptr, indices, [rows, edge], program, 2)
    assert y.dtype == torch.float32
    (y * torch.randn(4, 6, generator=generator)).sum().backward()
    assert rows.grad.dtype == dtype and rows.grad.abs().max() < 1e-5
