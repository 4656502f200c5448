"""Graph attention as one op: where it fires, what stays the same, and when it must not."""

import functools

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, only, reasons
from .together import captured_together

PATTERN = "attention"
BASE = ("extract-select",)
ON, OFF = only(*BASE, PATTERN), only(*BASE)
HEADS, WIDTH = 2, 3


def gat(**options):
    torch.manual_seed(0)
    return jnn.GAT(NUM_FEATURES, 8, 2, 4, **{"heads": 2, "dropout": 0.5, **options})


@functools.cache
def plain():
    """Two layers of attention, captured: no pass has run."""
    return captured(gat(), (3, 2))


class Attention(nn.Module):
    """One layer, written by hand; the arguments replace a part of it each."""

    def __init__(
        self, act=F.leaky_relu, reduce="sum", message=fn.u_add_v, after=None, shared=False, heads=HEADS, plus=None
    ):  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(NUM_FEATURES, heads * WIDTH)
        self.scores = nn.Linear(NUM_FEATURES, 2 * heads)
        self.act, self.reduce, self.message, self.after = act, reduce, message, after
        self.shared, self.heads, self.plus = shared, heads, plus
        self.of_edges = nn.Parameter(torch.randn(2, heads))

    def forward(self, block, x):
        src, dst = self.scores(x).split(self.heads, 1)
        z = block.apply_edges(self.message(src, dst[: block.num_dst]))
        if self.plus is not None:
            features = torch.stack([block.eids % 7, block.eids % 3], 1).to(x.dtype) / 4
            z = self.plus(z, features @ self.of_edges)
        logits = self.act(z)
        alpha = block.edge_softmax(logits)
        rows = self.lin(x).unflatten(1, (self.heads, WIDTH))
        rows = rows[:, :1] if self.shared else rows
        y = block.pull(fn.u_mul_e(rows, alpha), self.reduce).flatten(1)
        return y if self.after is None else y + self.after(block, logits, alpha)


def layer(**options):
    heads = options.get("heads", HEADS)
    return Model(lambda self, blocks, x: self.layer(blocks[0], x), heads * WIDTH, layer=Attention(**options))


def degree_of(block, logits, alpha):
    """Something that reads the coefficients once more."""
    return block.pull(fn.copy_e(alpha * alpha), "sum").sum(1, keepdim=True)


def entropy_of(block, logits, alpha):
    """Something that reads the logits once more."""
    return block.pull(fn.copy_e(logits), "mean").sum(1, keepdim=True)


def test_before_and_after():
    before, after = (again(plain(), disable).trace() for disable in (OFF, ON))
    for op in ("sddmm", "edge_softmax", "keyed_edge_dropout", "spmm"):
        assert (count(before, getattr(JOESTAR, op).default), count(after, getattr(JOESTAR, op).default)) == (2, 0), op
    assert (count(before, ATEN.leaky_relu.default), count(after, ATEN.leaky_relu.default)) == (2, 0)
    for op in ("attend", "edge_dropout_bits"):
        assert (count(before, getattr(JOESTAR, op).default), count(after, getattr(JOESTAR, op).default)) == (0, 2), op


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0, "heads": 4}, {"heads": 1, "negative_slope": 0.05}], ids=str)
@pytest.mark.every(2)
def test_same_numbers(options):
    case = captured(gat(**options), (3, 2)) if options else plain()
    on, off = again(case, ON), again(case, OFF)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-10)
        same(on.padded(on.seeds(batch), step), expected, 1e-10)
    assert count(on.program.captured.gm, JOESTAR.attend.default) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_each_head_or_of_all(shared):
    on, off = captured_each(layer(shared=shared), (3,), disables=(ON, OFF))
    expected = off.exact(off.seeds(), 0)
    same(on.exact(on.seeds(), 0), expected, 1e-10)
    same(on.padded(on.seeds(), 0), expected, 1e-10)
    (place,) = [place for place in on.program.places if place.pattern == PATTERN]
    assert place.fired
    assert place.detail == ("2 heads, rows shared" if shared else "2 heads")
    (node,) = [node for node in on.trace().graph.nodes if node.target is JOESTAR.attend.default]
    assert node.args[5:] == (0.01, None, 1.0), "a slope left out is that of torch"


def test_with_the_whole_table():
    """Orders of product and aggregation, features read in place: the same numbers as without any pass."""
    everything, nothing = again(plain(), ()), plain()
    expected = nothing.exact(nothing.seeds(), 0)
    same(everything.exact(everything.seeds(), 0), expected, 1e-10)
    same(everything.padded(everything.seeds(), 0), expected, 1e-10)
    orders = {site.key: "update-first" for site in everything.program.sites if site.kind == "order"}
    assert count(again(everything, choices=orders).program.captured.gm, JOESTAR.attend.default) == len(orders) == 2


SCORED = {
    "behind": lambda z, e: z + e,
    "in front": lambda z, e: e + z,
    "several": lambda z, e: e.tanh() + (z + e) + e.square(),
    "as many per end": lambda z, e: e + z + e.detach(),
}
"""Where scores of edges are added to those of both ends."""


