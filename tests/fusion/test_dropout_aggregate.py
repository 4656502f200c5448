"""ReLU, dropout and aggregation with one backward pass: where it fires, what stays the same, and when it must not."""

import torch
from lowering.harness import NUM_FEATURES, SEEDS, same

import joestar.nn as jnn

from .graphs import JOESTAR, captured, captured_each, count, only, reasons

PATTERN = "dropout-aggregate"
BASE = ("extract-select", "sample-gather-aggregate", "aggregate-update", "relu-dropout")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
OPTIONS = {"dropout": 0.5}


def sage(**options):
    torch.manual_seed(0)
    return jnn.GraphSAGE(NUM_FEATURES, 8, 3, 4, **{**OPTIONS, **options})


def test_before_and_after_and_same_numbers():
    on, off = captured_each(sage(), (3, 2, 2), disables=(ON, OFF))
    before, after = off.trace(), on.trace()
    for op, old, new in (("aggregate_cat", 2, 2), ("keyed_dropout", 2, 0), ("dropout_bits", 0, 2)):
        target = getattr(JOESTAR, op).default
        assert (count(before, target), count(after, target)) == (old, new), op
    assert_same(on, off)


def test_same_numbers_of_sums():
    assert_same(*captured_each(sage(aggr="sum"), (3, 2, 2), disables=(ON, OFF)))


def assert_same(on, off):
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_seeds_rows_of_every_layer_are_read_in_the_matrices():
    on, off = captured_each(sage(jk="cat"), (3, 2, 2), disables=(ON, OFF))
    assert count(on.trace(), JOESTAR.dropout_bits.default) == 2
    assert_same(on, off)


def test_must_not_fire():
    largest = captured(sage(aggr=["mean", "max"]), (3, 2, 2), disable=ON)
    assert count(largest.program.captured.gm, JOESTAR.dropout_bits.default) == 0
    assert "the activated rows have another reader" in reasons(largest, PATTERN)
    other = captured(sage(act="elu"), (3, 2, 2), disable=ON)
    assert set(reasons(other, PATTERN)) == {"the rows are not the result of ReLU and dropout"}


def test_the_op_and_its_gradient():
    """Against ReLU, mask and aggregation one after the other."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(6, 37, dtype=torch.float64, generator=random, requires_grad=True)
    bits = torch.randint(-(2**31), 2**31, (6, 2), generator=random, dtype=torch.int32)
    indptr, indices = torch.tensor([0, 2, 2, 5]), torch.tensor([4, 0, 3, 3, 5])
    weight = torch.randn(3, 74, dtype=torch.float64, generator=random)
    for reduce in ("sum", "mean"):
        both = JOESTAR.aggregate_cat(indptr, indices, x, bits, 2.5, reduce)
        y = JOESTAR.dropout_apply(x, bits, 0.6, True)
        expected = torch.cat([JOESTAR.spmm(indptr, indices, y, None, reduce), y[:3]], 1)
        torch.testing.assert_close(both, expected, rtol=1e-12, atol=1e-12)
        ours, theirs = (torch.autograd.grad((rows * weight).sum(), x)[0] for rows in (both, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
