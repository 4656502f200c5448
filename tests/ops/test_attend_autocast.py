"""Attention under autocast: scores stay in float32 beside rows of 16 bits, as PyTorch has them."""

import pytest
import torch

ops = torch.ops.joestar
INDPTR, INDICES = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 3, 1, 4])


def values(dtype: torch.dtype):
    """Scores of both ends beyond the range of float16, that differ by less than bfloat16 holds; rows of ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    near = torch.rand(5, 2, generator=generator)
    x = torch.randn(5, 2, 4, generator=generator).to(dtype)
    of_edges = torch.randn(5, 2, generator=generator).to(dtype)
    return [value.requires_grad_() for value in (near + 1e5, near[:3] * 2, x, of_edges)]


def stored(s_src, s_dst, x, s_edge):
    """The same by the ops that are fused."""
    z = ops.sddmm(INDPTR, INDICES, s_src, s_dst, "add") + s_edge
    alpha = ops.edge_softmax(INDPTR, torch.nn.functional.leaky_relu(z))
    return ops.spmm(INDPTR, INDICES, x, alpha, "sum")


def outcome(run, inputs):
    y = run(*inputs)
    weights = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_not_rounded(dtype):
    inputs = values(dtype)
    with torch.autocast("cpu", dtype):
        ours = outcome(lambda *args: ops.attend(INDPTR, INDICES, *args[:3], 0.01, None, 1.0, args[3])[0], inputs)
        plain = outcome(stored, inputs)
    exact = outcome(stored, [value.detach().double().requires_grad_() for value in inputs])
    unit = torch.finfo(dtype).eps
    for value, like, good in zip(ours, plain, exact, strict=True):
        assert value.dtype == like.dtype
        assert (value.double() - good).abs().max() <= 4 * unit * good.abs().max().clamp(min=1)
