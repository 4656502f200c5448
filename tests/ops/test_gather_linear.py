"""The product of gathered rows: against gather and product, in every dtype, with gradients, and under autocast."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from joestar.ops.dense import gather_linear as module
from joestar.ops.dense.gather_linear import NO_ROW

ops = torch.ops.joestar
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def operands(n=50, width=9, columns=5, dtype=torch.float64, ids=torch.int64):
    random = torch.Generator().manual_seed(0)
    table = torch.randn(30, width, generator=random, dtype=torch.float64).to(dtype)
    weight, bias = torch.randn(columns, width, generator=random), torch.randn(columns, generator=random)
    return table, torch.randint(0, 30, (n,), generator=random).to(ids), weight.to(dtype), bias.to(dtype)


def expected(table, ids, weight, bias):
    rows = table.double()[ids.long()]
    return F.linear(rows, weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values(dtype, ids):
    for n, width, columns in ((50, 9, 5), (1, 1, 1), (0, 4, 3), (7, 64, 40)):
        table, index, weight, bias = operands(n, width, columns, dtype, ids)
        for b in (bias, None):
            y = ops.gather_linear(table, index, weight, b)
            assert y.dtype == dtype and y.shape == (n, columns)
            tolerance = TOLERANCE[dtype] * 8
            torch.testing.assert_close(y.double(), expected(table, index, weight, b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_rows_of_zeros(dtype, ids, monkeypatch):
    """Of ``NO_ROW``, whatever the table holds: in the first block and in a later one, forward and in both gradients."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 64 * 9 * 8)
    table, index, weight, bias = operands(200, 9, 5, dtype, ids)
    index = torch.where((index == 0) | (torch.arange(200) % 7 == 3), NO_ROW, index).to(ids)
    rows = torch.where(index[:, None] < 0, 0, table.double()[index.clamp(min=0).long()])
    table[0] = table[-1] = torch.nan
    index[index == 29] = 5
    rows[index == 5] = table[5].double()
    tolerance = {"rtol": TOLERANCE[dtype] * 8, "atol": TOLERANCE[dtype] * 8}
    wanted = F.linear(rows, weight.double(), bias.double())
    torch.testing.assert_close(ops.gather_linear(table, index, weight, bias).double(), wanted, **tolerance)
    for y in ops.gather_linears(table, index, [weight, weight], [bias, bias]):
        torch.testing.assert_close(y.double(), wanted, **tolerance)
    grad = torch.ones(200, 5, dtype=dtype)
    for_weight, for_bias = ops.gather_linear_grad(table, index, [grad], 1)
    torch.testing.assert_close(for_weight.double(), rows.sum(0).expand(5, 9), rtol=0.05, atol=0.5)
    assert for_bias.tolist() == [200] * 5
    torch.testing.assert_close(
        ops.gather_linear(table, torch.full_like(index, NO_ROW), weight, bias), bias.expand(200, 5)
    )


@pytest.mark.parametrize("wrong", [-1, 30, -(2**30)])
def test_other_ids_that_are_no_row_are_an_error(wrong):
    """As of ``index_select``, forward and in the gradient: only one number stands for zeros."""
    table, index, weight, bias = operands()
    index[7] = wrong
    with pytest.raises((IndexError, RuntimeError), match="index"):
        ops.gather_linear(table, index, weight, bias)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        ops.gather_linear_grad(table, index, [torch.ones(50, 5, dtype=torch.float64)], 0)


