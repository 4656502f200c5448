"""What a step does besides the program, by definition: its batch, its bookkeeping, joined weights."""

import pytest
import torch

ops = torch.ops.joestar


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_take_batch(ids):
    order = torch.arange(100, 123, dtype=ids)  # of these, 17 belong to this epoch
    for step, seeds, count in (
        (0, [100, 101, 102, 103, 104], 5),
        (2, [110, 111, 112, 113, 114], 5),
        (3, [115, 116], 2),
    ):
        taken, number = ops.take_batch(order, torch.tensor([17, 5, 0]), torch.tensor([9, 4, step]), 8)
        assert taken.tolist() == seeds + [seeds[0]] * (8 - len(seeds)) and number.item() == count
        assert taken.dtype == ids and number.dtype == torch.int64


def test_take_batch_beyond_the_end_is_empty():
    taken, number = ops.take_batch(torch.arange(7), torch.tensor([7, 5, 0]), torch.tensor([0, 0, 3]), 5)
    assert number.item() == 0 and set(taken.tolist()) <= set(range(7))


@pytest.mark.parametrize("decisive", [0, 1, 3])
@pytest.mark.parametrize("ok", [False, True])
def test_own_words(ok, decisive):
    """A value that does not count is 0, also if it is none; others are weighted."""
    gradients, words = torch.tensor([1.0, float("nan")]), torch.full((4,), 7.0)
    values = [torch.tensor(3.0), torch.tensor(5.0, dtype=torch.float64), torch.tensor(float("inf"))]
    shares = torch.tensor([0.5, 9.0, 0.25, 0.0], dtype=torch.float64)
    ops.own_words(gradients, words, values, shares, torch.tensor(ok), decisive)
    assert words.tolist() == [1.5, 1.25, 0.0, 1.0 - ok]
    assert gradients.tolist() == [0.0, 0.0] if decisive == 3 else gradients[0] == 1 and gradients[1].isnan()


def _finish(ok, flag=False, step=2):
    state = {"key": torch.tensor([1, 2, step]), "flag": torch.tensor(flag), "losses": torch.zeros(10)}
    ops.finish_step(*state.values(), torch.tensor([17, 5, 5]), torch.tensor(1.5), torch.tensor(ok))
    return state


def test_finish_step_that_went_well():
    state = _finish(True)
    assert state["key"].tolist() == [1, 2, 3] and not state["flag"]
    assert state["losses"].tolist() == [0.0] * 7 + [1.5, 0.0, 0.0], "loss of step 2 of a run whose losses begin at 5"


def test_finish_step_that_overflowed_changes_nothing_but_the_flag():
    state = _finish(False)
    assert state["key"].tolist() == [1, 2, 2] and bool(state["flag"])
    assert not state["losses"].any()


def test_overflow():
    counts = [torch.tensor(3), torch.tensor(9)]
    for bounds, flag, expected in (
        ([3, 9], False, True),
        ([3, 8], False, False),
        ([2, 9], False, False),
        ([3, 9], True, False),
    ):
        stacked, ok = ops.overflow(counts, bounds, torch.tensor(flag))
        assert stacked.tolist() == [3, 9] and ok.item() is expected
    assert ops.overflow([], [], torch.tensor(False))[1].item() is True


JOINS = [2, 1, 3], [8, 3, 4]
"""Numbers of parts and of columns."""


def _parts(**options):
    random = torch.Generator().manual_seed(0)
    shapes = (4, 3), (4,), (5, 3), (2,), (2, 1), (2, 1)
    return [torch.randn(shape, dtype=torch.float64, generator=random, **options) for shape in shapes]


def test_all_joined_columns():
    parts, (counts, widths) = _parts(), JOINS
    joined = ops.join_columns_all(parts, counts, widths)
    alone = [ops.join_columns(parts[:2], 8), ops.join_columns(parts[2:3], 3), ops.join_columns(parts[3:], 4)]
    assert all(torch.equal(ours, expected) for ours, expected in zip(joined, alone, strict=True))
    split = ops.split_columns_all(joined, counts, [3, 0, 3, 0, 1, 1])
    assert all(torch.equal(ours, part) and ours.is_contiguous() for ours, part in zip(split, parts, strict=True))


def test_gradients_of_all_joined_columns():
    parts, (counts, widths) = _parts(requires_grad=True), JOINS
    assert torch.autograd.gradcheck(lambda *p: [m.sin() for m in ops.join_columns_all(list(p), counts, widths)], parts)
    torch.library.opcheck(ops.join_columns_all, (parts, counts, widths))


def test_a_joined_matrix_that_nobody_reads():
    parts, (counts, widths) = _parts(requires_grad=True), JOINS
    first, _, last = ops.join_columns_all(parts, counts, widths)
    grads = torch.autograd.grad((2 * first).sum() + last.sum(), parts)
    for part, grad, factor in zip(parts, grads, (2, 2, 0, 1, 1, 1), strict=True):
        assert torch.equal(grad, torch.full_like(part, factor))


def test_joined_columns_and_their_gradient():
    parts = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 2, dtype=torch.float64),
             torch.randn(4, dtype=torch.float64, requires_grad=True)]  # fmt: skip
    joined = ops.join_columns(parts, 8)
    assert torch.equal(joined, torch.cat([parts[0], parts[1], parts[2][:, None], torch.zeros(4, 2)], 1))
    assert torch.autograd.gradcheck(lambda a, b: ops.join_columns([a, parts[1], b], 8).sin(), (parts[0], parts[2]))
    split = ops.split_columns(joined, [3, 2, 0])
    for part, expected in zip(split, parts, strict=True):
        assert torch.equal(part, expected) and part.is_contiguous()


def test_joined_columns_in_another_dtype():
    parts = [torch.randn(4, 3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    joined = ops.join_columns_all(parts, [1, 1], [4, 4], "bfloat16")
    for ours, part in zip(joined, parts, strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours[:, : part.shape[1]], part.bfloat16())
    grads = torch.autograd.grad([matrix.float().square().sum() for matrix in joined], parts)
    for grad, part in zip(grads, parts, strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, 2 * part.bfloat16().float())
    checks = ("test_schema", "test_faketensor")
    detached = [part.detach() for part in parts]
    torch.library.opcheck(ops.join_columns_all, (detached, [1, 1], [4, 4], "bfloat16"), test_utils=checks)
    split = ([matrix.detach() for matrix in joined], [1, 1], [3, 2], "float32")
    torch.library.opcheck(ops.split_columns_all, split, test_utils=checks)


def test_added_bias():
    x, bias = torch.randn(7, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(ops.add_bias(x, bias), x + bias)
    torch.testing.assert_close(ops.column_sums(x), x.sum(0))
    assert torch.autograd.gradcheck(ops.add_bias, (x.requires_grad_(), bias.requires_grad_()))
    torch.library.opcheck(ops.add_bias, (x, bias))
    torch.library.opcheck(ops.column_sums, (x.detach(),))
    half = x.detach().bfloat16()
    torch.library.opcheck(ops.column_sums, (half, "float32"))
    assert torch.equal(ops.column_sums(half, "float32"), half.float().sum(0))
