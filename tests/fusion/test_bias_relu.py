"""Bias, ReLU and dropout as one op: where, what stays the same, and when it must not fire."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx, nn

from joestar.fusion import run_passes

from .graphs import ATEN, JOESTAR, Model, again, captured, count, mean, only, reasons

PATTERN = "bias-relu"
BASE = ("extract-select", "bias", "relu-dropout")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def plain_relu(m, blocks, x):
    """A product with a bias, ReLU, another product."""
    return mean(blocks[1], m.b(m.a(mean(blocks[0], x)).relu()))


def relu_and_dropout(m, blocks, x):
    h = F.dropout(m.a(mean(blocks[0], x)).relu(), 0.4, m.training)
    return mean(blocks[1], m.b(h))


def own_vector(m, blocks, x):
    """A vector of its own on aggregated rows, without a product."""
    h = F.dropout((mean(blocks[0], x) + m.vector).relu(), 0.4, m.training)
    return mean(blocks[1], m.b(m.a(h)))


def without_bias(m, blocks, x):
    h = F.dropout(mean(blocks[0], x).relu(), 0.4, m.training)
    return mean(blocks[1], m.b(m.a(h)))


def of_a_sum(m, blocks, x):
    """The bias is in the second term, which the passes before have not put into the first."""
    h = F.dropout((mean(blocks[0], x) + m.a(x[: blocks[0].num_dst])).relu(), 0.4, m.training)
    return mean(blocks[1], m.b(h))


def of_a_sum_without_bias(m, blocks, x):
    return mean(blocks[1], m.b(m.a((mean(blocks[0], x) + m.b(x[: blocks[0].num_dst])).relu())))


SUMS = (of_a_sum, of_a_sum_without_bias)
FORMS = {f.__name__: f for f in (plain_relu, relu_and_dropout, own_vector, without_bias, *SUMS)}
EACH = pytest.mark.parametrize("name", FORMS)


def model(f):
    torch.manual_seed(0)
    parts = {"a": nn.Linear(NUM_FEATURES, NUM_FEATURES), "b": nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)}
    made = Model(f, NUM_FEATURES, **parts)
    made.vector = nn.Parameter(torch.randn(NUM_FEATURES))
    return made.double()


@functools.cache
def known(name: str):
    """The model after the passes, as on a CPU."""
    return captured(model(FORMS[name]), disable=ON)


def fused(gm) -> int:
    return count(gm, JOESTAR.bias_relu.default)


def on_gpu(case, disable=ON):
    """The graph that a GPU would get."""
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    run_passes(gm, list(case.program.lowered_roles), disable, device="cuda", sizes=case.program.sizes)
    return gm


@EACH
def test_before_and_after(name, monkeypatch):
    off = again(known(name), OFF)
    before = off.program.captured.gm
    passes_for(monkeypatch, "cuda")
    on = again(known(name))
    gm = on.program.captured.gm
    assert fused(before) == 0 and fused(gm) == 1
    assert count(gm, ATEN.relu.default) == count(gm, JOESTAR.keyed_dropout.default) == 0
    (node,) = (n for n in gm.graph.nodes if n.target is JOESTAR.bias_relu.default)
    biased, dropped, scale = node.args[1] is not None, node.args[2] is not None, node.args[3]
    assert biased == ("without_bias" not in name)
    assert dropped == (name not in ("plain_relu", "of_a_sum_without_bias"))
    assert (len(node.args) > 4) == name.startswith("of_a_sum")
    assert scale == pytest.approx(1 / 0.6 if dropped else 1.0)
    rows = node.args[0]
    assert rows.target is not ATEN.linear.default or len(rows.args) == 2
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_a_choice_whose_default_is_the_device_s():
    case = known("plain_relu")
    (site,) = (site for site in case.program.sites if site.kind == "epilogue")
    assert (site.key, site.options, site.default) == ("epilogue:0", ("separate", "fused"), "separate")
    assert "separate is chosen" in reasons(case, PATTERN) and fused(case.program.captured.gm) == 0
    assert fused(again(case, choices={"epilogue:0": "fused"}).program.captured.gm) == 1
    assert fused(on_gpu(case)) == 1


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda m, blocks, x: mean(blocks[1], m.a(mean(blocks[0], x).relu())), "no bias is added in front of it"),
        (lambda m, blocks, x: _read_twice(m, blocks, x), "the rows with the bias have another reader"),
        (lambda m, blocks, x: mean(blocks[1], m.frozen(mean(blocks[0], x)).relu()), "the bias needs no gradients"),
    ],
    ids=["no-bias", "another-reader", "no-gradient"],
)
def test_must_not_fire(f, reason):
    made = model(f)
    made.frozen = nn.Linear(NUM_FEATURES, NUM_FEATURES).double()
    made.frozen.bias.requires_grad_(False)
    case = captured(made, disable=ON)
    assert reason in reasons(case, PATTERN) and fused(on_gpu(case)) == 0


def _read_twice(m, blocks, x):
    h = m.a(mean(blocks[0], x))
    return mean(blocks[1], h.relu() + h)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_op_and_its_gradients(dropped):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(9, 37, dtype=torch.float64, generator=random, requires_grad=True)
    bias = torch.randn(37, dtype=torch.float64, generator=random, requires_grad=True)
    bits, p = torch.randint(-(2**31), 2**31, (9, 2), generator=random, dtype=torch.int32), 0.4
    args = (bits, 1 / (1 - p)) if dropped else (None, 1.0)
    y, _ = torch.ops.joestar.bias_relu(x, bias, *args)
    expected = (x + bias).relu()
    if dropped:
        expected = torch.ops.joestar.dropout_apply(expected, bits, p, False)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(value, (x, bias), grad) for value in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.library.opcheck(torch.ops.joestar.bias_relu, (x, bias, *args))


def test_nan_passes():
    x = torch.tensor([[float("nan"), 1.0, -1.0]], requires_grad=True)
    y, _ = torch.ops.joestar.bias_relu(x, torch.zeros(3), None, 1.0)
    assert y[0, 0].isnan() and y[0, 1:].tolist() == [1, 0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [[1, 1, 0]]