def test_many_blocks(monkeypatch):
    """Rows are gathered block by block, the last one smaller."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 64 * 9 * 8)
    table, index, weight, bias = operands(64 * 3 + 17)
    grad = torch.randn(index.numel(), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(ops.gather_linear(table, index, weight, bias), expected(table, index, weight, bias))
    for_weight, for_bias = ops.gather_linear_grad(table, index, [grad], 1)
    torch.testing.assert_close(for_weight, grad.t() @ table[index])
    torch.testing.assert_close(for_bias, grad.sum(0))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_several_products(dtype, ids):
    table, index, weight, bias = operands(50, 9, 5, dtype, ids)
    weights, tolerance = [weight, weight * 2 - 1, -weight], TOLERANCE[dtype] * 8
    for biases in ([], [bias, bias + 1], [bias, -bias, bias * 3]):
        outs = ops.gather_linears(table, index, weights, biases)
        for y, w, b in itertools.zip_longest(outs, weights, biases):
            assert y.dtype == dtype and y.is_contiguous()
            torch.testing.assert_close(y.double(), expected(table, index, w, b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fixed", [(), (0,), (3,), (1, 2), (1, 2, 3, 4), (0, 1, 2, 3)], ids=str)
def test_gradients_of_several(fixed):
    """Of all that need them: three weights and two biases, some without."""
    table, index, weight, bias = operands(12, 4, 3)
    parts = [weight, weight + 1, weight * 2, bias, bias - 1]
    parts = [part.clone().requires_grad_(i not in fixed) for i, part in enumerate(parts)]
    used = 1 if fixed == (1, 2) else 3  # the others have a gradient of zero
    call = lambda *p: tuple(ops.gather_linears(table, index, list(p[:3]), list(p[3:]))[:used])  # noqa: E731
    assert torch.autograd.gradcheck(call, parts)


def test_gradients():
    table, index, weight, bias = operands(12, 4, 3)
    weight.requires_grad_()
    bias.requires_grad_()
    assert torch.autograd.gradcheck(lambda w, b: ops.gather_linear(table, index, w, b), (weight, bias))
    assert torch.autograd.gradcheck(lambda w: ops.gather_linear(table, index, w, None), (weight,))


def test_registration():
    table, index, weight, bias = operands(12, 4, 3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.gather_linear, (table, index, weight.requires_grad_(), bias), test_utils=checks)
    torch.library.opcheck(
        ops.gather_linears, (table, index, [weight, weight], [bias.requires_grad_()]), test_utils=checks
    )
    grads = [torch.ones(12, 3, dtype=torch.float64)] * 2
    torch.library.opcheck(
        ops.gather_linear_grad, (table, index, grads, 1), test_utils=("test_schema", "test_faketensor")
    )
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value.detach()) for value in (table, index, weight, bias)]
    with mode:
        assert ops.gather_linear(*fakes).shape == (12, 3)


def test_the_table_has_no_gradient():
    table, index, weight, bias = operands()
    with pytest.raises(RuntimeError, match="gather_linear has no gradient for its table; gather with index_select"):
        ops.gather_linear(table.requires_grad_(), index, weight, bias)


def test_autocast_casts_rows_as_they_are_read():
    """As ``linear``: bfloat16 out; the table itself is never converted."""
    table, index, weight, bias = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.gather_linear(table, index, weight.requires_grad_(), bias)
        reference = F.linear(table[index], weight, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, reference, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        outs = ops.gather_linears(table, index, [weight, weight], [bias.requires_grad_()])
    assert [out.dtype for out in outs] == [torch.bfloat16] * 2 and torch.equal(outs[0], y)
    sum(out.float().sum() for out in outs).backward()
    assert bias.grad.dtype == torch.float32


def test_errors():
    table, index, weight, bias = operands()
    for weights, biases in (
        ([], []),
        ([weight], [bias, bias]),
        ([weight, weight[:4]], []),
        ([weight, weight.float()], []),
    ):
        with pytest.raises(ValueError, match="gather_linears: expected weights of one shape and dtype, and no more"):
            ops.gather_linears(table, index, weights, biases)
    for arguments, words in (
        ((table, index, weight[:, :4], bias), r"expected a table \[N, F\], ids \[n\] and a weight \[C, F\]; got"),
        ((table, index, weight, bias[:3]), r"expected a bias \[5\] in the weight's dtype torch.float64; got \[3\]"),
        ((table, index, weight, bias.float()), "in torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.gather_linear(*arguments)
