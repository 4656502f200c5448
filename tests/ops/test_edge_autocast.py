"""Edge programs under autocast: leaves of several dtypes, against the composed program in float64."""

import pytest
import torch

import joestar.ops  # noqa: F401

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
def test_sources_keep_their_dtype(src, dst):
    """Gradients come in the dtypes of the leaves."""
    leaves = operands(src, dst)
    trained = [leaves[i].requires_grad_() for i in (0, 1, 3, 4, 5)]
    program = "src dst narrow scalar | add 0 1 | mul 2 3 | sub 4 5 | tanh 6"
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.edge_map(INDPTR, INDICES, leaves, program, "sum")
    assert y.dtype == src
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
        assert (
            ops.edge_map(INDPTR, INDICES, [own, f, weight.bfloat16()], "dst narrow_plain | add 0 1", "mean").dtype
            == own.dtype
        )
        mixed = [f.bfloat16(), weight, bias, scale]
        assert ops.edge_map(INDPTR, INDICES, mixed, "narrow scalar | mul 0 1", "heads:2").dtype == torch.bfloat16
        alike = ops.edge_map(INDPTR, INDICES, [own, bias], "dst vector | mul 0 1", "sum")
    assert alike.dtype == torch.float32
