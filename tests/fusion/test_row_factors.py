"""Factors of rows behind the product that reads them side by side: same numbers, what it costs, every reason not to."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import fx, nn

import joestar
import joestar.runtime.program as program
from joestar import fn
from joestar.fusion import run_passes
from joestar.ops.dense import scaled_linear

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons
from .together import captured_together

PATTERN = "row-factors"
CLEAN = "extract-select"
ON, OFF = only(CLEAN, PATTERN), only(CLEAN)
SCALED = {"factors:model_mix_weight": "results"}
FORMS_ON_A_CPU = ("rows", "results", "grouped")
OUT = 3


def pulled(block, x, reduce):
    return block.pull(fn.copy_u(x), reduce)


def factor(block, dtype=torch.float64):
    return (block.in_degrees() + 1).to(dtype).log()[:, None] + 0.5


def own(block, x):
    return x[: block.num_dst]


def pna(block, x):
    """The group of rows is itself made of several."""
    around = torch.cat([pulled(block, x, reduce) for reduce in ("mean", "max", "min")], 1)
    f = factor(block, x.dtype)
    return [own(block, x), around, around * f, around / f]


def turned(block, x):
    """The factor comes first, the rows as they are last."""
    y = mean(block, x)
    return [factor(block) * y, y]


def interleaved(block, x):
    """Two kinds of rows under the same factors: one product for both."""
    y, z, f = mean(block, x), pulled(block, x, "max"), factor(block)
    return [y, y * f, z, own(block, x), z * f]


def unlike(block, x):
    """Rows under different factors: a product each."""
    y, z, f, g = mean(block, x), pulled(block, x, "max"), factor(block), block.in_degrees()[:, None] + 2
    return [y * f, y / g, z * g, z]


def only_scaled(block, x):
    """Nothing occurs as it is."""
    return [mean(block, x) * factor(block), own(block, x) / factor(block)]


def narrow(block, x):
    """Factors in float32, rows in float64."""
    y = mean(block, x)
    return [y, y * factor(block, torch.float32), y / factor(block, torch.float32)]


def some_stay(block, x):
    """Rows that are stored scaled anyway, beside others."""
    y, f = mean(block, x), factor(block)
    scaled = y * f
    return [scaled, scaled.tanh(), y, y / f]


# form -> (products and their columns in terms of the result's, columns of the widest concatenation left)
FORMS = {
    pna: ([1, 3], 3),
    turned: ([2], 0),
    interleaved: ([2, 1], 2),
    unlike: ([2, 2], 0),
    only_scaled: ([1, 1], 0),
    narrow: ([3], 0),
    some_stay: ([1, 2], 2),
}
EACH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def layer(m, blocks, x, form):
    """The form in both layers, the same weights."""
    for block in blocks:
        x = m.back(m.mix(torch.cat(form(block, x), 1)).tanh())
    return x


def last(m, blocks, x, form):
    """The form in the last layer, over trained rows."""
    return m.back(m.mix(torch.cat(form(blocks[1], m.first(mean(blocks[0], x))), 1)).tanh())


def model(form, f=layer, out=OUT, bias=True):
    block = joestar.NeighborSampler(small_graph(), [3]).sample(small_graph().keyed(0, 0, 0), torch.tensor(SEEDS))[0]
    width = sum(rows.shape[1] for rows in form(block, torch.zeros(block.num_src, NUM_FEATURES).double()))
    torch.manual_seed(0)
    parts = {"mix": nn.Linear(width, out, bias=bias), "back": nn.Linear(out, NUM_FEATURES)}
    parts |= {"first": nn.Linear(NUM_FEATURES, NUM_FEATURES), "scale": nn.Parameter(torch.rand(48, 1))}
    return Model(functools.partial(f, form=form), **parts).double()


def chosen(case, **choices):
    """The case under these choices."""
    case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def products(case) -> list[int]:
    """Columns that the products with the weights of ``mix`` give, in the order of the graph, first layer."""
    linears = [node for node in case.program.captured.gm.graph.nodes if node.target is ATEN.linear.default]
    return [int(node.meta["val"].shape[1]) for node in linears[: len(linears) // 2]]


def places(case) -> list:
    return [place for place in case.program.places if place.pattern == PATTERN]


@functools.cache
def plain(form):
    """Captured: no pass has run."""
    return captured(model(form, bias=form is not turned))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@EACH
def test_before_and_after(form, device, monkeypatch):
    columns, widest = FORMS[form]
    off = again(plain(form), OFF)
    monkeypatch.setattr(program, "run_passes", lambda *a, **o: run_passes(*a, **{**o, "device": device}))
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
    """What is read before a write reads a copy, unless it is a view that is read after the write, too."""

    def doubled(m, blocks, x, form):
        factor = m.per_node[:, None]
        rows = torch.cat([m.table, m.table / factor], 1)
        m.per_node.mul_(2)
        rows = m.back(m.mix(rows)) + (factor if form is None else 0)
        return mean(blocks[1], mean(blocks[0], rows[blocks[0].srcs]))

    net = model(turned, doubled)
    net.register_buffer("table", torch.rand(48, NUM_FEATURES).double())
    net.register_buffer("per_node", torch.rand(48).double() + 1)
    for form, reason in ((turned, []), (None, ["model_table or its factor is written in the step"])):
        net.f = functools.partial(doubled, form=form)
        on, off = captured_each(net, disables=(ON, OFF))
        on = chosen(on, **SCALED) if form else on
        assert reasons(on, PATTERN) == reason and len(places(on)) == 1
        same(on.exact(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)


# --- where numbers are awkward ---


def test_factors_that_are_0_in_padded_rows():
    """Degrees are 1 at least for these seeds, and 0 in padded rows: nothing there reaches a gradient."""

    def by_degree(m, blocks, x, form):
        y, degrees = m.first(mean(blocks[0], x)), blocks[0].in_degrees()[:, None]
        return m.back(m.mix(torch.cat([y * degrees, y / degrees], 1)))

    case = captured(model(turned, by_degree), fanouts=(3,), disable=ON)
    case = chosen(case, **SCALED)
    seeds = tuple(case.graph.in_degrees().nonzero()[:9, 0].tolist())
    assert len(seeds) == 9 and [place.fired for place in places(case)] == [True]
    same(case.padded(case.seeds(seeds), 0), case.eager(case.seeds(seeds), 0), 1e-11)


def test_division_by_0_leaves_the_same_rows_not_finite():
    def by_degree(m, blocks, x, form):
        y, degrees = mean(blocks[0], x) + 1, blocks[0].in_degrees()[:, None]
        return m.back(m.mix(torch.cat([y, y / degrees], 1)))

    on, off = captured_each(model(turned, by_degree), (3,), disables=(ON, OFF), kind="logits")
    on = chosen(on, **SCALED)
    assert [place.fired for place in places(on)] == [True]
    lonely = on.graph.in_degrees() == 0
    seeds = on.seeds(range(48))
    got, expected = (case.program.exact(seeds, case.key(0))[0][0] for case in (on, off))
    assert 0 < lonely.sum() < 48
    for logits in (got, expected):
        assert torch.equal(logits.isfinite().all(1), ~lonely)
    torch.testing.assert_close(got[~lonely], expected[~lonely])


def trained_once(choice, autocast):
    """(logits, all gradients) of the same model."""
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    net = model(pna, last).float()
    sampler = joestar.NeighborSampler(graph, [3, 2])
    choices = {"factors:model_mix_weight": choice}
    step = joestar.compile(net, sampler, backend="eager", autocast=autocast, choices=choices)
    logits = step(torch.arange(48))
    logits.square().sum().backward()
    return logits, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def test_autocast():
    """Products are in bfloat16, factors in float32: results are in bfloat16 as before, and as near to float32."""
    reference = trained_once("rows", None)
    before, after = (trained_once(choice, torch.bfloat16) for choice in ("rows", "results"))
    assert [value.dtype for value in after] == [value.dtype for value in before] == [torch.bfloat16, torch.float32]
    for exact, rows, results in zip(reference, before, after, strict=True):
        errors = [((value.float() - exact).norm() / exact.norm()).item() for value in (rows, results)]
        assert 0 < errors[1] < 1.5 * errors[0] < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float16_scales_rows_first(dtype):
    """Sums that only fit float16 once they are divided by their degrees: finite with the pass as without it."""
    graph = joestar.Graph.from_edge_index(
        torch.stack(
            [torch.randint(0, 60, (3000,), generator=torch.Generator().manual_seed(0)), torch.arange(3000) % 60]
        ),
        60,
    )
    graph.ndata["x"] = torch.rand(60, NUM_FEATURES, generator=torch.Generator().manual_seed(1)) * 4000

    def divided(m, blocks, x, form):
        y = blocks[0].pull(joestar.fn.copy_u(x), "sum")
        degrees = blocks[0].in_degrees()[:, None].clamp(min=1).to(x.dtype)
        return m.back(m.mix(torch.cat([y / degrees.sqrt(), y / degrees], 1)))

    torch.manual_seed(0)
    net = model(turned, divided).float()
    sampler = joestar.NeighborSampler(graph, [-1])
    compiled = joestar.compile(net, sampler, backend="eager", autocast=dtype)
    logits = compiled(torch.arange(60))
    assert logits.isfinite().all()
    short = dtype == torch.bfloat16
    lines = [line for line in str(compiled.explain()).splitlines() if PATTERN in line]
    assert [("fired" in line, "range of float16" in line) for line in lines] == [(short, not short)]


def test_the_rows_of_a_product_keep_their_epilogue():
    """On a GPU, bias, ReLU and dropout behind scaled results are one pass as they are behind the product."""

    def active(m, blocks, x, form):
        h = F.dropout(m.mix(torch.cat(form(blocks[0], x), 1)).relu(), 0.4, m.training)
        return mean(blocks[1], m.back(h).tanh())

    for names in ((), (PATTERN,)):
        case = captured(model(pna, active), disable=only(CLEAN, "bias", "relu-dropout", "bias-relu", *names))
        gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
        run_passes(gm, list(case.program.lowered_roles), case.disable, device="cuda", sizes=case.program.sizes)
        (fused,) = gm.graph.find_nodes(op="call_function", target=JOESTAR.bias_relu.default)
        assert fused.args[1].name == "model_mix_bias" and fused.args[2] is not None
        assert count(gm, JOESTAR.add_bias.default) == 0
        assert (fused.args[0].target is ATEN.linear.default) == (not names)


def steep(block, x):
    """Every destination has an edge: only in padded slots is the factor 1e304, and trained rows times it infinite."""
    rows, f = own(block, x) * 1e6, 1 + (block.in_degrees() == 0).double()[:, None] * 1e304
    return [rows, rows * f, rows * (f + 1)]


@pytest.mark.parametrize("choice", ["rows", "results", "grouped"])
def test_large_factors_of_padded_slots_reach_nothing(choice, monkeypatch):
    monkeypatch.setattr(scaled_linear, "_LEAST_ROWS", 1)
    case = captured(model(steep, last), disable=ON, graph=small_graph().add_self_loops())
    off, on = again(case, OFF), again(case, ON, {"factors:model_mix_weight": choice})
    expected = off.exact(off.seeds(), 0)
    grouped = count(on.program.captured.gm, JOESTAR.scaled_linear.default)
    assert expected.loss.isfinite() and grouped == (choice == "grouped")
    same(on.padded(on.seeds(), 0), expected, 1e-9)
