"""Batch norm of rows as one op: where, what stays the same, and when it must not fire."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx, nn

from joestar.fusion import run_passes

from .graphs import JOESTAR, Model, again, captured, count, mean, only, reasons

PATTERN = "batch-norm"
ON, OFF = only("extract-select", PATTERN), only("extract-select")
COMPOSITION, OP = JOESTAR.masked_batch_norm.default, JOESTAR.batch_norm_rows.default


def between_layers(m, blocks, x):
    return mean(blocks[1], F.dropout(m.norm(m.a(mean(blocks[0], x))).relu(), 0.4, m.training))


def twice(m, blocks, x):
    """The same norm of the sources and of what they give: running averages follow both."""
    return m.norm(mean(blocks[1], m.norm(m.a(mean(blocks[0], x)))))


def without_vectors(m, blocks, x):
    return mean(blocks[1], m.plain(m.a(mean(blocks[0], x))))


FORMS = {f.__name__: f for f in (between_layers, twice, without_vectors)}
PLACES = {"twice": 2}


def model(f, **dtypes):
    torch.manual_seed(0)
    parts = {
        "a": nn.Linear(NUM_FEATURES, NUM_FEATURES), "norm": nn.BatchNorm1d(NUM_FEATURES, momentum=0.3),
        "plain": nn.BatchNorm1d(NUM_FEATURES, affine=False, track_running_stats=False),
    }  # fmt: skip
    return Model(f, NUM_FEATURES, **parts).double()


@functools.cache
def known(name: str):
    """The model after the passes, as on a CPU."""
    return captured(model(FORMS[name]), disable=ON)


@pytest.mark.parametrize("name", FORMS)
def test_before_and_after(name, monkeypatch):
    off = again(known(name), OFF)
    places = PLACES.get(name, 1)
    assert count(off.program.captured.gm, COMPOSITION) == places
    passes_for(monkeypatch, "cuda")
    on = again(known(name))
    gm = on.program.captured.gm
    assert (count(gm, COMPOSITION), count(gm, OP)) == (0, places)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


def test_a_choice_whose_default_is_the_device_s():
    case = known("between_layers")
    (site,) = (site for site in case.program.sites if site.kind == "norm")
    assert (site.key, site.options, site.default) == ("norm:0", ("composed", "fused"), "composed")
    assert "composed is chosen" in reasons(case, PATTERN) and count(case.program.captured.gm, OP) == 0


def test_must_not_fire_for_vectors_of_two_dtypes():
    case = known("between_layers")
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    (node,) = gm.graph.find_nodes(op="call_function", target=COMPOSITION)
    node.args[1].meta["val"] = node.args[1].meta["val"].float()
    _, context = run_passes(gm, list(case.program.lowered_roles), ON, device="cuda", sizes=case.program.sizes)
    refused = [place.detail for place in context.places if place.pattern == PATTERN]
    assert refused == ["weight and bias are torch.float32 and torch.float64"]
    assert count(gm, OP) == 0
