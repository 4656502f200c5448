"""What layers of PyG set on themselves while they run, over the whole graph, changes nothing of later steps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as gnn

import joestar
from joestar.errors import ConfigError
from pyg.common import toy_graph


class Net(torch.nn.Module):
    """One layer, called with what it takes."""

    def __init__(self, layer, *names: str):
        super().__init__()
        self.layer, self.names = layer, names
        self.double()

    def forward(self, x, edge_index, edge_type):
        return self.layer(x, edge_index, *((edge_type,) if "edge_type" in self.names else ()))


LAYERS = {
    "relations": lambda: Net(gnn.RGCNConv(8, 4, 3), "edge_type"),
    "attention over relations": lambda: Net(gnn.RGATConv(8, 4, 3), "edge_type"),
}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_steps_behind_full_inference_are_those_without_it(kind):
    torch.manual_seed(0)
    graph, net = toy_graph(("edge_type",)), LAYERS[kind]()
    weights = copy.deepcopy(net.state_dict())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1]), F.cross_entropy, sgd, backend="eager")
    losses, before = [], dict(vars(net.layer))
    for looks in (False, True):
        net.load_state_dict(weights)
        losses.append([])
        for seeds in torch.arange(30).split(10):
            losses[-1].append(step(seeds).item())
            if looks:
                step.evaluate(torch.arange(60), full=True)
                step.predict(torch.arange(60), full=True)
    assert losses[0] == losses[1]
    after = vars(net.layer)
    assert after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    ends = torch.stack([end.long() for end in graph.coo()[:2]])
    net(graph.ndata["x"], ends, graph.edata["edge_type"])  # in a loop of the user's own, where nobody puts things back
    step(torch.arange(10))


CACHED = {
    "GCNConv": lambda: gnn.GCNConv(8, 4, cached=True),
    "SGConv": lambda: gnn.SGConv(8, 4, cached=True),
    "APPNP": lambda: torch.nn.Sequential(torch.nn.Identity(), gnn.APPNP(2, 0.1, cached=True))[1],
    "EGConv": lambda: gnn.EGConv(8, 8, aggregators=["symnorm"], cached=True),
}


@pytest.mark.parametrize("kind", list(CACHED))
def test_layers_that_keep_the_graph_are_refused_by_name(kind):
    graph, model = toy_graph(("edge_type",)), Net(CACHED[kind]())
    sampler = joestar.NeighborSampler(graph, [3])
    with pytest.raises(ConfigError, match=rf"Net.layer \({kind}\) has cached=True: .* with cached=False"):
        joestar.compile(model, sampler, backend="eager")
    model(graph.ndata["x"], torch.tensor([[1, 2], [0, 1]]), None)
    model.layer.cached = False
    with pytest.raises(ConfigError, match=r"has _cached_\w+, filled by a call before"):
        joestar.compile(model, sampler, backend="eager")
    model.layer.cached = True
    kept = {name: value for name, value in vars(model.layer).items() if name.startswith("_cached_")}
    fresh = Net(CACHED[kind]())
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        ends = torch.stack([end.long() for end in graph.coo()[:2]])
        torch.testing.assert_close(joestar.inference(model, graph), fresh(graph.ndata["x"], ends, None))
    assert all(vars(model.layer)[name] is value for name, value in kept.items())


def test_what_a_first_call_makes_of_a_layer_stays():
    graph, model = toy_graph(("edge_type",)), Net(gnn.SAGEConv(-1, 4))
    found = joestar.inference(model, graph)
    assert model.layer.lin_l.in_channels == 8
    torch.testing.assert_close(joestar.inference(model, graph), found)
