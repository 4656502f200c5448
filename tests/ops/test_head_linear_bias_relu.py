"""Products per head with an epilogue: against what they stand for, and as PyTorch wants ops to be."""

import pytest
import torch

ops = torch.ops.joestar


def operands(n=6, heads=2, width=5, columns=3):
    random = torch.Generator().manual_seed(0)
    shapes = ((n, heads, width), (heads, columns, width), (heads * columns,), (n, heads * columns))
    values = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]
    words = -(-heads * columns // 32)
    return *values, torch.randint(-(2**31), 2**31, (n, words), generator=random, dtype=torch.int32)


@pytest.mark.parametrize("scale", [1.0, 1.6])
def test_values_and_gradients(scale):
    """Against plain PyTorch, gradients by its autograd."""
    x, weight, bias, grad, bits = operands()
    column = torch.arange(6)
    factor = (((bits >> column) & 1) * scale).double() if scale != 1 else torch.ones(6, 6, dtype=torch.float64)
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    h = torch.einsum("nhf,hcf->nhc", leaves[0], leaves[1]).flatten(1)
    expected = torch.relu(h + leaves[2]) * factor
    y, kept = ops.head_linear_bias_relu(x, weight, bias, bits if scale != 1 else None, scale)
    torch.testing.assert_close(y, expected)
    expected.backward(grad)
    found = ops.head_linear_bias_relu_grad(grad, kept, scale, True, x, weight)
    for ours, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad)
    assert not ops.head_linear_bias_relu_grad(grad, kept, scale, False, x, weight)[2].numel()


def test_registration():
    x, weight, bias, grad, bits = operands()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.head_linear_bias_relu, (x, weight, bias, bits, 2.0), test_utils=checks)
    for biased in (False, True):
        args = (grad, bits, 2.0, biased, x, weight)
        torch.library.opcheck(ops.head_linear_bias_relu_grad, args, test_utils=checks)


def test_errors():
    x, weight, bias, grad, bits = operands()
    for other in (weight[:1], weight.float(), weight[:, :, :4], weight[0]):
        with pytest.raises(ValueError, match=r"head_linear_bias_relu: expected rows"):
            ops.head_linear_bias_relu(x, other, bias, bits, 1.0)
        with pytest.raises(ValueError, match=r"head_linear_bias_relu_grad: expected rows"):
            ops.head_linear_bias_relu_grad(grad, bits, 1.0, True, x, other)
