"""Values that a program rounds to 16 bits are rounded, compiled by Inductor as well."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import joestar
from joestar import fn
from joestar.runtime.rounding import rounds
from tests.runtime.common import CLASSES, FEATURES, planted_graph


class Quantised(nn.Module):
    """Rows and messages rounded straight through: gradients are those of what was not rounded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, blocks, x):
        h = self.lin(x)
        h = h + (h.bfloat16().float() - h).detach()
        pulled = blocks[0].pull(fn.copy_u(h), "mean")
        return self.head(pulled.tanh().half() + 0.0 * pulled) - self.head(pulled.tanh())


@pytest.mark.fuzz
def test_straight_through_as_in_plain_pytorch():
    graph, seeds, found = planted_graph(), torch.arange(40), []
    for options in ({}, {"execution": "exact"}):
        model = Quantised()
        logits = joestar.compile(model, joestar.NeighborSampler(graph, [3]), **options)(seeds)
        logits.square().sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    assert found[1][0].abs().max() > 1e-5  # what rounding leaves
    for ours, exact in zip(*found, strict=True):
        atol = 1e-2 * exact.abs().max().item() + 1e-6  # the bias of the head cancels: what is left is rounding
        torch.testing.assert_close(ours, exact, rtol=1e-2, atol=atol)


SHORT = torch.ones(3, dtype=torch.bfloat16)
# function of x -> whether it rounds without autocast, and within
FORMS = {
    "cast and back": (lambda x: x.half().float(), True, True),
    "by type": (lambda x: x.type_as(SHORT).float(), True, True),
    "to another tensor": (lambda x: x.to(SHORT).float(), True, True),
    "to a device": (lambda x: x.to("cpu", torch.bfloat16).float(), True, True),
    "copied": (lambda x: torch.empty(3, dtype=torch.half).copy_(x).float(), True, True),
    "promoted": (lambda x: x.half() + x, True, False),
    "something in between": (lambda x: (x.bfloat16() * 2).relu().double(), True, True),
    "of integers": (lambda x: (torch.arange(3).bfloat16() / 3).double() * x, True, True),
    "not widened": (lambda x: x.bfloat16() * 2, False, False),
    "stored by a product": (lambda x: (x.bfloat16()[None] @ torch.ones(3, 1).bfloat16()).float(), False, False),
    "wider than that": (lambda x: x.double().float(), False, False),
    "short from the start": (lambda x: SHORT.float().softmax(0), False, False),
    "no cast": (lambda x: x.sin(), False, False),
}


@pytest.mark.parametrize("name", FORMS)
def test_which_programs_round(name):
    f, plain, within = FORMS[name]
    gm = make_fx(f, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(3))
    assert rounds(gm.graph) is plain
    with torch.autocast("cpu", torch.bfloat16):
        assert rounds(gm.graph) is within


class Cast(nn.Module):
    """What rounding leaves, alone."""

    def __init__(self, cast):
        super().__init__()
        torch.manual_seed(0)
        self.cast, self.lin, self.head = cast, nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("short", torch.ones(1, dtype=torch.bfloat16))

    def forward(self, blocks, x):
        h = self.lin(x)
        return self.head(1000 * blocks[0].pull(fn.copy_u(self.cast(self, h).float() - h), "mean"))


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "cast",
    [
        lambda m, h: h.type_as(m.short),
        pytest.param(lambda m, h: h.to(m.short), marks=pytest.mark.fuzz),
        pytest.param(lambda m, h: h.to(h.device, torch.bfloat16), marks=pytest.mark.fuzz),
        pytest.param(lambda m, h: torch.empty_like(h, dtype=torch.bfloat16).copy_(h), marks=pytest.mark.fuzz),
    ],
)
def test_every_way_to_write_it(cast):
    """Against the model run as it is, on the same blocks: all neighbours."""
    graph, seeds = planted_graph(), torch.arange(40)
    model, sampler = Cast(cast), joestar.NeighborSampler(graph, [-1])
    logits = joestar.compile(model, sampler)(seeds)
    blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
    plain = model(blocks, graph.ndata["x"][blocks[0].srcs])
    assert (plain - model.head.bias).abs().max() > 1e-3
    torch.testing.assert_close(logits, plain, rtol=0.02, atol=0.02 * (plain - model.head.bias).abs().max().item())
