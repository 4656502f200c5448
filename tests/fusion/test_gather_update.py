"""Gather-update: products that read features in place, the same numbers, and every reason not to."""

import copy
import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import fx, nn

import joestar.nn as jnn
from joestar.fusion import run_passes

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons

PATTERN = "gather-update"
BASE = ("extract-select", "spmm-gemm-order", "gather-aggregate")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def normed(m, blocks, x):
    """A norm keeps the update in front of the aggregation."""
    return mean(blocks[1], mean(blocks[0], m.norm(m.first(x)).relu()))


def two_products(m, blocks, x):
    h = m.norm(m.first(x)).relu()
    return mean(blocks[1], mean(blocks[0], h) + m.second(x[: blocks[0].num_dst]).tanh())


def biased(m, blocks, x):
    """The bias is added by hand."""
    return mean(blocks[1], mean(blocks[0], (m.first(x) + m.norm.bias).relu()))


def parts(bias: bool = True):
    first, second = (nn.Linear(NUM_FEATURES, 8, bias=bias) for _ in range(2))
    return {"first": first, "second": second, "norm": nn.LayerNorm(8)}


MODELS = {
    "norm": (lambda: Model(normed, 8, **parts()), 1),
    "no bias": (lambda: Model(normed, 8, **parts(False)), 1),
    "two products": (lambda: Model(two_products, 8, **parts()), 2),
    "gat": (lambda: jnn.GAT(NUM_FEATURES, 8, 2, 4, heads=2, add_self_loops=False, dropout=0.3), None),
}


@functools.cache
def known(name: str):
    """The model after the passes."""
    return captured(MODELS[name][0](), disable=ON)


def in_place(case):
    """The traced case, every product that may read in place doing so."""
    return again(case, choices={site.key: "in-place" for site in case.program.sites if site.kind == "gather"})


def test_by_default_on_a_gpu_only():
    case = known("norm")
    assert count(case.program.captured.gm, JOESTAR.gather_linear.default) == 0
    assert reasons(case, PATTERN) == ["storing the gathered rows is chosen"]
    roles, graph = list(case.program.lowered_roles), case.program.lowered
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(graph))
    run_passes(gm, roles, ON, device="cuda", sizes=case.program.sizes)
    assert count(gm, JOESTAR.gather_linear.default) == 1


@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(name):
    on, off, products = in_place(known(name)), again(known(name), OFF), MODELS[name][1]
    found = count(on.program.captured.gm, JOESTAR.gather_linear.default)
    assert found == products or (products is None and found)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_before_and_after():
    off, on = again(known("norm"), OFF), in_place(known("norm"))
    before, after = off.program.captured.gm, on.program.captured.gm
    for gm, gathers in ((before, 1), (after, 0)):
        found = [n for n in gm.graph.nodes if n.target is ATEN.index_select.default and n.args[0].name == "features"]
        assert len(found) == gathers


def test_attention_aggregated_first_never_gathers():
    """Scores of the rows, and the rows that the coefficients weigh, are read from the table."""
    case = known("gat")
    orders = {site.key: "aggregate-first" for site in case.program.sites if site.kind == "order"}
    choices = {**orders, "gather:features_0": "in-place", "gather:features_1": "in-place"}
    nodes = list(again(case, choices=choices).program.captured.gm.graph.nodes)
    assert not [n for n in nodes if n.target is ATEN.index_select.default and n.args[0].name == "features"]
    assert sum(n.target is JOESTAR.gather_linear.default for n in nodes) == 2


def test_a_bias_added_by_hand_joins():
    case = in_place(captured(Model(biased, 8, **parts(False)), disable=only(*BASE, PATTERN, "bias")))
    products = [n for n in case.program.captured.gm.graph.nodes if n.target is JOESTAR.gather_linear.default]
    assert [n.args[3].name for n in products] == ["model_norm_bias"]


def test_must_not_fire():
    def read_elsewhere(m, blocks, x):
        return mean(blocks[1], mean(blocks[0], m.norm(m.first(x)) + m.second(x.tanh())))

    def many(m, blocks, x):
        h = m.norm(m.first(x)) + m.norm(m.second(x)) * m.third(x)
        return mean(blocks[1], mean(blocks[0], h.relu()))

    for f, reason, more in (
        (read_elsewhere, "the gathered rows are also read by aten.tanh", {}),
        (
            many,
            "3 products read the gathered rows: storing them once is cheaper",
            {"third": nn.Linear(NUM_FEATURES, 8)},
        ),
    ):
        on, off = captured_each(Model(f, 8, **parts(), **more), disables=(ON, OFF))
        assert reason in reasons(on, PATTERN)
        same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)


def test_features_that_need_gradients():
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].clone().requires_grad_()
    assert "the features need gradients" in reasons(
        captured(Model(normed, 8, **parts()), graph=graph, disable=ON), PATTERN
    )


def test_whole_graph_products_are_left_alone():
    """No gather, no pattern."""
    case = captured(Model(lambda m, b, x: mean(b[1], mean(b[0], x).relu())), disable=ON)
    assert not [place for place in case.program.places if place.pattern == PATTERN]
    assert torch.isfinite(case.exact(case.seeds(), 0).loss)


@pytest.mark.parametrize("own", [False, True])
def test_a_bias_of_one_element_stays_with_a_product_of_stored_rows(own):
    """PyTorch adds it to every column."""

    def net(m, blocks, x):
        of = x[: blocks[0].num_dst] if own else x
        rows = nn.functional.linear(of, m.first.weight, m.first.bias[:1]).tanh()
        return mean(blocks[1], rows if own else mean(blocks[0], rows) + mean(blocks[0], m.second(x).tanh()))

    case = in_place(captured(Model(net, 8, **parts()), disable=ON))
    off = again(case, OFF)
    assert count(case.program.captured.gm, JOESTAR.gather_linear.default) == 0
    same(case.exact(case.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)
