"""Aggregation that reads features in place: edge weights, factors, attention, self-loops, and every reason not to."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, count, mean, only, reasons
from .together import one_of

PATTERN = "gather-aggregate"
BASE = ("extract-select", "spmm-gemm-order")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def weighted(m, blocks, x):
    degrees = blocks[0].in_degrees().double()
    weight = blocks[0].apply_edges(fn.u_add_v(blocks[0].out_degrees().double(), degrees))
    return mean(blocks[1], blocks[0].pull(fn.u_mul_e(x, weight), "mean").relu())


def heads(m, blocks, x):
    weight = torch.stack([torch.ones_like(blocks[0].indices), blocks[0].indices % 3], 1).double()
    y = blocks[0].pull(fn.u_mul_e(x[:, None], weight), "sum").flatten(1)
    return mean(blocks[1], m.lin(y))


def factor(m, blocks, x):
    y = blocks[0].pull(fn.copy_u(x * blocks[0].out_degrees().double()[:, None]), "sum")
    return mean(blocks[1], y + x[: blocks[0].num_dst])


def factor_and_weight(m, blocks, x):
    scaled = x * blocks[0].out_degrees().double()[:, None]
    return mean(blocks[1], blocks[0].pull(fn.u_mul_e(scaled, torch.ones_like(blocks[0].indices).double() * 2), "mean"))


def looped(m, blocks, x):
    return mean(blocks[1], blocks[0].add_self_loops().pull(fn.copy_u(x), "max"))


def reversed_degrees(m, blocks, x):
    """The structure is computed on as well, which sample-gather-aggregate refuses."""
    y = (
        blocks[0].pull(fn.copy_u(x), "min")
        * blocks[0].pull(fn.copy_u(blocks[0].out_degrees().double()), "sum")[:, None]
    )
    return mean(blocks[1], y)


MODELS = {
    "edge weights": (lambda: Model(weighted), 1),
    "heads": (lambda: Model(heads, lin=nn.Linear(2 * NUM_FEATURES, NUM_FEATURES)), 1),
    "factor per source": (lambda: Model(factor), 1),
    "factor and weight": (lambda: Model(factor_and_weight), 1),
    "self-loops": (lambda: Model(looped), 1),
    "structure read elsewhere": (lambda: Model(reversed_degrees), 1),
    "gcn": (lambda: jnn.GCN(NUM_FEATURES, 8, 2, 4), 1),
    "sage": (lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4, aggr=["mean", "max"]), 2),
}


def _reads_features(node) -> bool:
    return node.args[0].name == "features"


def _of_compact(ids) -> bool:
    """Whether the ids are the sources of the outermost hop."""
    made_by = ids.args[0]
    return made_by.target is JOESTAR.compact.default and made_by.args[0].op != "placeholder"


known = one_of(MODELS, disable=ON)
"""Name -> the model after the passes."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, off, fired = known(name), again(known(name), OFF), MODELS[name][1]
    gm = on.program.captured.gm
    assert len([place for place in on.program.places if place.pattern == PATTERN and place.fired]) == fired
    sources = {n.args[2] for n in gm.graph.nodes if n.target is ATEN.index_select.default and _reads_features(n)}
    assert all(ids.op == "placeholder" or not _of_compact(ids) for ids in sources), "rows of sources are not gathered"
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_before_and_after():
    """The source rows are not gathered; the sample's own ids are read where the edges are those of the sample."""
    before, after = (again(known("edge weights"), disable).trace() for disable in (OFF, ON))
    gathers = [sum(n.target is ATEN.index_select.default and n.args[0].name == "features" for n in gm.graph.nodes)
               for gm in (before, after)]  # fmt: skip
    assert gathers == [1, 0]
    spmm = next(n for n in after.graph.nodes if n.target is JOESTAR.spmm.default)
    assert spmm.args[2].name == "features"
    assert spmm.args[1].args[0].target is JOESTAR.sample_cols.default, "ids of the sample, not looked up again"


def test_must_not_fire():
    def read_elsewhere(m, blocks, x):
        return mean(blocks[1], blocks[0].pull(fn.copy_u(x), "max") + x.tanh()[: blocks[0].num_dst])

    def trained_factor(m, blocks, x):
        factor = m.scale(blocks[0].out_degrees().double()[:, None])
        return mean(blocks[1], blocks[0].pull(fn.copy_u(x * factor), "sum"))

    def scaled_max(m, blocks, x):
        y = blocks[0].pull(fn.copy_u(x * -blocks[0].out_degrees().double()[:, None]), "max")
        return mean(blocks[1], y)

    for f, reason, parts in (
        (read_elsewhere, "the gathered rows are also read by aten.tanh", {}),
        (trained_factor, "the rows are scaled by factors that need gradients", {"scale": nn.Linear(1, 1)}),
        (scaled_max, "the scaled rows are aggregated by max", {}),
    ):
        case = captured(Model(f, **parts), disable=ON)
        assert reason in reasons(case, PATTERN)
        assert count(case.program.captured.gm, JOESTAR.spmm.default) == 2


def test_features_that_need_gradients():
    from lowering.harness import small_graph

    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].clone().requires_grad_()
    case = captured(Model(weighted), graph=graph, disable=ON)
    assert "the features need gradients" in reasons(case, PATTERN)
