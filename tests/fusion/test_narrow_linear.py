"""Products of few columns: another form, the same numbers, and when not."""

import torch
from lowering.harness import SEEDS, Case, same, small_graph
from torch import nn

from joestar.fusion import PASSES, PassContext

from .graphs import ATEN, Model, captured, captured_each, count, mean, only, reasons

PATTERN = "narrow-linear"
ON, OFF = only("extract-select", PATTERN), only("extract-select")


def edges(m, blocks, x):
    """An update of two edge features to sixteen, with and without a bias."""
    for block, lin in zip(blocks, (m.first, m.second), strict=True):
        features = torch.stack([block.eids.double() % 7, block.eids.double() % 3], 1)
        x = block.pull(lambda e, lin=lin, f=features: torch.relu(m.rows(e.src["h"]) + lin(f)), "sum", src={"h": x})
        x = m.back(x)
    return x


def parts():
    return {"first": nn.Linear(2, 16), "second": nn.Linear(2, 16, bias=False), "rows": nn.Linear(6, 16),
            "back": nn.Linear(16, 6)}  # fmt: skip


def test_same_numbers():
    on, off = captured_each(Model(edges, **parts()), disables=(ON, OFF))
    assert [count(case.program.captured.gm, ATEN.addmm.default) for case in (off, on)] == [0, 1]
    assert [count(case.program.captured.gm, ATEN.mm.default) for case in (off, on)] == [0, 1]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_the_gradient_takes_the_fast_form():
    """The derivative for a row-major second factor is ``x.T @ grad``: no product has the few columns on its right."""
    x, grad = torch.randn(50, 2), torch.randn(50, 16)
    weight = torch.randn(16, 2, requires_grad=True)
    y = torch.mm(x, weight.t().clone(memory_format=torch.contiguous_format))
    expected = grad.t() @ x
    torch.testing.assert_close(torch.autograd.grad(y, weight, grad)[0], expected)


def test_must_not_fire():
    frozen = Model(edges, **parts())
    frozen.first.weight.requires_grad_(False)
    assert "the weights need no gradient" in reasons(captured(frozen, disable=ON), PATTERN)
    wide = captured(Model(lambda m, b, x: m.lin(mean(b[1], mean(b[0], x))), lin=nn.Linear(6, 6)), disable=ON)
    assert not [place for place in wide.program.places if place.pattern == PATTERN]


def test_not_on_a_gpu():
    case = Case(Model(edges, **parts()), graph=small_graph(), fanouts=(3, 2), disable=OFF)
    gm = case.trace()
    spec = next(spec for spec in PASSES if spec.name == PATTERN)
    assert spec.run(gm, PassContext(case.program.captured.roles, device="cuda")) == 0
