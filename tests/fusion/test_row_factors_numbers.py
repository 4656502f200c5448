"""Factors of rows behind the product that reads them, where numbers are awkward: 0, infinite, 16 bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, same, small_graph
from torch import fx

import joestar
from joestar.fusion import run_passes
from joestar.ops.dense import scaled_linear

from .graphs import ATEN, JOESTAR, again, captured, captured_each, count, mean, only
from .row_factor_forms import (
    CLEAN,
    OFF,
    ON,
    PATTERN,
    SCALED,
    chosen,
    last,
    model,
    own,
    places,
    pna,
    turned,
)


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
