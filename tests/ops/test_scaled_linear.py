"""Products of the same rows under factors: values, groups of rows, gradients, autocast and errors."""

import pytest
import torch

from joestar.ops.dense import scaled_linear as file

ops = torch.ops.joestar


def operands(rows=200, few=5, width=7, columns=3, scales=3, dtype=torch.float64):
    """With ``few`` different rows of factors; as many as there are rows for 0."""
    random = torch.Generator().manual_seed(0)
    x, factors = torch.randn(rows, width, generator=random).double(), torch.randn(rows, scales, generator=random)
    if few:
        factors = factors[:few][torch.randint(0, few, (rows,), generator=random)]
    weight = torch.randn(scales, columns, width, generator=random).double()
    return x.to(dtype), factors.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("few", [1, 5, 13, 0])
@pytest.mark.parametrize("shape", [(7, 3, 3), (1, 1, 1), (300, 2, 2)], ids=str)
def test_values(few, shape):
    x, factors, weight = operands(1000, few, *shape)
    assert (file._groups(factors) is None) == (few == 0)
    y = ops.scaled_linear(x, factors, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.einsum("nj,jck,nk->nc", factors, weight, x))
    grad = torch.randn_like(y)
    got = ops.scaled_linear_weight_grad(x, factors, grad)
    torch.testing.assert_close(got, torch.einsum("nj,nc,nk->jck", factors, grad, x))


def test_blocks_of_a_group(monkeypatch):
    """More rows of a group than are gathered at a time."""
    monkeypatch.setattr(file, "BLOCK_BYTES", 1)
    test_values(2, (7, 3, 3))


@pytest.mark.parametrize("rows", [0, 1, 15, 16])
def test_few_rows(rows):
    x, factors, weight = operands(rows, min(rows, 1))
    assert (file._groups(factors) is None) == (rows < 16)
    torch.testing.assert_close(
        ops.scaled_linear(x, factors, weight), torch.einsum("nj,jck,nk->nc", factors, weight, x)
    )  # fmt: skip


def test_hashes_that_meet(monkeypatch):
    monkeypatch.setattr(file, "_MIXED", 0)
    x, factors, weight = operands()
    assert file._groups(factors) is None
    torch.testing.assert_close(ops.scaled_linear(x, factors, weight), torch.einsum("nj,jck,nk->nc", factors, weight, x))


def test_zeros_and_nan_of_factors():
    """0 and -0 are two groups with the same result; rows without a NaN get none."""
    x, factors, weight = operands()
    factors[::2, 0], factors[1::2, 0], factors[:20, 1] = 0.0, -0.0, torch.nan
    y = ops.scaled_linear(x, factors, weight)
    assert y[:20].isnan().all()
    torch.testing.assert_close(y[20:], torch.einsum("nj,jck,nk->nc", factors, weight, x)[20:])


@pytest.mark.parametrize("few", [2, 0])
def test_gradients_and_registration(few):
    args = tuple(value.requires_grad_() for value in operands(33, few, 3, 2))
    assert torch.autograd.gradcheck(ops.scaled_linear, args)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.scaled_linear, args, test_utils=checks)


def test_float32_is_as_exact_as_pytorch():
    exact = torch.einsum("nj,jck,nk->nc", *(operands()[i] for i in (1, 2, 0)))
    args = operands(dtype=torch.float32)
    plain = (file.scaled_linear(*args) - exact).abs().max()
    assert (ops.scaled_linear(*args) - exact).abs().max() <= 2 * plain


def test_autocast():
    args = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.scaled_linear(*args)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), ops.scaled_linear(*args), rtol=5e-2, atol=2e-1)


def test_errors():
    x, factors, weight = operands()
    with pytest.raises(
        ValueError, match=r"expected rows \[n, K\], factors \[n, m\] and weights \[m, C, K\]; got \[200, 7\]"
    ):
        ops.scaled_linear(x, factors[:, :2], weight)
    with pytest.raises(ValueError, match="one dtype"):
        ops.scaled_linear(x, factors.float(), weight)
