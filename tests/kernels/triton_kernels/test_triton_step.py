"""Kernels of a step besides its graph operations: batch, bookkeeping, optimizer, joined weights."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu
from joestar.kernels.gpu_adam import adam
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [5, 8, 1030])
def test_take_batch(ids, size):
    order = torch.arange(100, 123, dtype=ids)
    for step in range(5):  # of 17 seeds: full batches, a smaller one, none
        args = (order, torch.tensor(17), torch.tensor([9, 4, step]), 5, size)
        ours, expected = gpu.take_batch(*args), reference.take_batch(*args)
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1]), step
        assert ours[0].dtype == ids


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("sets", [0, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finish_step(ok, sets, dtype):
    def state():
        return [
            torch.tensor([1, 2, 2]), torch.tensor(not ok), torch.zeros(10), torch.full((4, sets), -1),
            torch.zeros(2, dtype=torch.int64),
        ]  # fmt: skip

    rest = (torch.tensor(5), torch.tensor(1.5, dtype=dtype), torch.tensor(ok), torch.arange(30, 30 + sets))
    ours, expected = state(), state()
    gpu.finish_step(*ours, *rest)
    reference.finish_step(*expected, *rest)
    for value, good in zip(ours, expected, strict=True):
        assert torch.equal(value, good)
    assert int(ours[0][2]) == (3 if ok else 2)


def test_overflow():
    counts = [torch.tensor(3), torch.tensor(9)]
    for bounds in ([3, 9], [3, 8], [2, 9]):
        for flag in (False, True):
            ours, ok = gpu.overflow(counts, bounds, torch.tensor(flag))
            expected, good = reference.overflow(counts, bounds, torch.tensor(flag))
            assert torch.equal(ours, expected) and torch.equal(ok, good)


def test_split_columns():
    joined = torch.randn(7, 40)
    for ours, expected in zip(
        gpu.split_columns(joined, [18, 18, 0]), reference.split_columns(joined, [18, 18, 0]), strict=True
    ):
        assert torch.equal(ours, expected) and ours.is_contiguous()


def test_all_joined_columns():
    """Three matrices of several blocks, of a few numbers, and of none; more parts than one launch takes."""
    parts = [torch.randn(shape) for shape in ((40, 30), (40, 30), (40,), (3, 2), (0, 4), *[(5,)] * 34)]
    counts, widths = [3, 1, 1, 20, 14], [64, 2, 4, 21, 14]
    joined = gpu.join_columns_all(parts, counts, widths)
    for ours, expected in zip(joined, reference.join_columns_all(parts, counts, widths), strict=True):
        assert torch.equal(ours, expected)
    split = gpu.split_columns_all(joined, counts, [30, 30, 0, 2, 4, *[0] * 34])
    assert all(torch.equal(ours, part) and ours.is_contiguous() for ours, part in zip(split, parts, strict=True))


def test_joined_columns_of_another_layout_or_dtype():
    part = torch.randn(4, 6, dtype=torch.bfloat16)
    (joined,) = gpu.join_columns_all([part.T, part[:, 0].repeat(2)[:6]], [2], [8])
    assert torch.equal(joined, reference.join_columns([part.T, part[:, 0].repeat(2)[:6]], 8))
    with pytest.raises(ValueError, match="parts of one dtype and number of rows"):
        gpu.join_columns_all([part, part.float()], [2], [12])


SETTINGS = {
    "adam": (torch.optim.Adam, {}),
    "adam with decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-6}),
    "maximize": (torch.optim.Adam, {"maximize": True}),
}


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS.keys())
def test_adam_is_pytorchs_and_skips_where_a_step_overflowed(kind, options):
    random = torch.Generator().manual_seed(0)
    shapes = [(5,), (1500,), *[(3, 2)] * 30]  # more parameters than one launch takes
    ours = [torch.randn(shape, generator=random) for shape in shapes]
    theirs = [p.clone().requires_grad_() for p in ours]
    optimizer = kind(theirs, 1e-2, **options)
    group = optimizer.param_groups[0]
    averages, squares = ([torch.zeros_like(p) for p in ours] for _ in range(2))
    steps = [torch.zeros(()) for _ in ours]
    for step in range(5):
        ok, grads = step != 2, [torch.randn(shape, generator=random) for shape in shapes]
        before = [p.clone() for p in ours]
        adam(
            ours, grads, averages, squares, steps, torch.tensor(1e-2), torch.tensor(ok), betas=group["betas"],
            eps=group["eps"], weight_decay=group["weight_decay"], decoupled=kind is torch.optim.AdamW,
            maximize=group["maximize"],
        )  # fmt: skip
        if not ok:
            assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))
            continue
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)
    assert {step.item() for step in steps} == {4.0}


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (5, 1), (3000, 47), (700, 300), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_column_sums(rows, width, dtype):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = gpu.column_sums(x)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-1}[dtype]
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=tolerance, atol=tolerance)