@functools.cache
def scored():
    return captured_together({name: layer(plus=plus) for name, plus in SCORED.items()}, (3,), disable=ON)


@pytest.mark.parametrize("name", SCORED)
def test_scores_of_edges(name):
    on = scored()[name]
    off = again(on, OFF)
    (node,) = [node for node in on.trace().graph.nodes if node.target is JOESTAR.attend.default]
    assert len(node.args) == 9
    assert count(on.trace(), JOESTAR.sddmm.default) == 0
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-10)
        same(on.padded(on.seeds(batch), step), expected, 1e-10)


REFUSED = {
    "tanh": ({"act": torch.tanh}, "the logits are no leaky ReLU"),
    "lambda": ({"act": lambda z: F.leaky_relu(z) + 1}, "the logits are no leaky ReLU"),
    "product": ({"message": fn.u_mul_v}, "the logits are no sum of a score of each end"),
    "one end": ({"message": lambda src, dst: fn.copy_u(src)}, "the logits are no sum of a score of each end"),
    "one for all heads": ({"plus": lambda z, e: z + e[:, :1]}, "the logits are no sum of a score of each end"),
    "one for all edges": ({"plus": lambda z, e: z + 0.5}, "the logits are no sum of a score of each end"),
    "twice as much": ({"plus": lambda z, e: z + z}, "the logits are no sum of a score of each end"),
    "weighted": ({"plus": lambda z, e: torch.add(z, e, alpha=2)}, "the logits are no sum of a score of each end"),
    "read twice": ({"plus": lambda z, e: z + (e + z).sigmoid()}, "scores have another reader"),
    "mean": ({"reduce": "mean"}, "the aggregation is a mean"),
    "degree": ({"after": degree_of}, "the coefficients have another reader"),
    "entropy": ({"after": entropy_of}, "the coefficients have another reader"),
}


@functools.cache
def refused():
    return captured_together({name: layer(**options) for name, (options, _) in REFUSED.items()}, (3,), disable=ON)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    case = refused()[name]
    assert count(case.trace(), JOESTAR.attend.default) == 0
    assert reasons(case, PATTERN) == [REFUSED[name][1]]


def test_edge_features_and_returned_coefficients():
    def with_edges(self, blocks, x):
        block = blocks[0]
        return self.conv(block, x, edge_attr=torch.ones(block.num_edges, 2, dtype=x.dtype))

    def returned(self, blocks, x):
        out, (block, alpha) = self.conv(blocks[0], x, return_attention_weights=True)
        return out + block.pull(fn.copy_e(alpha.square()), "sum").sum(1, keepdim=True)

    conv = jnn.GATConv(NUM_FEATURES, WIDTH, heads=2, edge_dim=2, add_self_loops=False)
    case = captured(Model(with_edges, 2 * WIDTH, conv=conv), (3,), disable=ON)
    assert count(case.trace(), JOESTAR.attend.default) == 1
    case = captured(Model(returned, 2 * WIDTH, conv=jnn.GATConv(NUM_FEATURES, WIDTH, heads=2)), (3,), disable=ON)
    assert count(case.trace(), JOESTAR.attend.default) == 0
    assert reasons(case, PATTERN) == ["the coefficients have another reader"]


def test_scores_of_edges_beside_rows_of_its_own():
    """The same with edge features in both layers."""

    def rows(self, blocks, x):
        for conv, block in zip((self.first, self.second), blocks, strict=True):
            features = torch.stack([block.eids % 7, block.eids % 3], 1).to(x.dtype) / 4
            x = conv(block, x, features).relu()
        return x

    options = {"heads": 2, "edge_dim": 2, "add_self_loops": False}
    torch.manual_seed(0)
    convs = {"first": jnn.GATConv(NUM_FEATURES, 3, **options), "second": jnn.GATConv(6, 3, **options)}
    case = captured(Model(rows, 6, **convs), (3, 2), disable=only(*BASE, "linear-scores", "spmm-gemm-order", PATTERN))
    off = again(case, OFF)
    case = again(case, choices={site.key: "aggregate-first" for site in case.program.sites if site.kind == "order"})
    (node,) = [node for node in case.trace().graph.nodes if node.target is JOESTAR.attend_own.default]
    assert len(node.args) == 9
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(case.exact(case.seeds(batch), step), expected, 1e-9)
        same(case.padded(case.seeds(batch), step), expected, 1e-9)


def test_scores_of_shared_rows_belong_to_the_op():
    """Aggregating first, the second layer's attention reads rows of its own, whose scores it makes itself."""
    hooks = ("spmm-gemm-order", PATTERN)
    case = again(plain(), only(*BASE, *hooks))
    case = again(case, choices={site.key: "aggregate-first" for site in case.program.sites if site.kind == "order"})
    assert count(case.program.captured.gm, JOESTAR.attend_own.default) == 1  # the first layer's rows are features
    off = again(plain(), OFF)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(case.exact(case.seeds(batch), step), expected, 1e-9)
        same(case.padded(case.seeds(batch), step), expected, 1e-9)
