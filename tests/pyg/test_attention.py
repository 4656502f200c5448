"""Attention and softmax aggregation of PyG, unmodified: one segment op, losses and gradients those of PyG."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as gnn

import joestar
from pyg.common import expected, toy_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")


class Conv(torch.nn.Module):
    """A convolution, with edge features or without, and a linear map."""

    def __init__(self, conv, width: int):
        super().__init__()
        self.conv, self.last = conv, torch.nn.Linear(width, 4)


class WithEdges(Conv):
    def forward(self, x, edge_index, edge_attr):
        return self.last(self.conv(x, edge_index, edge_attr))


class Plain(Conv):
    def forward(self, x, edge_index):
        return self.last(self.conv(x, edge_index))


MODELS = {
    "TransformerConv": (lambda: WithEdges(gnn.TransformerConv(8, 4, heads=2, edge_dim=4), 8), "total"),
    "GATv2Conv": (lambda: WithEdges(gnn.GATv2Conv(8, 4, heads=2, edge_dim=4, add_self_loops=False), 8), "leaky_relu"),
    "SoftmaxAggregation": (lambda: Plain(gnn.SAGEConv(8, 8, aggr=gnn.SoftmaxAggregation(learn=True)), 8), "column"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_pyg(name):
    make, words = MODELS[name]
    data = ("edge_attr",) if name != "SoftmaxAggregation" else ()
    torch.manual_seed(0)
    graph, model = toy_graph(data), make().double()
    other, sampler = copy.deepcopy(model), joestar.NeighborSampler(graph, [4], seed=2)
    sgd, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step = joestar.compile(model, sampler, F.cross_entropy, sgd, backend="eager", choices={"softmax:hop1": "fused"})
    for number, seeds in enumerate(torch.arange(36).view(3, 12), 1):
        loss = step(seeds)
        good = F.cross_entropy(expected(other, sampler, seeds, (2, -1 - number, 0), data), graph.ndata["y"][seeds])
        theirs.zero_grad()
        good.backward()
        theirs.step()
        torch.testing.assert_close(loss, good.detach())
    for ours, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted)
    (place,) = [p for p in step.report().programs[0].places if p.pattern == "softmax-aggregate"]
    assert place.fired and words in place.detail
