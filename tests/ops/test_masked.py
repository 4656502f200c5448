"""Reductions over padded dimensions against plain PyTorch on the valid prefix."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from .database import FLOATS, values

ops = torch.ops.joestar
GARBAGE = 1e4
"""What padded slots hold: finite, as the conventions demand, and large enough to show."""


def _padded(valid, dim: int, extra: int):
    """``valid`` with ``extra`` slices of garbage along ``dim``, and its count."""
    shape = list(valid.shape)
    shape[dim] = extra
    return torch.cat([valid, valid.new_full(shape, GARBAGE)], dim), torch.tensor(valid.shape[dim])


@pytest.mark.parametrize("extra", [0, 1, 7])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_mask_rows(dim, extra):
    for dtype, value in (
        (torch.float32, 0),
        (torch.float64, -float("inf")),
        (torch.bfloat16, 0.5),
        (torch.int64, -100),
    ):
        valid = (values((3, 4, 5), torch.float64, 1) * 9).to(dtype)
        x, count = _padded(valid, dim, extra)
        out = ops.mask_rows(x, count, dim, value)
        size = valid.shape[dim]
        assert out.dtype == dtype
        assert torch.equal(out.narrow(dim, 0, size), valid)
        assert (out.narrow(dim, size, extra) == value).all()


def test_mask_rows_of_nothing_and_of_nan():
    x = torch.full((3, 2), float("nan"))
    assert torch.equal(ops.mask_rows(x, torch.tensor(0), 0, 1.0), torch.ones(3, 2))
    assert torch.equal(ops.mask_rows(x, torch.tensor(5), 0, 1.0).isnan(), torch.ones(3, 2, dtype=torch.bool))
    assert ops.mask_rows(x[:0], torch.tensor(0), 0, 1.0).shape == (0, 2)
    leaf = torch.ones(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((ops.mask_rows(leaf, torch.tensor(2), 0, 0) * torch.tensor([[2.0, 3.0]])).sum(), leaf)
    assert grad.tolist() == [[2.0, 3.0], [2.0, 3.0], [0.0, 0.0]]


@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("dim", "dims"), [(0, [0]), (0, [0, 1]), (0, [1, 0]), (1, [1]), (1, [0, 1, 2]), (2, [2, 0])])
def test_mean_and_variance(dim, dims, keepdim, extra):
    valid = values((6, 4, 5), torch.float64, 1).requires_grad_()
    padded, count = _padded(valid, dim, extra)
    results = [(ops.masked_mean(padded, count, dim, dims, keepdim), valid.mean(dims, keepdim=keepdim))]
    for correction in (0.0, 1.0, 2.0):
        ours = ops.masked_var(padded, count, dim, dims, correction, keepdim)
        results.append((ours, valid.var(dims, correction=correction, keepdim=keepdim)))
    for ours, expected in results:
        assert_close(ours, expected)
        cotangent = values(tuple(ours.shape), torch.float64, 2)
        grads = [torch.autograd.grad(out, valid, cotangent, retain_graph=True)[0] for out in (ours, expected)]
        assert_close(*grads)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_keep_the_dtype(dtype):
    x, count = _padded(values((9, 3), dtype, 1), 0, 3)
    for ours, expected in (
        (ops.masked_mean(x, count, 0, [0], False), x[:9].double().mean(0)),
        (ops.masked_var(x, count, 0, [0], 1.0, False), x[:9].double().var(0)),
    ):
        assert ours.dtype == dtype
        assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("extra", [0, 1, 6])
@pytest.mark.parametrize("rows", [2, 7])
def test_batch_norm(rows, extra, affine):
    valid = values((rows, 3), torch.float64, 1).mul(3).add(1).requires_grad_()
    weight = values((3,), torch.float64, 2).requires_grad_() if affine else None
    bias = values((3,), torch.float64, 3).requires_grad_() if affine else None
    x, count = _padded(valid, 0, extra)
    y, mean, var = ops.masked_batch_norm(x, weight, bias, count, 1e-3)
    running = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    expected = F.batch_norm(valid, *running, weight, bias, training=True, momentum=1.0, eps=1e-3)
    assert_close(y[:rows], expected)
    assert_close(mean, running[0])
    assert_close(var, running[1])
    assert not mean.requires_grad
    assert not var.requires_grad
    assert torch.isfinite(y).all()
    leaves = [leaf for leaf in (valid, weight, bias) if leaf is not None]
    cotangent = values((rows, 3), torch.float64, 4)
    ours = torch.autograd.grad((y[:rows] * cotangent).sum(), leaves)
    assert_close(ours, torch.autograd.grad((expected * cotangent).sum(), leaves))


def test_batch_norm_of_one_row_is_finite():
    x, count = _padded(torch.tensor([[2.0, 3.0]]), 0, 2)
    y, mean, var = ops.masked_batch_norm(x, None, torch.tensor([0.5, 0.25]), count, 1e-5)
    assert y[0].tolist() == [0.5, 0.25]
    assert mean.tolist() == [2.0, 3.0]
    assert var.isnan().all(), "one row has no variance"


@pytest.mark.parametrize(("rows", "moved"), [(0, (False, False)), (1, (True, False)), (2, (True, True))])
def test_running_statistics_skip_what_a_batch_has_not(rows, moved):
    x, count = _padded(torch.tensor([[2.0, 3.0], [4.0, 7.0]])[:rows], 0, 2)
    _, *statistics = ops.masked_batch_norm(x, None, None, count, 1e-5)
    for statistic, least, moves in zip(statistics, (1, 2), moved, strict=True):
        buffer = torch.tensor([0.5, 0.25])
        after = ops.running_average(buffer, statistic, 0.5, count, least)
        assert torch.isfinite(after).all()
        assert_close(after, torch.lerp(buffer, statistic, 0.5) if moves else buffer)


def test_padded_rows_get_no_gradient_from_a_batch_norm():
    x = values((6, 2), torch.float64, 1).requires_grad_()
    y, _, _ = ops.masked_batch_norm(x, None, None, torch.tensor(4), 1e-5)
    (grad,) = torch.autograd.grad((y[:4] ** 3).sum(), x)
    assert (grad[4:] == 0).all()
    assert grad[:4].abs().sum() > 0


@pytest.mark.parametrize(
    ("counts", "ok"), [([3, 0, 9], True), ([3, 1, 9], False), ([4, 0, 9], False), ([0, 0, 10], False)]
)
def test_overflow(counts, ok):
    bounds = [3, 0, 9]
    given = [torch.tensor(count) for count in counts]
    for flag in (False, True):
        stacked, fits = ops.overflow(given, bounds, torch.tensor(flag))
        assert stacked.dtype == torch.int64
        assert stacked.tolist() == counts
        assert fits.dtype == torch.bool
        assert fits.shape == ()
        assert fits.item() is (ok and not flag)


def test_overflow_of_nothing():
    for flag in (False, True):
        stacked, fits = ops.overflow([], [], torch.tensor(flag))
        assert stacked.shape == (0,)
        assert fits.item() is (not flag)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("x", "bias"), ("x", "weight", "bias")], ids=str)
@pytest.mark.parametrize("vectors", ["", "weight", "bias", "weight bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_rows(dtype, vectors, wanted):
    """Results and gradients of the composition, which autograd differentiates; nothing behind the count is read."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {"x": values((13, 3), dtype, 1).mul(3).add(1)}
    given |= {name: values((3,), wide, seed) for seed, name in enumerate(vectors.split(), 2)}
    count, cotangent = torch.tensor(7), values((13, 3), dtype, 4, 7)
    leaves = [given[name].requires_grad_() for name in wanted if name in given]
    arguments = (given["x"], given.get("weight"), given.get("bias"), count, 1e-3)
    found, expected = ops.batch_norm_rows(*arguments), ops.masked_batch_norm(*arguments)
    exact = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[:3], expected, **exact)
    torch.testing.assert_close(found[3], (expected[2] * 6 / 7 + 1e-3).rsqrt())
    assert not any(statistic.requires_grad for statistic in found[1:])
    if not leaves:
        assert not found[0].requires_grad
        return
    behind = given["x"].data[7:]  # what the gradient must not read
    kept = behind.clone()
    behind.fill_(torch.nan)
    ours = torch.autograd.grad(found[0], leaves, cotangent)
    behind.copy_(kept)
    theirs = torch.autograd.grad(expected[0], leaves, cotangent.nan_to_num())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, **exact)


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_norm_rows_of_few(rows):
    """One row is normalised to the bias, and has no variance; none leave 0."""
    x, count = _padded(torch.tensor([[2.0, 3.0]])[:rows], 0, 2)
    for found, expected in zip(
        ops.batch_norm_rows(x, None, torch.tensor([0.5, 0.25]), count, 1e-5),
        ops.masked_batch_norm(x, None, torch.tensor([0.5, 0.25]), count, 1e-5), strict=False,
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, equal_nan=True)
