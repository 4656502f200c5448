"""Factors of rows behind the product that reads them side by side: same numbers, what it costs, every reason not to."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx

from joestar.fusion import run_passes
from joestar.ops.dense import scaled_linear

from .graphs import ATEN, JOESTAR, again, captured, captured_each, count, mean, reasons
from .row_factor_forms import (
    FORMS,
    FORMS_ON_A_CPU,
    OFF,
    ON,
    OUT,
    PATTERN,
    SCALED,
    chosen,
    factor,
    last,
    model,
    only_scaled,
    places,
    pna,
    products,
    turned,
)
from .together import captured_together

EACH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


@functools.cache
def plain(form):
    """Captured: no pass has run."""
    return captured(model(form, bias=form is not turned))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@EACH
@pytest.mark.each("form")
def test_before_and_after(form, device, monkeypatch):
    columns, widest = FORMS[form]
    off = again(plain(form), OFF)
    passes_for(monkeypatch, device)
    on = again(plain(form), ON, {**SCALED, "factors:model_mix_weight.2": "results"})  # the same weights twice
    assert [place.fired for place in places(on)] == [True, True]
    assert products(on)[:-1] == [OUT * times for times in columns]
    graph = on.program.captured.gm.graph
    cats = [node.meta["val"] for node in graph.nodes if node.target is ATEN.cat.default and node.args[1] == 1]
    assert max((value.shape[1] for value in cats if value.shape[0] != OUT), default=0) == widest * NUM_FEATURES
    added = count(on.program.captured.gm, JOESTAR.add_bias.default)
    assert added == (2 if device == "cuda" and form is not turned else 0)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


@pytest.mark.parametrize(
    ("form", "out", "default"),
    [(pna, 13, "results"), (pna, 14, "rows"), (turned, 7, "results"), (turned, 8, "rows")],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_default_moves_fewer_entries(form, out, default):
    """Rows are trained: 5 * 60 + 5 C entries per row against 4 * 24 + 20 C, and 5 * 12 + 5 C against 4 * 6 + 10 C."""
    case = captured(model(form, last, out), disable=ON)
    (site,) = (site for site in case.program.sites if site.kind == "factors")
    assert (site.key, site.options, site.default) == ("factors:model_mix_weight", FORMS_ON_A_CPU, default)
    assert reasons(case, PATTERN) == ([] if default == "results" else ["scaling rows is chosen, by cost"])
    other = {"rows": "results", "results": "rows"}[default]
    expected = case.exact(case.seeds(), 0)
    case = chosen(case, **{site.key: other})
    assert [place.fired for place in places(case)] == [other == "results"]
    assert reasons(case, PATTERN) == ([] if other == "results" else ["scaling rows is chosen"])
    same(case.padded(case.seeds(), 0), expected, 1e-11)


GROUPED = {f"factors:model_mix_weight{more}": "grouped" for more in ("", ".2")}


@pytest.mark.parametrize("form", [form for form in FORMS if form is not only_scaled], ids=lambda form: form.__name__)
def test_grouped(form, monkeypatch):
    """Rows with the same factors share a weight, if there are two factors for the same rows, made of integers."""
    monkeypatch.setattr(scaled_linear, "_LEAST_ROWS", 1)
    off, on = again(plain(form), OFF), again(plain(form), ON, GROUPED)
    assert [place.fired for place in places(on)] == [True, True]
    expected = sum(times > 1 for times in FORMS[form][0])
    assert count(on.program.captured.gm, JOESTAR.scaled_linear.default) == 2 * expected
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


def test_the_default_of_large_batches():
    """Where they have few degrees, and nothing is rounded to 16 bits."""
    case = again(plain(pna), OFF)
    sizes = dict.fromkeys(case.program.sizes, 10_000)

    def default(device="cpu", **more) -> list:
        gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
        _, context = run_passes(gm, list(case.program.lowered_roles), ON, device=device, sizes=sizes, **more)
        return [(site.options, site.default) for site in context.sites if site.kind == "factors"]

    assert default() == [(FORMS_ON_A_CPU, "grouped")] * 2
    for options, taken in (*default("cuda"), *default(autocast=torch.bfloat16)):
        assert (options, taken) == (("rows", "results"), "results")


def test_factors_of_floats_are_not_grouped():
    """They may be as many as there are rows: degrees times a feature of the node are."""

    def by_node(m, blocks, x, form):
        y, f = m.first(mean(blocks[0], x)), x[: blocks[0].num_dst, :1].exp() * factor(blocks[0])
        return m.back(m.mix(torch.cat([y, y * f], 1)))

    case = captured(model(turned, by_node), fanouts=(3,), disable=ON)
    assert [site.options for site in case.program.sites if site.kind == "factors"] == [("rows", "results")]


def test_rows_without_gradients_are_cheaper_to_store():
    """Nothing is written back to the features: 3 * 12 + 4 C entries per row against 2 * 6 + 8 C."""

    def first(m, blocks, x, form):
        return m.first(mean(blocks[1], m.back(m.mix(torch.cat(form(blocks[0], x), 1)).tanh())))

    for out, default in ((5, "results"), (6, "rows")):
        (site,) = (s for s in captured(model(turned, first, out), disable=ON).program.sites if s.kind == "factors")
        assert site.default == default


# --- refusals ---


def read_scaled(m, block, x):
    y = mean(block, x)
    scaled = y * factor(block)
    return m.mix(torch.cat([y, scaled], 1)) + scaled.sum(1, keepdim=True)


def read_cat(m, block, x):
    rows = torch.cat(turned(block, x), 1)
    return m.mix(rows) + rows.sum(1, keepdim=True)


def trained(m, block, x):
    y = mean(block, x)
    return m.mix(torch.cat([y, y * m.first(y).sum(1, keepdim=True)], 1))


def trained_by_node(m, block, x):
    y = mean(block, x)
    return m.mix(torch.cat([y, y / (m.scale[block.dsts] + 1)], 1))


def widened(m, block, x):
    y = mean(block, x).float()
    return m.mix(torch.cat([y, y * factor(block)], 1))


def mixed(m, block, x):
    y = mean(block, x)
    return m.mix(torch.cat([y.float(), y * factor(block)], 1))


def twice(m, block, x):
    y = mean(block, x) * factor(block)
    return m.mix(torch.cat([y, y], 1))


def weights_per_row(m, block, x):
    rows = torch.cat(turned(block, x), 1)
    return m.first(F.linear(rows, mean(block, torch.cat([x, x], 1))).softmax(1) @ mean(block, x))[:, :OUT]


def end_to_end(m, block, x):
    rows = torch.cat([m.first.weight, m.first.weight * m.first.bias[:, None]])
    return m.mix(torch.cat([mean(block, x)] * 2, 1)) + F.linear(rows, m.mix.weight[:, :NUM_FEATURES]).mean(0)


REFUSED = {
    read_scaled: "the scaled rows are also read by aten.sum.dim_IntList",
    read_cat: "the rows side by side are also read by aten.sum.dim_IntList",
    trained: "the factor needs gradients",
    trained_by_node: "the factor needs gradients",
    widened: "the factor converts the rows to another dtype",
    mixed: "the rows side by side are converted to another dtype",
    twice: "the same rows occur twice",
    end_to_end: "the rows are joined end to end",
    weights_per_row: "the weights have as many entries as there are rows",
}


def refused_model(f):
    return model(turned, lambda m, blocks, x, form: m.back(f(m, blocks[1], m.first(mean(blocks[0], x))).tanh()))


@functools.cache
def refused():
    return captured_together({f: refused_model(f) for f in REFUSED}, disable=ON)


@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_must_not_fire(f):
    on, off = refused()[f], again(refused()[f], OFF)
    assert reasons(on, PATTERN) == [REFUSED[f]] and len(places(on)) == 1
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)


def test_other_factors_are_not_looked_at():
    """A number for all, one per column, one per entry: rows as they are."""

    def others(block, x):
        y = mean(block, x)
        return [y, y * 2, y * torch.arange(1.0, 7).double(), y / (y.abs() + 1)]

    assert not places(captured(model(others), disable=ON))


def test_what_is_written_in_the_step():
    """What is read before a write reads a copy, also of a view that is read after the write, too."""

    def doubled(m, blocks, x, form):
        factor = m.per_node[:, None]
        rows = torch.cat([m.table, m.table / factor], 1)
        m.per_node.mul_(2)
        rows = m.back(m.mix(rows)) + (factor if form is None else 0)
        return mean(blocks[1], mean(blocks[0], rows[blocks[0].srcs]))

    net = model(turned, doubled)
    net.register_buffer("table", torch.rand(48, NUM_FEATURES).double())
    net.register_buffer("per_node", torch.rand(48).double() + 1)
    for form in (turned, None):
        net.f = functools.partial(doubled, form=form)
        on, off = captured_each(net, disables=(ON, OFF))
        on = chosen(on, **SCALED)
        assert reasons(on, PATTERN) == [] and len(places(on)) == 1
        same(on.exact(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)
