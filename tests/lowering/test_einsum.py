"""``torch.einsum`` of several tensors where ``opt_einsum``, which asks for sizes, is installed."""

import copy

import pytest
import torch
from torch import nn

import joestar
from joestar import fn
from joestar.lowering.traced_losses import traced_losses
from tests.runtime.common import CLASSES, FEATURES, planted_graph

BACKEND = torch.backends.opt_einsum
AS = {
    "as it is": lambda patch: None,
    "switched off": lambda patch: patch.setattr(BACKEND.m, "enabled", False),
    "assigned": lambda patch: patch.setitem(vars(BACKEND), "enabled", True),
}


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(*shape).double()) for shape in ((FEATURES, 5), (5, CLASSES))
        )

    def forward(self, blocks, x):
        return blocks[0].pull(fn.copy_u(torch.einsum("nf,fk,kc->nc", x, self.first, self.second)), "sum")


@pytest.mark.parametrize("name", AS)
def test_as_in_plain_pytorch_however_it_is_set(name, monkeypatch):
    assert BACKEND.is_available()
    torch.manual_seed(0)
    AS[name](monkeypatch)
    before, set_so = BACKEND.enabled, dict(vars(BACKEND))
    graph, model = planted_graph(dtype=torch.float64), Several()
    plain, seeds = copy.deepcopy(model), torch.arange(30)
    found = joestar.compile(model, joestar.NeighborSampler(graph, [-1]), backend="eager")(seeds)
    found.square().sum().backward()
    assert (BACKEND.enabled, dict(vars(BACKEND))) == (before, set_so)
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    h = graph.ndata["x"] @ plain.first @ plain.second
    expected = torch.zeros_like(h).index_add(0, rows, h[graph.indices])[:30]
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_within_another_leaves_it_as_it_was():
    held = dict(vars(BACKEND))
    with traced_losses(), traced_losses():
        assert not BACKEND.enabled
    assert dict(vars(BACKEND)) == held
