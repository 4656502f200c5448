"""Values that a program rounds to 16 bits are rounded, compiled by Inductor as well."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import joestar
from joestar import fn
from joestar.runtime.inductor import rounds
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


def test_straight_through_as_in_plain_pytorch():
    graph, seeds, found = planted_graph(), torch.arange(40), []
    for options in ({}, {"execution": "exact"}):
        model = Quantised()
        logits = joestar.compile(model, joestar.NeighborSampler(graph, [3]), **options)(seeds)
        logits.square().sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    assert found[1][0].abs().max() > 1e-5  # what rounding leaves
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())


@pytest.mark.parametrize(("f", "expected"), [
    (lambda x: x.half().float(), True), (lambda x: x.bfloat16() * 2, True), (lambda x: x.double().float(), False),
    (lambda x: x.sin(), False),
])  # fmt: skip
def test_which_programs_round(f, expected):
    gm = make_fx(f, pre_dispatch=True, tracing_mode="fake")(torch.ones(3))
    assert rounds(gm) is expected
    with torch.autocast("cpu", torch.bfloat16):
        back = any("float32" in str(node.args[1:]) for node in gm.graph.nodes)
        assert rounds(gm) is (expected and back)
