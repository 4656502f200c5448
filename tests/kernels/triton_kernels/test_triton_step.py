"""Kernels of a step besides its graph operations: batch, bookkeeping, optimizer, joined weights."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_mailbox
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.gpu_shuffle import shuffle_keys
from joestar.ops import hashing, reference
from joestar.ops import optimizer as kernels

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [5, 8, 1030])
def test_take_batch(ids, size):
    order = torch.arange(100, 123, dtype=ids)
    for step in range(5):  # of 17 seeds: full batches, a smaller one, none
        args = (order, torch.tensor([17, 5, 0]), torch.tensor([9, 4, step]), size)
        ours, expected = gpu.take_batch(*args), reference.take_batch(*args)
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1]), step
        assert ours[0].dtype == ids


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_finish_step(ok, dtype):
    def state():
        losses = torch.zeros(10, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
        return [torch.tensor([1, 2, 2]), torch.tensor(not ok), losses]

    rest = (torch.tensor([17, 5, 5]), torch.tensor(1.1, dtype=dtype), torch.tensor(ok))
    ours, expected = state(), state()
    gpu.finish_step(*ours, *rest)
    reference.finish_step(*expected, *rest)
    for value, good in zip(ours, expected, strict=True):
        assert torch.equal(value, good)
    assert int(ours[0][2]) == (3 if ok else 2)


@pytest.mark.parametrize("sets", [0, 3, 20])
def test_every_word_of_a_message_carries_its_number(sets):
    sequence, words = torch.tensor((1 << 20) - 2), torch.zeros(sets + 1, dtype=torch.int64)
    counts = torch.arange(5, 5 + sets) * 10**9
    for number, ok in (((1 << 20) - 1, True), (0, False), (1, True)):
        with gpu_mailbox.opened(sequence, words):
            gpu.overflow(list(counts), [count - (not ok) for count in counts.tolist()], torch.tensor(not ok))
        assert {word & 0xFFFFF for word in words.tolist()} == {number}
        assert [word >> 20 for word in words.tolist()] == [int(ok), *counts.tolist()]


@pytest.mark.parametrize("size", [0, 5, 1025])
@pytest.mark.parametrize("logged", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_own_words(size, logged, dtype):
    values = [torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.7), torch.tensor(float("nan"))][: 1 + logged]
    for ok, decisive, none in ((True, 0, 0.7), (True, 1, 0.0), (False, 0, 0.0), (False, 1, 0.1)):
        shares = torch.tensor([0.7, 0.1, 0.9, 0.0], dtype=torch.float64)[: 2 + logged]
        shares[decisive] = none
        found = []
        for module in (gpu, reference):
            gradients, words = torch.ones(size, dtype=dtype), torch.ones(2 + logged, dtype=dtype)
            module.own_words(gradients, words, values, shares, torch.tensor(ok), decisive)
            found.append(torch.cat([gradients, words]))
        assert torch.equal(*found) and not found[0].isnan().any()


def test_who_hears_is_told_once_and_posts_by_himself():
    sequence, words = torch.tensor(0), torch.zeros(3, dtype=torch.int64)
    told = []

    def hear(counts, ok):
        told.append((counts.tolist(), bool(ok)))
        with gpu_mailbox.opened(sequence, words):  # not heard again
            gpu.overflow(list(counts.unbind()), [9, 9], ok)

    with gpu_mailbox.heard(hear):
        counts, ok = gpu.overflow([torch.tensor(3), torch.tensor(4)], [9, 9], torch.tensor(False))
    gpu.overflow([torch.tensor(3), torch.tensor(4)], [9, 9], torch.tensor(False))
    assert told == [([3, 4], True)] and bool(ok) and counts.tolist() == [3, 4]
    assert [word >> 20 for word in words.tolist()] == [0, 3, 4] and int(sequence) == 1


def test_nothing_is_posted_while_somebody_hears():
    """Into a mailbox that is open already: the words of a step are posted once, those that he makes of it."""
    sequence, words = torch.tensor(0), torch.zeros(3, dtype=torch.int64)
    told = []
    with gpu_mailbox.opened(sequence, words), gpu_mailbox.heard(lambda counts, ok: told.append(counts.tolist())):
        gpu.overflow([torch.tensor(3), torch.tensor(4)], [9, 9], torch.tensor(False))
        assert told == [[3, 4]] and int(sequence) == 0 and not words.any()
    with gpu_mailbox.opened(sequence, words):
        gpu.overflow([torch.tensor(3), torch.tensor(4)], [9, 9], torch.tensor(False))
    assert len(told) == 1 and int(sequence) == 1 and [word >> 20 for word in words.tolist()] == [1, 3, 4]


@pytest.mark.parametrize("n", [1, 1000, 3000])
def test_shuffle_keys(n):
    key = torch.tensor([7, 3, 0])
    a, b = hashing.key_state(key, 0xFFFFFFFF)
    first, second = hashing.row_state((a, b), torch.arange(n))
    keys = shuffle_keys(torch.empty(n, dtype=torch.int64), int(a), int(b))
    assert torch.equal(keys, ((first >> 1) << 31) | (second >> 1))


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


def test_joined_columns_in_another_dtype():
    parts = [torch.randn(3, 4), torch.randn(3), torch.randn(5, 2)]
    joined = gpu.join_columns_all(parts, [2, 1], [8, 4], "float16")
    for ours, expected in zip(joined, reference.join_columns_all(parts, [2, 1], [8, 4], "float16"), strict=True):
        assert ours.dtype == torch.float16 and torch.equal(ours, expected)
    for ours, part in zip(gpu.split_columns_all(joined, [2, 1], [4, 0, 2], "float32"), parts, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, part.half().float())


def test_vectors_in_another_dtype_beside_joined_columns():
    """Each a matrix of one column."""
    parts = [torch.randn(3, 4), torch.randn(3), torch.randn(700), torch.randn(1)]
    joined = gpu.join_columns_all(parts, [2, 1, 1], [8, 1, 1], "float16")
    for ours, part in zip(joined[1:], parts[2:], strict=True):
        assert ours.shape == (part.shape[0], 1) and torch.equal(ours[:, 0], part.half())
    assert torch.equal(joined[0], reference.join_columns(parts[:2], 8).half())


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
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "maximize": (torch.optim.Adam, {"maximize": True}),
    "no memory": (torch.optim.Adam, {"betas": (0.0, 0.0)}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
}
SCHEDULES = {"lr": (1e-2, 3e-2, 1e-2, 0.0, 1e-3), "weight_decay": (0.1, 0.1, 0.0, 0.2, 0.0),
             "betas": ((0.9, 0.999), (0.8, 0.99), (0.95, 0.9), (0.9, 0.999), (0.7, 0.9)),
             "momentum": (0.9, 0.8, 0.7, 0.95, 0.5)}  # fmt: skip


@pytest.mark.parametrize(
    ("scheduled", "dtype"),
    [pytest.param(scheduled, dtype, marks=() if scheduled == (dtype is torch.float32) else pytest.mark.slow)
     for scheduled in (False, True) for dtype in (torch.float32, torch.float64)],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS.keys())
def test_optimizers_are_pytorchs_and_skip_where_a_step_overflowed(kind, options, scheduled, dtype):
    """With hyperparameters that change from step to step as well: they are read from the table on the device."""
    random = torch.Generator().manual_seed(0)
    shapes = [(5,), (1500,), *[(3, 2)] * 24]  # more parameters than one launch takes
    made = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    ours, theirs = ([p.clone().requires_grad_() for p in made] for _ in range(2))
    mine, other = (kind(weights, 1e-2, **options) for weights in (ours, theirs))
    for step in range(5):
        ok, grads = step != 2, [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
        for optimizer, weights in ((mine, ours), (other, theirs)):
            for name in ("lr", *options) if scheduled else ():
                if name in SCHEDULES:
                    optimizer.param_groups[0][name] = SCHEDULES[name][step]
            for parameter, grad in zip(weights, grads, strict=True):
                parameter.grad = grad.clone()
        kernels.allocate(mine)
        before = [p.detach().clone() for p in ours]
        table = torch.tensor([kernels.hyperparameters(mine, mine.param_groups[0])], dtype=torch.float64)
        with torch.no_grad():
            kernels.step(mine, table, torch.tensor(ok))
        if ok:
            other.step()
        else:
            assert all(torch.equal(p, old) for p, old in zip(ours, before, strict=True))
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for weight, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)
        for name, value in other.state[expected].items():
            if value is not None:
                torch.testing.assert_close(mine.state[weight][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (5, 1), (3000, 47), (700, 300), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_column_sums(rows, width, dtype):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = gpu.column_sums(x)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-1}[dtype]
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=tolerance, atol=tolerance)
    if dtype is torch.float16:  # not rounded
        wide = gpu.column_sums(x, "float32")
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
