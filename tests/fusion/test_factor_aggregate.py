"""Factors of rows as weights of edges, and biases as part of products: same numbers, and every reason not to."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons
from .together import one_of

PATTERN, BIAS = "factor-aggregate", "bias"
ON, OFF = only("extract-select", PATTERN, BIAS), only("extract-select")


def normalised(m, blocks, x, reduce="sum", bias=False):
    """GCN by hand: a factor per source, the update, a factor per destination, a bias."""
    for block, lin in zip(blocks, (m.first, m.second), strict=True):
        rows = x * block.out_degrees().double().clamp(min=1).rsqrt()[:, None]
        x = lin(block.pull(fn.copy_u(rows), reduce)) * block.in_degrees().double().clamp(min=1).rsqrt()[:, None]
        x = (x + m.bias).relu()
    return x


def without_update(m, blocks, x):
    y = blocks[0].pull(fn.copy_u(x), "mean") * blocks[0].in_degrees().double()[:, None]
    return m.second(m.first(mean(blocks[1], y)))


def with_weights(m, blocks, x):
    weight = blocks[0].apply_edges(fn.copy_u(blocks[0].out_degrees().double()))
    rows = x * (blocks[0].out_degrees().double() + 1)[:, None]
    y = blocks[0].pull(fn.u_mul_e(rows, weight), "sum") * blocks[0].in_degrees().double()[:, None]
    return m.second(m.first(mean(blocks[1], y)))


def parts(bias: bool = False) -> dict:
    return {
        "first": nn.Linear(NUM_FEATURES, 8, bias=bias),
        "second": nn.Linear(8, 8, bias=bias),
        "bias": nn.Parameter(torch.zeros(8)),
    }


class Own(Model):
    """With a parameter among its parts."""

    def __init__(self, f, width, *, bias: nn.Parameter, **modules):
        super().__init__(f, width, **modules)
        self.bias = bias


def narrow(m, blocks, x):
    """Factors in float32, rows in float64: products of factors are as wide as the rows."""
    s, t = (1 / (degrees + 1) for degrees in (blocks[0].graph_degrees("src"), blocks[0].graph_degrees("dst")))
    y = blocks[0].pull(fn.copy_u(x * s[:, None]), "sum") * t[:, None]
    return m.second(m.first(mean(blocks[1], y.relu())))


def one_column(m, blocks, x):
    """Rows of one column by a number that is a tensor without dimensions: no factor of rows."""
    counts = torch.ones((), dtype=torch.float64) * 2
    y = blocks[0].pull(fn.copy_u(x[:, :1] * counts.rsqrt()), "sum") * (counts + 1)
    return m.second(m.first(mean(blocks[1], y * x[: blocks[0].num_dst])))


MODELS = {
    "one column": (lambda: Own(one_column, 8, **parts()), 1),
    "narrow factors": (lambda: Own(narrow, 8, **parts()), 2),
    "gcn by hand": (lambda: Own(normalised, 8, **parts()), 4),
    "gcn by hand, mean": (lambda: Own(lambda m, b, x: normalised(m, b, x, "mean"), 8, **parts()), 4),
    "no product in between": (lambda: Own(without_update, 8, **parts()), 1),
    "edge weights": (lambda: Own(with_weights, 8, **parts()), 2),
    "gcn": (lambda: jnn.GCN(NUM_FEATURES, 8, 2, 4), 4),
}


known = one_of(MODELS, disable=ON)
"""Name -> the model after the passes."""


def fired(case, pattern: str) -> int:
    return len([place for place in case.program.places if place.pattern == pattern and place.fired])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, off = known(name), again(known(name), OFF)
    assert fired(on, PATTERN) == MODELS[name][1]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


def test_before_and_after():
    after = known("gcn by hand")
    before = again(after, OFF)
    for case, products, factors in ((before, 0, 4), (after, 2, 0)):
        graph = case.program.captured.gm.graph
        biased = [
            n for n in graph.nodes if n.target is ATEN.linear.default and len(n.args) > 2 and n.args[2] is not None
        ]
        scaled = [n for n in graph.nodes if n.target is ATEN.mul.Tensor and n.meta["val"].dim() == 2]
        assert len(biased) == products + 1, "the head has a bias anyway"
        assert len(scaled) == factors
    weights = [n.args[3] for n in after.program.captured.gm.graph.nodes if n.target is JOESTAR.spmm.default]
    assert all(weight is not None for weight in weights)


@pytest.mark.parametrize(("name", "ops"), [("gcn by hand", ["copy_rhs", "mul"]), ("gcn", ["mul", "mul"])])
def test_factors_of_both_ends_are_one_op(name, ops):
    graph = again(known(name), ()).program.captured.gm.graph
    assert sorted(n.args[4] for n in graph.find_nodes(op="call_function", target=JOESTAR.sddmm.default)) == ops


def test_weights_of_edges_stay_what_they_are():
    """Picked edge data that are trained: no numbers of sources, though they are picked in the same way."""

    def net(m, blocks, x):
        weight = (blocks[0].edata["w"] * m.bias[0]).exp()
        y = blocks[0].pull(fn.u_mul_e(x, weight), "sum") * (blocks[0].in_degrees().double() + 1)[:, None]
        return m.second(m.first(mean(blocks[1], y)))

    graph = small_graph()
    graph.edata["w"] = torch.rand(graph.num_edges, dtype=torch.float64)
    on, off = captured_each(Own(net, 8, **parts()), disables=(ON, OFF), graph=graph)
    assert fired(on, PATTERN) == 1
    expected = off.exact(off.seeds(), 0)
    same(on.exact(on.seeds(), 0), expected, 1e-11)
    same(on.padded(on.seeds(), 0), expected, 1e-11)


def test_gcn_becomes_weighted_aggregations():
    """With the order of its products chosen, nothing multiplies rows in GCN any more."""
    case = again(known("gcn"), ())
    rows = [n for n in case.program.captured.gm.graph.nodes if n.target is ATEN.mul.Tensor and n.meta["val"].dim() == 2]
    assert not rows and fired(case, PATTERN) == 3 and fired(case, BIAS) >= 1


def test_must_not_fire():
    def biased(m, blocks, x):
        y = m.first(blocks[0].pull(fn.copy_u(x), "sum")) * blocks[0].in_degrees().double()[:, None]
        return mean(blocks[1], y.relu())

    def extremum(m, blocks, x):
        y = blocks[0].pull(fn.copy_u(x), "max") * blocks[0].in_degrees().double()[:, None]
        return m.first(mean(blocks[1], y.relu()))

    def read_twice(m, blocks, x):
        y = blocks[0].pull(fn.copy_u(x), "sum")
        return m.first(mean(blocks[1], y * blocks[0].in_degrees().double()[:, None] + y.tanh()))

    def trained(m, blocks, x):
        factor = m.second(m.first(x)).sum(1, keepdim=True)
        return m.first(mean(blocks[1], blocks[0].pull(fn.copy_u(x * factor), "sum")))

    def scaled_read_twice(m, blocks, x):
        rows = x * blocks[0].out_degrees().double()[:, None]
        y = blocks[0].pull(fn.copy_u(rows), "sum") + rows.tanh()[: blocks[0].num_dst]
        return m.first(mean(blocks[1], y))

    for f, reason, bias in (
        (biased, "the product has a bias, which is scaled as well", True),
        (extremum, "the aggregation is a max", False),
        (read_twice, "the aggregated rows have another reader", False),
        (trained, "the factor needs gradients", False),
        (scaled_read_twice, "the scaled rows are also read by aten.tanh", False),
    ):
        on, off = captured_each(Own(f, 8, **parts(bias)), disables=(ON, OFF))
        assert reason in reasons(on, PATTERN)
        same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)


def test_bias_must_not_fire():
    def twice(m, blocks, x):
        y = m.first(mean(blocks[0], x))
        return m.second(mean(blocks[1], (y + m.bias).relu() + y))

    def already(m, blocks, x):
        return m.second(mean(blocks[1], m.first(mean(blocks[0], x)) + m.bias))

    for f, reason, bias in (
        (twice, "the product has another reader", False),
        (already, "the product has a bias already", True),
    ):
        case = captured(Own(f, 8, **parts(bias)), disable=ON)
        assert reason in reasons(case, BIAS) and fired(case, BIAS) == 0


def test_what_else_is_added_is_no_bias():
    def rows(m, blocks, x):
        return m.second(mean(blocks[1], m.first(mean(blocks[0], x)) + m.second(m.first(x))[: blocks[0].num_dst]))

    case = captured(Own(rows, 8, **parts()), disable=ON)
    assert not [place for place in case.program.places if place.pattern == BIAS]
    assert count(case.program.captured.gm, ATEN.linear.default) == 5
