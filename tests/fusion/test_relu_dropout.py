"""ReLU and dropout in one op: where it fires, what stays the same, and when it must not."""

import pytest
import torch.nn.functional as F
from lowering.harness import SEEDS, same

import joestar.nn as jnn

from .graphs import ATEN, JOESTAR, Model, captured, captured_each, count, mean, only, reasons

PATTERN = "relu-dropout"
ON, OFF = only(PATTERN), only()


def two_layers(m, blocks, x):
    return mean(blocks[1], F.dropout(mean(blocks[0], x).relu(), 0.4, m.training))


def test_before_and_after():
    before, after = (case.trace() for case in captured_each(Model(two_layers), disables=(OFF, ON)))
    assert (count(before, ATEN.relu.default), count(after, ATEN.relu.default)) == (1, 0)
    (node,) = [n for n in after.graph.nodes if n.target is JOESTAR.keyed_dropout.default]
    assert node.args[5] is True


@pytest.mark.parametrize("make", [lambda: Model(two_layers), lambda: jnn.GraphSAGE(6, 8, 2, 4, dropout=0.5)])
def test_same_numbers(make):
    on, off = captured_each(make(), disables=(ON, OFF))
    assert any(place.fired for place in on.program.places)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def skip_connection(m, blocks, x):
    h = mean(blocks[0], x).relu()
    return mean(blocks[1], F.dropout(h, 0.4, m.training) + h)


def other_activation(m, blocks, x):
    return mean(blocks[1], F.dropout(F.elu(mean(blocks[0], x)), 0.4, m.training))


def test_must_not_fire():
    case = captured(Model(skip_connection), disable=ON)
    assert count(case.program.captured.gm, ATEN.relu.default) == 1
    assert reasons(case, PATTERN) == ["the activation is also read by aten.add.Tensor"]
    assert not captured(Model(other_activation), disable=ON).program.places
