"""Scores of products that nothing else reads: computed from the rows in front, the same numbers, and when not."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

from joestar import fn

from .graphs import ATEN, Model, captured_each, count, only, reasons

PATTERN = "linear-scores"
ON, OFF = only("extract-select", PATTERN), only("extract-select")
HEADS, WIDTH = 2, 4


def attention(score):
    """Two layers of attention whose scores are ``score(m, features)`` ``[E, heads]`` of edges, heads or none."""

    def layers(m, blocks, x):
        for block in blocks:
            features = torch.stack([(block.eids % 7).to(x.dtype), (block.eids % 3).to(x.dtype), x[block.indices, 0]], 1)
            scores = score(m, features)
            scores = scores if scores.dim() == 1 else scores.sum(1)
            x = block.pull(fn.u_mul_e(x, block.edge_softmax(scores)), "sum")
        return x

    return layers


def heads(m, f):
    return (m.lin(f).unflatten(-1, (HEADS, WIDTH)) * m.att).sum(-1)


FORMS = {
    "heads": (heads, False, (1, HEADS, WIDTH)),
    "heads with a bias": (heads, True, (1, HEADS, WIDTH)),
    "a vector per head, first": (
        lambda m, f: (m.att * m.lin(f).view(-1, HEADS, WIDTH)).sum(2), True, (HEADS, WIDTH)),
    "one head": (lambda m, f: (m.lin(f) * m.att).sum(-1), True, (HEADS * WIDTH,)),
    "one head, a row": (lambda m, f: (m.lin(f) * m.att).sum(1), False, (1, HEADS * WIDTH)),
    "two scores": (lambda m, f: heads(m, f) + (m.lin(f).unflatten(-1, (HEADS, WIDTH)) * m.att.exp()).sum(-1), True,
                   (1, HEADS, WIDTH)),
    "with and without heads": (lambda m, f: heads(m, f) + (m.lin(f) * m.att.flatten()).sum(-1)[:, None], True,
                               (1, HEADS, WIDTH)),
}  # fmt: skip


def model(score, bias: bool, shape) -> Model:
    torch.manual_seed(0)
    att = nn.Parameter(torch.randn(shape))
    return Model(attention(score), lin=nn.Linear(3, HEADS * WIDTH, bias=bias), att=att)


def widths(case) -> list[int]:
    return [int(node.args[1].meta["val"].shape[0]) for node in case.program.captured.gm.graph.nodes
            if node.target is ATEN.linear.default]  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", FORMS)
def test_same_numbers(name):
    off, on = captured_each(model(*FORMS[name]), disables=(OFF, ON))
    assert HEADS * WIDTH in widths(off) and HEADS * WIDTH not in widths(on)
    assert sum(place.fired for place in on.program.places if place.pattern == PATTERN) == 2
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


REFUSED = {
    "another reader": (lambda m, f: heads(m, f) + m.lin(f).tanh().sum(1, keepdim=True), "also read by aten.tanh"),
    "an activation": (lambda m, f: (m.lin(f).relu().unflatten(-1, (HEADS, WIDTH)) * m.att).sum(-1), None),
    "a vector per row": (
        lambda m, f: (m.lin(f).unflatten(-1, (HEADS, WIDTH)) * f[:, :1, None] * m.att).sum(-1), None),
    "its own square": (lambda m, f: (m.lin(f) * m.lin(f)).sum(-1) + m.att.sum(), None),
    "the sum of the heads": (lambda m, f: (m.lin(f).unflatten(-1, (HEADS, WIDTH)) * m.att).sum(1), None),
    "a maximum": (lambda m, f: (m.lin(f).unflatten(-1, (HEADS, WIDTH)) * m.att).amax(-1), None),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    score, reason = REFUSED[name]
    off, on = captured_each(model(score, True, (1, HEADS, WIDTH)), disables=(OFF, ON))
    places = [place for place in on.program.places if place.pattern == PATTERN]
    assert not any(place.fired for place in places)
    assert reason is None or any(reason in found for found in reasons(on, PATTERN))
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)


def test_products_that_are_aggregated_keep_their_order():
    """Their scores are ``spmm-gemm-order``'s."""

    def layer(m, blocks, x):
        for block in blocks:
            h = m.lin(x)
            x = block.pull(fn.u_mul_e(h, block.edge_softmax((h * m.att).sum(-1)[block.indices])), "sum")
        return x

    parts = {"lin": nn.Linear(NUM_FEATURES, NUM_FEATURES), "att": nn.Parameter(torch.randn(NUM_FEATURES))}
    off, on = captured_each(Model(layer, **parts), disables=(OFF, ON))
    assert count(on.program.captured.gm, ATEN.linear.default) == count(off.program.captured.gm, ATEN.linear.default)
    assert any("also read by joestar.spmm" in reason for reason in reasons(on, PATTERN))
