"""Ops that a pass puts in the place of small products and copies: values, registration and errors."""

import pytest
import torch

ops = torch.ops.joestar


def operands(rows=9, width=5, columns=47, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (width, columns), (columns,))
    return [torch.randn(*shape, generator=random).to(dtype) for shape in shapes]


@pytest.mark.parametrize("shape", [(9, 5, 47), (0, 3, 2), (1, 1, 1), (4, 0, 3), (5, 4, 300)], ids=str)
def test_products(shape):
    x, weight, bias = operands(*shape)
    for w in (weight, weight.t().contiguous().t()):
        torch.testing.assert_close(ops.mm_unaligned(x, w, None), x @ weight)
        torch.testing.assert_close(ops.mm_unaligned(x, w, bias), x @ weight + bias)


def test_turned_matrices():
    matrices = [torch.randn(*shape) for shape in ((3, 5), (0, 2), (1, 1))]
    for turned, matrix in zip(ops.turn_all(matrices), matrices, strict=True):
        assert torch.equal(turned, matrix.t()) and turned.is_contiguous()
        assert turned.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr() or not turned.numel()


def test_registration():
    x, weight, bias = operands()
    checks = ("test_schema", "test_faketensor")
    for added in (None, bias):
        torch.library.opcheck(ops.mm_unaligned, (x, weight, added), test_utils=checks)
    torch.library.opcheck(ops.turn_all, ([x, weight],), test_utils=checks)


def test_errors():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"expected rows \[n, F\] and a weight \[F, D\] .* \[9, 5\] and .* \[4, 47\]"):
        ops.mm_unaligned(x, weight[:4], bias)
    with pytest.raises(ValueError, match="one dtype"):
        ops.mm_unaligned(x, weight.float(), None)
