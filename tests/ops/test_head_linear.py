"""A product per head: values, layouts, gradients, autocast and errors."""

import pytest
import torch

ops = torch.ops.joestar


def operands(rows=23, heads=3, width=5, columns=4, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, heads, width, generator=random, dtype=torch.float64).to(dtype)
    return x, torch.randn(heads, columns, width, generator=random, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(23, 3, 5, 4), (1, 1, 1, 1), (0, 2, 3, 4), (40, 4, 100, 32)], ids=str)
def test_values(shape):
    x, weight = operands(*shape)
    y = ops.head_linear(x, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.einsum("nhf,hcf->nhc", x, weight))
    grad = torch.randn_like(y)
    torch.testing.assert_close(
        ops.head_linear_weight_grad(x, grad), torch.einsum("nhc,nhf->hcf", grad, x)
    )  # fmt: skip


def test_gradients_and_registration():
    x, weight = (value.requires_grad_() for value in operands(6, 2, 3, 4))
    assert torch.autograd.gradcheck(ops.head_linear, (x, weight))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.head_linear, (x, weight), test_utils=checks)


def test_autocast():
    x, weight = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.head_linear(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), ops.head_linear(x, weight), rtol=5e-2, atol=1e-1)


def test_errors():
    x, weight = operands()
    with pytest.raises(ValueError, match=r"expected rows \[N, H, F\] and weights \[H, C, F\]; got \[23, 3, 5\]"):
        ops.head_linear(x, weight[:, :, :4])
    with pytest.raises(ValueError, match="one dtype"):
        ops.head_linear(x, weight.float())
