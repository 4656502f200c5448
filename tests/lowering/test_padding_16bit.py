"""Reductions over many rows of 16-bit numbers: padded results are as near to float64 as PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .hostile import Traced, rows, sample

MANY, CAPACITY = 70_000, 70_020
"""More rows than the largest float16, and their bound."""

OVER_ROWS = {
    "mean": lambda x: x.mean(0),
    "mean of all": lambda x: x.mean(),
    "var": lambda x: x.var(0),
    "var of large": lambda x: (x * 200).std(0),
    "std": lambda x: x.std(),
    "sum": lambda x: (x - 0.5).sum(0),
    "norm": lambda x: x.norm(dim=0),
    "softmax": lambda x: x.softmax(0) * 1000,
    "logsumexp": lambda x: x.logsumexp(0),
    "max": lambda x: x.max(0)[0],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "x / n": lambda x: (x * 1000) / x.shape[0],
    "n / x": lambda x: x.shape[0] / (x + 60),
    "x * (1 / n)": lambda x: (x * 1000) * (1.0 / x.shape[0]),
    "x / sqrt(n)": lambda x: x / x.shape[0] ** 0.5,
    "x > n": lambda x: x + (x * 60000 > x.shape[0]),
    "where": lambda x: torch.where(x > 0.5, x, 1 / x.shape[0]),
    "mse": lambda x: F.mse_loss(x, x.square()),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.square()),
    "cross entropy": lambda x: F.cross_entropy(x, (x[:, 0] * 2).long()),
    "smoothing": lambda x: F.cross_entropy(x, (x[:, 0] * 2).long(), label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x, x.softmax(1)),
    "smooth l1": lambda x: F.smooth_l1_loss(x * 3, x.square()),
    "huber": lambda x: F.huber_loss(x * 3, x.square()),
    "l1": lambda x: F.l1_loss(x * 3, x.square()),
    "kl": lambda x: F.kl_div(x.log_softmax(1), x, reduction="batchmean"),
    "poisson": lambda x: F.poisson_nll_loss(x, x.square()),
    "soft margin": lambda x: F.soft_margin_loss(x, (x.detach() - 0.5).sign()),
    "cosine": lambda x: F.cosine_embedding_loss(x, x.square(), (x.detach()[:, 0] - 0.5).sign()),
    "by hand": lambda x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt(),
}


def values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(valid rows, valid rows and hostile ones)."""
    valid = (torch.rand(MANY, 2, generator=torch.Generator().manual_seed(3)) * 0.8 + 0.1).to(dtype)
    return valid, torch.cat([valid, torch.full((CAPACITY - MANY, 2), -6e4, dtype=dtype)])


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Everything in one graph."""
    return Traced(sample(lambda x: tuple(f(x) for f in OVER_ROWS.values()), rows(2)), CAPACITY)


def valid_part(output: Tensor, exact: Tensor) -> Tensor:
    """The rows of a padded output that the exact one has."""
    return output[:MANY] if exact.dim() and exact.shape[0] == MANY else output


def worse(name: str, ours: Tensor, exact: Tensor, reference: Tensor) -> list[str]:
    """A sentence if a result is further from float64 than PyTorch's (unless that overflows) and a rounding."""
    assert ours.dtype == exact.dtype, f"{name}: {ours.dtype}, expected {exact.dtype}"
    errors = [(value.double() - reference).abs().max().item() for value in (ours, exact)]
    allowed = 1.5 * errors[1] + 2 * torch.finfo(exact.dtype).eps * reference.abs().max().item()
    return (
        []
        if errors[0] <= allowed or not exact.isfinite().all()
        else [f"{name}: off by {errors[0]:.3g}, PyTorch by {errors[1]:.3g}"]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_rows(traced, dtype):
    """Values, and gradients of those whose gradients are no sums over few: none goes to a padded row."""
    valid, padded = (leaf.requires_grad_() for leaf in values(dtype))
    double = valid.detach().double().requires_grad_()
    wrong = []
    for (name, f), output in zip(OVER_ROWS.items(), traced.run([padded], MANY), strict=True):
        exact, reference = f(valid), f(double)
        ours = valid_part(output, exact)
        wrong += worse(name, ours, exact, reference)
        cotangent = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1)) * 64
        pairs = ((ours, padded), (exact, valid), (reference, double))
        grads = [
            torch.autograd.grad(value, leaf, cotangent.to(value.dtype), retain_graph=True)[0] for value, leaf in pairs
        ]
        assert not grads[0][MANY:].any(), f"{name}: padded rows get a gradient"
        wrong += worse(f"gradient of {name}", grads[0][:MANY], *grads[1:])
    assert not wrong, "\n".join(wrong)
