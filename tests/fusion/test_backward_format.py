"""Format of an aggregation's backward pass: where there is a choice, what stays the same, and where there is none."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, Case, same
from torch import nn

import joestar.nn as jnn
from joestar import fn
from joestar.errors import ConfigError

from .graphs import JOESTAR, Model, again, captured, count, mean, only, reasons

PATTERN = "backward-format"
ALONE = only(PATTERN)
JOINED = only("extract-select", "aggregate-update", "relu-dropout", "dropout-aggregate", PATTERN)
WIDTH = 5


def two(m, blocks, x):
    """Features, an aggregation without gradients, an update, and an aggregation with gradients."""
    return mean(blocks[1], m.left(mean(blocks[0], x)).tanh())


def weighted(m, blocks, x):
    h = m.left(x)
    return mean(blocks[1], blocks[0].pull(fn.u_mul_e(h, m.left.bias.sum() * blocks[0].indices.double()), "sum"))


def model(f=two, width: int = WIDTH) -> Model:
    return Model(f, width, left=nn.Linear(NUM_FEATURES, WIDTH)).double()


@functools.cache
def plain(f=two) -> Case:
    """Captured: no pass has run."""
    return captured(model(f))


def chosen(case: Case, choices: dict[str, str], disable=ALONE) -> Case:
    return again(case, disable, choices)


def sites(case: Case) -> dict[str, tuple]:
    return {site.key: (site.options, site.default, site.taken) for site in case.program.sites}


def test_before_and_after():
    before, after = (chosen(plain(), choices) for choices in ({}, {"backward:hop0": "scatter"}))
    forms = ("transposed", "scatter")
    assert sites(before) == {"backward:hop0": (forms, "transposed", "transposed")}
    assert sites(after) == {"backward:hop0": (forms, "transposed", "scatter")}
    for case, ops in ((before, (2, 0)), (after, (1, 1))):
        gm = case.program.captured.gm
        assert (count(gm, JOESTAR.spmm.default), count(gm, JOESTAR.spmm_by.default)) == ops
    (node,) = (n for n in after.program.captured.gm.graph.nodes if n.target is JOESTAR.spmm_by.default)
    assert node.args[3:] == (None, "mean", "scatter")
    assert [p.detail for p in after.program.places if p.pattern == PATTERN and p.fired] == ["scatter"]


@pytest.mark.parametrize("f", [two, weighted])
def test_same_numbers(f):
    off = plain(f)
    on = chosen(off, dict.fromkeys(sites(chosen(off, {})), "scatter"))
    assert count(on.program.captured.gm, JOESTAR.spmm_by.default) == len(on.program.sites) > 0
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_joined_rows(dropout):
    """The aggregation next to own rows, with and without ReLU and dropout in it."""
    case = captured(jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4, dropout=dropout))
    off, on = (chosen(case, choices, JOINED) for choices in ({}, {"backward:hop0": "scatter"}))
    assert count(on.program.captured.gm, JOESTAR.aggregate_cat_by.default) == 1
    assert count(off.program.captured.gm, JOESTAR.aggregate_cat.default) == 2
    for step in range(2):
        same(on.padded(on.seeds(), step), off.exact(off.seeds(), step), 1e-12)


def test_every_layer_of_attention_has_a_choice_of_its_own():
    """Attention transforms first: gradients flow through every aggregation."""
    net = jnn.GAT(NUM_FEATURES, 8, 3, 4, heads=2)
    case = captured(net, (3, 2, 2), disable=only("extract-select", PATTERN))
    assert sorted(sites(case)) == ["backward:hop0", "backward:hop1", "backward:hop2"]


def test_two_aggregations_over_one_set():
    def both(m, blocks, x):
        h = m.left(mean(blocks[0], x))
        return torch.cat([mean(blocks[1], h), blocks[1].pull(fn.copy_u(h), "sum")], 1)

    assert list(sites(chosen(captured(model(both, 2 * WIDTH)), {}))) == ["backward:hop0", "backward:hop0.2"]


def test_names_do_not_depend_on_other_passes():
    """The hop keeps its number when the slices are fused into samples, and when the first layer is fused away."""
    for others in ((), ("extract-select",), ("extract-select", "sample-gather-aggregate")):
        assert list(sites(again(plain(), only(*others, PATTERN)))) == ["backward:hop0"]


def largest(m, blocks, x):
    return blocks[1].pull(fn.copy_u(m.left(mean(blocks[0], x))), "max")


REFUSED = {
    "features": (two, "no gradient flows to the aggregated rows"),
    "max": (largest, "the aggregation is a max"),
    "as it is": (two, "transposed is chosen"),
}


@pytest.mark.parametrize(("f", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_must_not_fire(f, reason):
    case = chosen(plain(f), {})
    assert count(case.program.captured.gm, JOESTAR.spmm_by.default) == 0
    assert reason in reasons(case, PATTERN)


def test_unknown_form():
    with pytest.raises(ConfigError, match=r"choice backward:hop0: expected one of transposed, scatter; got 'linked'"):
        chosen(plain(), {"backward:hop0": "linked"})
