"""Gather-together: products of the same rows are one op, the same numbers, and every reason not to."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx, nn

from .graphs import JOESTAR, Model, again, captured, count, mean, only, reasons

PATTERN = "gather-together"
BASE = ("extract-select", "gather-update")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def in_place(model: nn.Module, disable=ON):
    """The traced case, every product that may read in place doing so."""
    case = captured(model, disable=disable)
    return again(case, choices={site.key: "in-place" for site in case.program.sites if site.kind == "gather"})


def gates(m, blocks, x):
    """Rows of the sources and their gates, the same of the destinations."""
    own = x[: blocks[0].num_dst]
    rows = m.first(x).tanh() * m.second(x).sigmoid()
    return mean(blocks[1], mean(blocks[0], rows) + m.third(own).tanh() * m.fourth(own).sigmoid())


def parts(biases=(True, False, True, True), widths=(8, 8, 8, 8)):
    names = ("first", "second", "third", "fourth")
    return {
        name: nn.Linear(NUM_FEATURES, width, bias=bias) for name, bias, width in zip(names, biases, widths, strict=True)
    }


@functools.cache
def known(biases):
    return in_place(Model(gates, 8, **parts(biases)))


@pytest.mark.parametrize("biases", [(True, False, True, True), (False, True, False, False)], ids=str)
def test_same_numbers(biases):
    """Two ops of two products: those without a bias come last."""
    on = known(biases)
    off = again(on, OFF)
    graphs = [case.program.captured.gm for case in (on, off)]
    assert [count(gm, JOESTAR.gather_linears.default) for gm in graphs] == [2, 0]
    assert [count(gm, JOESTAR.gather_linear.default) for gm in graphs] == [0, 4]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_every_result_is_that_of_its_product():
    """A product without a bias in front of one with: the order of results is not that of the products."""
    case = known((False, True, False, False))
    first, second = case.program.captured.gm.graph.find_nodes(op="call_function", target=JOESTAR.gather_linears.default)
    assert [node.name for node in first.args[2]] == ["model_second_weight", "model_first_weight"]
    assert [node.name for node in first.args[3]] == ["model_second_bias"]
    assert second.args[3] == []


def test_must_not_fire():
    def one(m, blocks, x):
        return mean(blocks[1], mean(blocks[0], m.first(x).tanh()))

    def wide(m, blocks, x):
        return mean(blocks[1], mean(blocks[0], m.first(x).tanh() * m.second(x).sum(1, keepdim=True)))

    reason = "no other product of these rows has a weight of this shape"
    for f, widths, refused in ((one, (8, 8, 8, 8), 1), (wide, (8, 5, 8, 8), 2)):
        case = in_place(Model(f, 8, **parts(widths=widths)))
        assert reasons(case, PATTERN) == [reason] * refused


def test_a_weight_that_is_computed_behind_the_first_product_stays_apart():
    """The second weight depends on the first product."""

    def later(m, blocks, x):
        h = m.first(x)
        return mean(blocks[1], mean(blocks[0], h.tanh() * nn.functional.linear(x, m.second.weight * h.mean())))

    case = in_place(Model(later, 8, **parts()))
    assert count(case.program.captured.gm, JOESTAR.gather_linear.default) == 2
    off = again(case, OFF)
    same(case.exact(case.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)


def test_whole_graph_is_left_alone():
    case = captured(Model(lambda m, b, x: mean(b[1], mean(b[0], x).relu())), disable=ON)
    assert isinstance(case.program.captured.gm, fx.GraphModule) and not reasons(case, PATTERN)
    assert torch.isfinite(case.exact(case.seeds(), 0).loss)
