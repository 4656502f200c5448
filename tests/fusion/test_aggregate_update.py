"""One GEMM for neighbours' and own rows: where it fires, what stays the same, and every reason not to."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, count, mean, only, reasons
from .together import captured_together

PATTERN = "aggregate-update"
BASE = ("extract-select", "sample-gather-aggregate")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
WIDTH = 5


def model(f, biases=(True, False)):
    layers = [nn.Linear(NUM_FEATURES, WIDTH, bias=bias) for bias in biases]
    return Model(f, WIDTH, left=layers[0], right=layers[1], norm=nn.LayerNorm(WIDTH)).double()


def sage(m, blocks, x):
    h = m.left(mean(blocks[0], x)) + m.right(x[: blocks[0].num_dst])
    return mean(blocks[1], h.relu())


def swapped(m, blocks, x):
    h = m.right(x[: blocks[0].num_dst]) + m.left(mean(blocks[0], x))
    return mean(blocks[1], h.relu())


@functools.cache
def plain(f, biases=(True, False)):
    """Captured: no pass has run."""
    torch.manual_seed(0)
    return captured(model(f, biases))


def test_before_and_after():
    before, after = (again(plain(sage), disable).trace() for disable in (OFF, ON))
    ops = {"linear": ATEN.linear.default, "index_select": ATEN.index_select.default,
           "aggregate": JOESTAR.sample_aggregate.default, "both": JOESTAR.sample_aggregate_cat.default}  # fmt: skip
    # Besides the two products: the head of the model; besides the own rows: the labels of the seeds.
    assert {name: count(before, op) for name, op in ops.items()} == {
        "linear": 3, "index_select": 2, "aggregate": 1, "both": 0}  # fmt: skip
    assert {name: count(after, op) for name, op in ops.items()} == {
        "linear": 2, "index_select": 1, "aggregate": 0, "both": 1}  # fmt: skip


SLOW = pytest.mark.slow
BIASES = [(True, False), (False, False), (True, True), (False, True)]


@pytest.mark.parametrize(
    ("f", "biases"),
    [*((sage, b) for b in BIASES), *(pytest.param(swapped, b, marks=SLOW if b[0] == b[1] else ()) for b in BIASES)],
)
@pytest.mark.every(2)
def test_same_numbers(f, biases):
    on, off = again(plain(f, biases), ON), again(plain(f, biases), OFF)
    assert count(on.program.captured.gm, JOESTAR.sample_aggregate_cat.default) == 1
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def inner(m, blocks, x):
    return m.left(mean(blocks[1], mean(blocks[0], x))) + m.right(mean(blocks[0], x)[: blocks[1].num_dst])


@pytest.mark.parametrize("biases", [(True, False), (False, False), (True, True)])
def test_inner_layer(biases):
    on, off = again(plain(inner, biases), ON), again(plain(inner, biases), OFF)
    assert count(on.program.captured.gm, JOESTAR.aggregate_cat.default) == 1
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_fires_in_every_layer_of_the_library_model():
    case = captured(jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4), disable=ON)
    fired = [place.detail for place in case.program.places if place.pattern == PATTERN and place.fired]
    assert fired == ["mean and own rows of features", "mean and own rows of relu"]


def read_twice(m, blocks, x):
    rows = mean(blocks[0], x)
    h = m.left(rows) + m.right(x[: blocks[0].num_dst])
    return mean(blocks[1], h * rows.sum(1, keepdim=True))


def product_read_twice(m, blocks, x):
    left = m.left(mean(blocks[0], x))
    return mean(blocks[1], left + m.right(x[: blocks[0].num_dst]) + left)


def scaled_rows(m, blocks, x):
    return mean(blocks[1], m.left(mean(blocks[0], x)) + m.right(2 * x[: blocks[0].num_dst]))


def largest(m, blocks, x):
    return mean(blocks[1], m.left(blocks[0].pull(fn.copy_u(x), "max")) + m.right(x[: blocks[0].num_dst]))


def weighted_inner(m, blocks, x):
    h = mean(blocks[0], x)
    weight = blocks[1].indices.double()
    return m.left(blocks[1].pull(fn.u_mul_e(h, weight), "sum")) + m.right(h[: blocks[1].num_dst])


REFUSED = {
    "max": (largest, "the aggregation is a max"),
    "edge weights": (weighted_inner, "the aggregation has edge weights"),
    "aggregation read twice": (read_twice, "the aggregation has another reader"),
    "product read twice": (product_read_twice, "a product has another reader"),
    "other rows": (scaled_rows, "the other operand does not hold the destinations' own rows"),
}


@functools.cache
def refused():
    return captured_together({name: model(f) for name, (f, _) in REFUSED.items()}, disable=ON)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    case, reason = refused()[name], REFUSED[name][1]
    assert count(case.program.captured.gm, JOESTAR.sample_aggregate_cat.default) == 0
    assert reason in reasons(case, PATTERN)
