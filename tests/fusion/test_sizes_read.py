"""Sizes of sets that fused ops no longer make: read as numbers, they are the true ones."""

import pytest
import torch
import torch.nn.functional as F
from runtime.common import CLASSES, FEATURES, planted_graph
from runtime.plain import plain_epoch
from torch import nn

import joestar

pytestmark = pytest.mark.usefixtures("cheapest_captures")


class Scaled(nn.Module):
    """One layer over the features, whose rows are divided by a size of its block: aggregation removes its sources."""

    def __init__(self, layer, size):
        super().__init__()
        self.conv, self.size = layer(FEATURES, CLASSES), size

    def forward(self, blocks, x):
        return self.conv(blocks[0], x) / self.size(blocks[0], x)


SIZES = {
    "sources": lambda b, x: b.num_src,
    "rows": lambda b, x: len(x),
    "edges": lambda b, x: b.num_edges + 1,
    "edges per source": lambda b, x: 1 + b.num_edges / b.num_src,
}


@pytest.mark.parametrize("layer", ["SAGEConv", "GCNConv"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.each("size")
def test_sizes_are_read_behind_fused_sampling(layer, size):
    """The op that makes the set stays, as padding takes the true number from it."""

    def made():
        torch.manual_seed(0)
        model = Scaled(getattr(joestar.nn, layer), SIZES[size]).double()
        return model, torch.optim.SGD(model.parameters(), 0.5)

    graph = planted_graph(dtype=torch.float64, nodes=400)
    sampler, idx = joestar.NeighborSampler(graph, [3], seed=7), torch.arange(90)
    model, sgd = made()
    expected = plain_epoch(model, sampler, F.cross_entropy, sgd, idx, 30)
    for execution in ("padded", "exact"):
        ours, sgd = made()
        step = joestar.compile(ours, sampler, F.cross_entropy, sgd, backend="eager", execution=execution)
        assert [loss.item() for loss in step.epoch(idx, 30, shuffle=False)] == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(dict(ours.state_dict()), dict(model.state_dict()))
