"""Gather-attention: the first layer reads features in place, the same numbers, and every reason not to."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import JOESTAR, Model, again, captured, count, only, reasons
from .together import captured_together

PATTERN = "gather-attention"
BASE = ("extract-select", "sample-structural", "spmm-gemm-order")
ON, OFF = only(*BASE, PATTERN, "gather-aggregate"), only(*BASE)
HEADS, WIDTH = 2, 3


def gat(**options):
    torch.manual_seed(0)
    return jnn.GAT(NUM_FEATURES, 8, 2, 4, **{"heads": 2, "dropout": 0.5, **options})


class Attention(nn.Module):
    """One layer, written by hand; the arguments replace a part of it each."""

    def __init__(self, bias=False, other=None, own_scores=True, act=F.leaky_relu, norm=False, project=True,
                 plus=None):  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.src, self.dst = nn.Linear(NUM_FEATURES, HEADS, bias=bias), nn.Linear(NUM_FEATURES, HEADS, bias=False)
        self.other, self.own_scores, self.act, self.norm, self.project = other, own_scores, act, norm, project
        self.weight = nn.Parameter(torch.randn(HEADS, WIDTH, NUM_FEATURES) / 3)
        self.plus, self.of_edges = plus, nn.Parameter(torch.randn(2, HEADS))

    def forward(self, block, x):
        own = x[: block.num_dst] if self.own_scores else x[: block.num_dst] * 2
        src = self.src(F.normalize(x) if self.norm else x)
        z = block.apply_edges(fn.u_add_v(src, self.dst(own)))
        if self.plus is not None:
            features = torch.stack([block.eids % 7, block.eids % 3], 1).to(x.dtype) / 4
            z = self.plus(z, features @ self.of_edges)
        alpha = block.edge_softmax(self.act(z))
        y = block.pull(fn.u_mul_e(x.unsqueeze(1), alpha), "sum")
        if self.project:
            y = torch.ops.joestar.head_linear(y, self.weight)
        y = y.flatten(1)
        return y if self.other is None else y + self.other(block, x, src).mean(1, keepdim=True)


def layer(**options):
    width = HEADS * (WIDTH if options.get("project", True) else NUM_FEATURES)
    return Model(lambda self, blocks, x: self.layer(blocks[0], x), width, layer=Attention(**options))


def chosen(case, attention="in-place"):
    """A traced case under these choices."""
    choices = {site.key: "aggregate-first" for site in case.program.sites if site.kind == "order"}
    sites = again(case, choices=choices).program.sites
    return again(case, choices=choices | {site.key: attention for site in sites if site.kind == "attention"})


def gathers(case):
    return count(case.program.captured.gm, JOESTAR.gather_attend_linear.default)


@functools.cache
def known(name: str):
    """The traced model of ``MODELS`` after the passes."""
    return by_hand()[name] if name in BY_HAND else layered()[name]


@functools.cache
def by_hand():
    return captured_together({name: layer(**options) for name, options in BY_HAND.items()}, (3,), disable=ON)


@functools.cache
def layered():
    models = {name: make() for name, make in MODELS.items()}
    return captured_together(models, (3, 2), disable=ON)


def test_before_and_after():
    before, after = (chosen(again(known("gat"), disable)).program.captured.gm for disable in (OFF, ON))
    for op, old, new in (
        ("gather_attend_linear", 0, 1),
        ("sampled_self_loops", 0, 1),
        ("compact", 2, 1),
        ("spmm", 2, 1),
    ):
        target = getattr(JOESTAR, op).default
        assert (count(before, target), count(after, target)) == (old, new), op


MODELS = {
    "gat": gat,
    "no dropout": lambda: gat(dropout=0.0, heads=4),
    "one head": lambda: gat(heads=1, negative_slope=0.05),
    "no loops": lambda: gat(add_self_loops=False),
}
BY_HAND = {
    "by hand": {},
    "scores of edges": {"plus": lambda z, e: z + e},
    "scores of edges in front": {"plus": lambda z, e: e + (e.tanh() + z)},
}


@pytest.mark.parametrize("name", [*MODELS, *BY_HAND])
@pytest.mark.every(2)
def test_same_numbers(name):
    """Seeds stand twice in a batch, and the graph has self-loops and duplicate edges."""
    on, off = (chosen(again(known(name), disable)) for disable in (ON, OFF))
    assert gathers(on) == 1
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-9)
        same(on.padded(on.seeds(batch), step), expected, 1e-9)


def test_a_choice():
    case = chosen(known("gat"), "stored")
    assert gathers(case) == 0
    assert "storing the gathered rows is chosen" in reasons(case, PATTERN)


REFUSED = {
    "a biased score": ({"bias": True}, "the scores are no products of the rows"),
    "scores of other rows": ({"norm": True}, "the sources' scores are those of other rows"),
    "own rows changed": ({"own_scores": False}, "the destinations' scores are not those of their own rows"),
    "another reader": ({"other": lambda b, x, s: b.pull(fn.copy_u(x), "mean")}, "another reader"),
    "scores read twice": ({"other": lambda b, x, s: b.pull(fn.copy_u(s), "mean")}, "another reader"),
    "no product": ({"project": False}, "the weighted sums are not read by one product per head"),
    "another activation": ({"act": torch.tanh}, "the logits are no leaky ReLU"),
}


@functools.cache
def refused():
    return captured_together({name: layer(**options) for name, (options, _) in REFUSED.items()}, (3,), disable=ON)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    case, reason = chosen(refused()[name]), REFUSED[name][1]
    assert gathers(case) == 0
    assert any(reason in found for found in reasons(case, PATTERN)), reasons(case, PATTERN)


def test_features_that_need_gradients():
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].clone().requires_grad_()
    case = captured(layer(), (3,), disable=ON, graph=graph)
    assert gathers(case) == 0
    assert "the features need gradients" in reasons(case, PATTERN)
