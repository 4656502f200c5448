"""Neighbours' and own rows side by side, then a product: what the split gives, and the biases that it leaves alone."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, WIDTH, same
from torch import nn
from torch.nn.functional import linear

from .graphs import ATEN, Model, again, count, mean, only, reasons
from .together import captured_together

BOTH = ("split-update", "aggregate-update")
BASE = ("extract-select", "sample-gather-aggregate")
ON, OFF = only(*BASE, *BOTH), only(*BASE)


def model(f):
    parts = {name: nn.Parameter(torch.rand(size)) for name, size in (("one", 1), ("each", WIDTH))}
    layers = {"mix": nn.Linear(2 * NUM_FEATURES, WIDTH), "left": nn.Linear(NUM_FEATURES, WIDTH)}
    return Model(f, WIDTH, **parts, **layers, right=nn.Linear(NUM_FEATURES, WIDTH)).double()


def beside(bias, outer: bool = False):
    """``lin(cat([own, aggregated]))`` in the first layer or in the last."""

    def f(m, blocks, x):
        first, last = blocks
        rows = mean(first, x) if outer else x
        block = last if outer else first
        both = torch.cat([rows[: block.num_dst], mean(block, rows)], 1)
        h = linear(both, m.mix.weight, bias(m))
        return h if outer else mean(last, h.relu())

    return f


def added(left, right):
    """The sum of two products with biases of their own."""

    def f(m, blocks, x):
        near = linear(mean(blocks[0], x), m.left.weight, left(m))
        own = linear(x[: blocks[0].num_dst], m.right.weight, right(m))
        return mean(blocks[1], (near + own).relu())

    return f


def no(m):
    return None


def one(m):
    return m.one


def each(m):
    return m.each


FORMS = {
    "cat, no bias": (beside(no), ()), "cat": (beside(each), ()), "cat, last layer": (beside(each, True), ()),
    "cat, one bias": (beside(one), BOTH[:1]), "cat, one bias, last layer": (beside(one, True), BOTH[:1]),
    "sum": (added(each, each), ()), "sum, one bias": (added(one, each), BOTH[1:]),
    "sum, one bias of own rows": (added(no, one), BOTH[1:]), "sum, two of one": (added(one, one), BOTH[1:]),
}  # fmt: skip
"""Name -> (layer, the passes that refuse it)."""


@functools.cache
def cases():
    torch.manual_seed(0)
    return captured_together({name: model(f) for name, (f, _) in FORMS.items()}, disable=ON)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, refusing = cases()[name], FORMS[name][1]
    off = again(on, OFF)
    products = [count(case.program.captured.gm, ATEN.linear.default) for case in (on, off)]
    assert products[1] - products[0] == (name.startswith("sum") and not refusing)
    for pattern in BOTH:
        fired = any(place.fired for place in on.program.places if place.pattern == pattern)
        assert fired is (not refusing and (pattern == "aggregate-update" or name.startswith("cat")))
        assert any("broadcast over the columns" in reason for reason in reasons(on, pattern)) is (pattern in refusing)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = on.eager(on.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)
