"""Joined weights of all layers by one op: where it fires, what stays the same, and when it must not."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

import joestar.nn as jnn

from .graphs import JOESTAR, Model, captured, captured_each, count, mean, only, reasons

PATTERN = "join-together"
BASE = ("extract-select", "sample-gather-aggregate", "aggregate-update", "relu-dropout", "dropout-aggregate")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
JOIN, ALL = JOESTAR.join_columns.default, JOESTAR.join_columns_all.default
FANOUTS = (3, 2, 2)


def sage(**options):
    torch.manual_seed(0)
    return jnn.GraphSAGE(NUM_FEATURES, 8, 3, 4, **options).double()


def test_before_and_after():
    before, after = (case.trace() for case in captured_each(sage(), FANOUTS, disables=(OFF, ON)))
    assert (count(before, JOIN), count(before, ALL)) == (3, 0)
    assert (count(after, JOIN), count(after, ALL)) == (0, 1)
    (node,) = (n for n in after.graph.nodes if n.target is ALL)
    assert node.args[1:] == ([3, 2, 2], [2 * NUM_FEATURES + 4, 16, 16]) and len(node.args[0]) == 7
    assert [user.args[1] for user in node.users] == [0, 1, 2]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.every(2)
def test_same_numbers(dropout):
    on, off = captured_each(sage(dropout=dropout), FANOUTS, disables=(ON, OFF))
    assert len([place for place in on.program.places if place.pattern == PATTERN and place.fired]) == 3
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 0.0)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def two_layers(m, blocks, x, between=lambda m: None):
    h = (m.left(mean(blocks[0], x)) + m.right(x[: blocks[0].num_dst])).relu()
    between(m)
    return m.third(mean(blocks[1], h)) + m.fourth(h[: blocks[1].num_dst])


def layers(*biases: bool) -> Model:
    names = ("left", "right", "third", "fourth")
    sizes = (NUM_FEATURES, 5), (NUM_FEATURES, 5), (5, 5), (5, 5)
    parts = {n: nn.Linear(*size, bias=bias) for n, size, bias in zip(names, sizes, biases, strict=True)}
    return Model(two_layers, 5, **parts).double()


def test_a_part_that_is_computed():
    """Two biases are added up in the first layer; in inner layers they are no part of the weights."""
    fits, computed = (captured(layers(*biases), disable=ON) for biases in ([True, False] * 2, [True] * 4))
    assert count(fits.program.captured.gm, ALL) == 1
    assert count(computed.program.captured.gm, ALL) == 0
    assert sorted(reasons(computed, PATTERN)) == [
        "add_tensor is computed in the step",
        "there is no other join of inputs",
    ]


def test_one_join_stays_as_it_is():
    case = captured(jnn.GraphSAGE(NUM_FEATURES, 8, 1, 4), (3,), disable=ON)
    assert reasons(case, PATTERN) == ["there is no other join of inputs"]
    assert count(case.program.captured.gm, JOIN) == 1


def test_a_part_that_is_written():
    """The second join reads what was written behind the first."""
    model = layers(*[True, False] * 2)
    model.f = lambda m, blocks, x: two_layers(m, blocks, x, lambda m: m.fourth.weight.detach().mul_(0.5))
    model.fourth.requires_grad_(False)
    case = captured(model, disable=ON)
    assert "model_fourth_weight is written in the step" in reasons(case, PATTERN)
