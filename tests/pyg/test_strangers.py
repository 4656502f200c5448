"""Nodes and edges that no batch has hold NaN: PyG's layers with edge data train as over the sampled subgraphs alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as gnn

import joestar
from pyg.common import expected, same_parameters, step_alike

NODES = 60


def graph():
    """Node 0 has one edge, the graph's first, from itself."""
    random = torch.Generator().manual_seed(0)
    others = torch.randint(1, NODES, (2, 300), generator=random)
    edges = torch.cat([torch.zeros(2, 1, dtype=torch.int64), others], 1)
    x, y = torch.randn(NODES, 8, generator=random).double(), torch.randint(0, 4, (NODES,), generator=random)
    made = joestar.Graph.from_edge_index(edges, NODES, ndata={"x": x, "y": y})
    made.edata["edge_attr"] = torch.randn(301, 5, generator=random).double()
    made.edata["edge_weight"] = torch.rand(301, generator=random).double() + 0.1
    for data in (made.ndata["x"], made.edata["edge_attr"], made.edata["edge_weight"]):
        data[0] = torch.nan
    return made


class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        if kind == "attention":
            self.first, self.last = gnn.GATConv(8, 8, edge_dim=5), gnn.GATConv(8, 4, edge_dim=5)
        else:
            layers = (gnn.GINEConv(torch.nn.Linear(8, width), edge_dim=5) for width in (8, 4))
            self.first, self.last = layers
        self.weighted = gnn.GraphConv(8, 8)
        self.double()

    def forward(self, x, edge_index, edge_attr, edge_weight):
        h = self.first(x, edge_index, edge_attr) + self.weighted(x, edge_index, edge_weight)
        return self.last(h.tanh(), edge_index, edge_attr)


@pytest.mark.parametrize("kind", ["attention", "messages"])
def test_nothing_of_them_is_read(kind):
    held = graph()
    model = Net(kind)
    other = copy.deepcopy(model)
    sampler = joestar.NeighborSampler(held, [3, 2], seed=2)
    sgd, theirs = (torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, other))
    step = joestar.compile(model, sampler, F.cross_entropy, sgd, backend="eager")
    for number, (loss, seeds) in enumerate(step.epoch(torch.arange(1, 41), 10, with_seeds=True)):
        rows = expected(other, sampler, seeds, (step.seed, 0, number), ("edge_attr", "edge_weight"))
        wanted = F.cross_entropy(rows, held.ndata["y"][seeds])
        step_alike(loss, wanted, theirs)
    same_parameters(model, other)
