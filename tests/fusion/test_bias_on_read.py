"""Biases that are added where rows are read: where, what stays the same, and when they must not be."""

import copy
import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx, nn

import joestar.nn as jnn
from joestar.fusion import run_passes
from joestar.kernels.layout import cat_width
from joestar.torch_private import FakeTensorMode

from .graphs import ATEN, JOESTAR, Model, again, captured, count, mean, only, reasons

PATTERN = "bias-on-read"
BASE = ("extract-select", "sample-gather-aggregate", "own-aggregate", "relu-dropout", "dropout-aggregate", "kept-bits")
CAT = JOESTAR.sample_aggregate_cat.default
KEPT = {JOESTAR.aggregate_cat_kept.default: 7, JOESTAR.aggregate_rows_kept.default: 9}
MODELS = {
    "joined": (lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 3, 4, dropout=0.5), ("aggregate-update",)),
    "wide": (lambda: jnn.GraphSAGE(NUM_FEATURES, 40, 3, 4, dropout=0.5, aggr="sum"), ("aggregate-update",)),
    "one product": (lambda: jnn.GIN(NUM_FEATURES, 8, 3, 4, dropout=0.5), ()),
}
EACH = pytest.mark.parametrize("name", MODELS)


def plain(model):
    """The traced model, without any pass."""
    return captured(model.double(), (3, 2, 2), disable=only())


@functools.cache
def known(name: str):
    torch.manual_seed(0)
    return plain(MODELS[name][0]())


def make(case, *more: str, hops=("hop0", "hop1"), bias="on-read"):
    """The case after the passes; aggregations over ``hops`` store bits."""
    taken = {f"mask:{hop}": "stored" for hop in hops}
    case = again(case, only(*BASE, PATTERN, *more), taken)
    return again(case, choices=taken | {site.key: bias for site in case.program.sites if site.kind == "bias"})


def with_bias(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if len(node.args) == KEPT.get(node.target)]


@EACH
def test_before_and_after(name):
    before, after = (make(known(name), *MODELS[name][1], bias=bias) for bias in ("added", "on-read"))
    assert reasons(before, PATTERN) == ["added is chosen"] * 2
    sites = {site.key: (site.options, site.default) for site in after.program.sites if site.kind == "bias"}
    assert sites == dict.fromkeys(("bias:hop0", "bias:hop1"), (("added", "on-read"), "added"))
    assert not with_bias(before.program.captured.gm)
    moved = with_bias(after.program.captured.gm)
    assert len(moved) == 2
    for node in moved:
        product = node.args[2]
        assert product.target is ATEN.linear.default and len(product.args) == 2
        assert node.args[-1].meta["val"].shape == product.meta["val"].shape[1:]


def test_the_column_of_ones_is_gone():
    joined, (_, more) = known("joined"), MODELS["joined"]
    before, after = (make(joined, *more, bias=bias).program.captured.gm for bias in ("added", "on-read"))
    for gm, width, parts in ((before, cat_width(NUM_FEATURES), 3), (after, cat_width(NUM_FEATURES, False), 2)):
        (matrix,) = gm.graph.find_nodes(op="call_function", target=CAT)
        (join,) = (n for n in gm.graph.find_nodes(op="call_function", target=JOESTAR.join_columns.default)
                   if n.args[0][0].name == "model_convs_0_lin_l_weight")  # fmt: skip
        assert matrix.meta["val"][0].shape[1] == join.args[1] == width and len(join.args[0]) == parts
    assert count(before, CAT) == count(after, CAT) == 1


@EACH
def test_same_numbers(name):
    off, on = known(name), make(known(name), *MODELS[name][1])
    assert len(with_bias(on.program.captured.gm)) == 2
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


@pytest.fixture
def unaligned(monkeypatch):
    """Joined rows are as wide as their parts. PyTorch keeps the shapes that ops gave for the whole process."""
    monkeypatch.setattr("joestar.kernels.layout.CAT_ALIGNMENT", 1)
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


@pytest.mark.parametrize(("tile", "moved"), [(12, 1), (13, 0)])
def test_by_default_on_a_gpu_where_the_column_costs_a_tile(unaligned, monkeypatch, tile, moved):
    """Rows of 2 * 6 columns, and one of ones."""
    monkeypatch.setattr("joestar.fusion.aggregate.bias_on_read._TILE", tile)
    more = MODELS["joined"][1]
    model = jnn.GraphSAGE(NUM_FEATURES, 11, 3, 4, dropout=0.5)  # no other test's: twins have the shapes of the first
    case = make(plain(model), *more, hops=())
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    disable = only(*BASE, PATTERN, *more)
    run_passes(gm, list(case.program.lowered_roles), disable, device="cuda", sizes=case.program.sizes)
    assert len(with_bias(gm)) == moved and not with_bias(case.program.captured.gm)


def user_model(f, bias: bool = True):
    """Three layers; ``f`` makes of a product the rows that the second one reads."""

    def run(m, blocks, x):
        h = m.first(mean(blocks[0], x))
        z = mean(blocks[1], nn.functional.dropout(f(m, h).relu(), 0.5, m.training))
        return mean(blocks[2], z.tanh()) + h.sum(0) * m.extra

    first = nn.Linear(NUM_FEATURES, 6, bias=bias)
    return Model(run, 6, first=first, norm=nn.LayerNorm(6), extra=nn.Parameter(torch.ones(6)))


def alone(f, bias: bool = True):
    model = user_model(f, bias)
    model.f = lambda m, blocks, x: mean(
        blocks[2],
        mean(blocks[1], nn.functional.dropout(f(m, m.first(mean(blocks[0], x))).relu(), 0.5, m.training)).tanh(),
    )
    return model


def halved():
    model = alone(lambda m, h: h)
    run = model.f
    model.f = lambda m, blocks, x: (m.first.bias.detach().mul_(0.5), run(m, blocks, x))[1]
    model.first.bias.requires_grad_(False)
    return model


REFUSED = {
    "the rows are no product": lambda: alone(lambda m, h: m.norm(h)),
    "the product has another reader": lambda: user_model(lambda m, h: h),
    "the product has no bias": lambda: alone(lambda m, h: h, bias=False),
    "model_first_bias is written in the step": halved,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_must_not_fire(reason):
    case = make(plain(REFUSED[reason]()), hops=("hop1",))
    assert reasons(case, PATTERN) == [reason]
    assert not with_bias(case.program.captured.gm)


def test_a_product_of_a_user():
    off = plain(alone(lambda m, h: h))
    on = make(off, hops=("hop1",))
    assert len(with_bias(on.program.captured.gm)) == 1
    expected = off.exact(off.seeds(SEEDS), 0)
    same(on.exact(on.seeds(SEEDS), 0), expected, 1e-12)
    same(on.padded(on.seeds(SEEDS), 0), expected, 1e-12)


def test_no_bits_no_place():
    case = captured(jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4), disable=only(*BASE, PATTERN, "aggregate-update"))
    assert not [place for place in case.program.places if place.pattern == PATTERN]
    assert not [site for site in case.program.sites if site.kind == "bias"]
