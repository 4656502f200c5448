"""Products with an epilogue: values, what they are made of, registration and errors."""

import pytest
import torch

ops = torch.ops.joestar


def operands(rows=9, width=5, columns=40, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=random).to(dtype) for shape in ((rows, width), (width, columns)))
    bits = torch.randint(-(2**31), 2**31, (rows, -(-columns // 32)), generator=random, dtype=torch.int32)
    return x, weight, torch.randn(columns, generator=random).to(dtype), bits


@pytest.mark.parametrize("shape", [(9, 5, 40), (0, 3, 2), (1, 1, 1), (70, 100, 128), (5, 4, 300)], ids=str)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_values(shape, dropout, biased):
    x, weight, bias, bits = operands(*shape)
    bits, scale = (bits, 2.0) if dropout else (None, 1.0)
    turned = weight.t().contiguous().t()
    expected = torch.relu(x @ weight + (bias if biased else 0))
    for w in (weight, turned):
        y, kept = ops.mm_bias_relu(x, w, bias if biased else None, bits, scale)
        drop = torch.ones_like(y) if bits is None else ops.dropout_apply(torch.ones_like(y), bits, 0.0, False)
        torch.testing.assert_close(y, expected * drop * scale)
        assert torch.equal(ops.dropout_apply(torch.ones_like(y), kept, 0.0, False), (y > 0).double())
        grad = torch.randn(x.shape[0], 7, dtype=x.dtype)
        back = torch.randn(7, shape[2], dtype=x.dtype)
        rows, sums = ops.mm_bias_relu_grad(grad, back, kept, scale, biased)
        masked = grad @ back * scale * (y > 0)
        torch.testing.assert_close(rows, masked)
        torch.testing.assert_close(sums, masked.sum(0) if biased else masked.new_empty(0))


def test_registration():
    x, weight, bias, bits = operands()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.mm_bias_relu, (x, weight, bias, bits, 2.0), test_utils=checks)
    for biased in (False, True):
        torch.library.opcheck(ops.mm_bias_relu_grad, (x, weight, bits, 2.0, biased), test_utils=checks)


def test_errors():
    x, weight, bias, bits = operands()
    with pytest.raises(ValueError, match=r"expected rows \[n, F\] and a weight \[F, D\] .* \[9, 5\] and .* \[4, 40\]"):
        ops.mm_bias_relu(x, weight[:4], bias, bits, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        ops.mm_bias_relu_grad(x, weight.float(), bits, 1.0, True)
