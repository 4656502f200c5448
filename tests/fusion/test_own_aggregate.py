"""Aggregated plus own rows in one pass: where it fires, what stays the same, and every reason not to."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import nn

import joestar.nn as jnn
from joestar import NeighborSampler, fn
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .graphs import JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons

PATTERN = "own-aggregate"
BASE = ("extract-select", "sample-gather-aggregate", "relu-dropout", "dropout-aggregate")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def plus_own(m, blocks, x, reduce="mean"):
    """A factor of 1."""
    for block in blocks:
        x = m.lin(block.pull(fn.copy_u(x), reduce) + x[: block.num_dst]).relu()
    return x


def weighted(m, blocks, x):
    weight = blocks[0].apply_edges(fn.copy_u(blocks[0].out_degrees().double()))
    return mean(blocks[1], blocks[0].pull(fn.u_mul_e(x, weight), "sum") + 0.5 * x[: blocks[0].num_dst])


def by_tensor(m, blocks, x):
    return mean(blocks[1], torch.full((1,), 0.5, dtype=x.dtype) * x[: blocks[0].num_dst] + mean(blocks[0], x))


def linear():
    return {"lin": nn.Linear(NUM_FEATURES, NUM_FEATURES)}


MODELS = {
    "gin": (lambda: jnn.GIN(NUM_FEATURES, 8, 3, 4), 3),
    "gin with dropout": (lambda: jnn.GIN(NUM_FEATURES, 8, 3, 4, dropout=0.5), 3),
    "gin with eps": (lambda: jnn.GIN(NUM_FEATURES, 8, 3, 4, eps=0.25), 3),
    "factor 1": (lambda: Model(plus_own, **linear()), 2),
    "factor 1, sum": (lambda: Model(lambda m, b, x: plus_own(m, b, x, "sum"), **linear()), 2),
    "a tensor": (lambda: Model(by_tensor), 1),
}


@functools.cache
def known(name: str):
    """The model after the passes."""
    make, places = MODELS[name]
    return captured(make(), (3, 2, 2) if places == 3 else (3, 2), disable=ON)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, off, places = known(name), again(known(name), OFF), MODELS[name][1]
    assert len([place for place in on.program.places if place.pattern == PATTERN and place.fired]) == places
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_before_and_after():
    after = known("gin with dropout")
    before = again(after, OFF)
    for op, old, new in (("sample_aggregate", 1, 0), ("sample_aggregate_own", 0, 1), ("spmm", 2, 0),
                         ("aggregate_rows", 0, 2), ("keyed_dropout", 2, 0)):  # fmt: skip
        target = getattr(JOESTAR, op).default
        assert (count(before.trace(), target), count(after.trace(), target)) == (old, new), op


def test_must_not_fire():
    def other_rows(m, blocks, x):
        return mean(blocks[1], mean(blocks[0], x) + x.tanh()[: blocks[0].num_dst])

    def extremum(m, blocks, x):
        return plus_own(m, blocks, x, "max")

    def read_twice(m, blocks, x):
        y = mean(blocks[0], x)
        return mean(blocks[1], (y + x[: blocks[0].num_dst]) * y.sigmoid())

    refused = (
        (lambda: Model(extremum, **linear()), "the aggregation is a max"),
        (lambda: Model(read_twice), "the aggregation has another reader"),
        (lambda: jnn.GIN(NUM_FEATURES, 8, 2, 4, train_eps=True), "the factor of the own rows is trained"),
    )
    for make, reason in refused:
        on, off = captured_each(make(), disables=(ON, OFF))
        assert reason in reasons(on, PATTERN)
        same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)
    case = captured(Model(other_rows), disable=ON)
    assert not [place for place in case.program.places if place.pattern == PATTERN]


def test_a_python_number_is_no_factor_yet():
    """``0.5 * x`` has no tensor to hand over: refused silently, and right."""
    on, off = captured_each(Model(weighted), disables=(ON, OFF))
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)


@pytest.mark.parametrize(("autocast", "fused"), [(None, 1), (torch.bfloat16, 0), (torch.float16, 0)])
def test_a_sum_that_autocast_has_in_float32_is_not_rounded(autocast, fused):
    """A factor in a tensor of one entry, ``[1]``, makes 16-bit rows float32."""

    def layer(m, blocks, x):
        h = m.lin(x)
        own = h[: blocks[0].num_dst] * m.factor
        return (blocks[0].pull(fn.copy_u(h), "sum") + own).sigmoid()

    parts = {"lin": nn.Linear(NUM_FEATURES, 8), "factor": nn.Parameter(torch.ones(1) / 2, requires_grad=False)}
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    sampler, seeds = NeighborSampler(graph, [3]), torch.tensor(SEEDS, dtype=graph.indices.dtype)
    options = Options("eager", only(*BASE, PATTERN), autocast)
    program = Program("logits", Model(layer, 8, **parts).float(), sampler, None, options)
    program.trace(seeds, step_key(0, 0, 0, "cpu"))
    assert count(program.captured.gm, JOESTAR.aggregate_rows.default) == fused
