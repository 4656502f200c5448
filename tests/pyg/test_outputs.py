"""What a model of PyG's form returns: rows of nodes are cut to the seeds, fixed sizes stay, edges' are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as gnn

import joestar
from pyg.common import expected, same_parameters, step_alike, toy_graph


@pytest.fixture(scope="module")
def graph():
    return toy_graph()


class SaysWeights(torch.nn.Module):
    """Attention weights, of the edges, beside its rows."""

    def __init__(self, loops):
        super().__init__()
        self.conv = gnn.GATConv(8, 3, add_self_loops=loops)

    def forward(self, x, edge_index):
        out, (_, weights) = self.conv(x, edge_index, return_attention_weights=True)
        return out, weights


class Scores(torch.nn.Module):
    """A score per edge."""

    def __init__(self, loops):
        super().__init__()
        self.conv = gnn.SAGEConv(8, 3)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return (h[edge_index[0]] * h[edge_index[1]]).sum(1)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", [SaysWeights, Scores])
@pytest.mark.each("kind")
def test_rows_of_edges_among_outputs_are_said_to_be_such(graph, kind, loops):
    torch.manual_seed(0)
    step = joestar.compile(kind(loops).double(), joestar.NeighborSampler(graph, [3]), backend="eager")
    with pytest.raises(joestar.errors.CaptureError, match="has a row per edge of the sample"):
        step.predict(torch.arange(12))


FURTHER = {
    "parameter": lambda model, x, out: model.alpha.softmax(0),
    "table": lambda model, x, out: model.table * 2,
    "sum": lambda model, x, out: x.sum(0),
    "gram": lambda model, x, out: out.T @ out,
}


class AndMore(torch.nn.Module):
    """Rows of nodes and, while training, a tensor of a fixed size."""

    def __init__(self, what: str, always: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.what, self.always, self.conv = what, always, gnn.SAGEConv(8, 4)
        self.alpha, self.table = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(60, 3))
        self.double()

    def forward(self, x, edge_index):
        out = self.conv(x, edge_index)
        return (out, FURTHER[self.what](self, x, out)) if self.training or self.always else out


def penalised(outputs, y):
    out, further = outputs
    return F.cross_entropy(out, y) + further.square().sum() / 10


@pytest.mark.parametrize("what", list(FURTHER))
def test_tensors_of_a_fixed_size_are_handed_to_the_loss_whole(graph, what):
    model = AndMore(what)
    other = copy.deepcopy(model)
    sgd, theirs = (torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, other))
    sampler = joestar.NeighborSampler(graph, [3], seed=2)
    step = joestar.compile(model, sampler, penalised, sgd, backend="eager")
    for number, (loss, seeds) in enumerate(step.epoch(torch.arange(12), 6, with_seeds=True)):
        key = (step.seed, 0, number)
        further = {}
        head = other.register_forward_hook(lambda _, __, out: further.setdefault("all", out)[0])  # noqa: B023
        rows = expected(other, sampler, seeds, key, ())
        head.remove()
        wanted = penalised((rows, further["all"][1]), graph.ndata["y"][seeds])
        step_alike(loss, wanted, theirs)
    same_parameters(model, other)


def test_they_are_no_rows_of_predictions(graph):
    step = joestar.compile(AndMore("sum", always=True), joestar.NeighborSampler(graph, [3]), backend="eager")
    for full in (False, True):
        with pytest.raises(joestar.errors.CaptureError, match=r"one row per seed; got shape \(8,\) in output\[1\]"):
            step.predict(torch.arange(12), full=full)


class InADict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = gnn.SAGEConv(8, 6), gnn.SAGEConv(6, 4)

    def forward(self, x, edge_index):
        h = self.first(x, edge_index)
        return {"hidden": h, "scores": (self.last(h.relu(), edge_index),)}


def test_structures_over_the_whole_graph(graph):
    model = InADict().double()
    idx = torch.tensor([5, 59, 5])
    ends = torch.stack([end.long() for end in graph.coo()[:2]])
    with torch.no_grad():
        wanted = model(graph.ndata["x"], ends)
    step = joestar.compile(model, joestar.NeighborSampler(graph, [-1, -1]), backend="eager")
    for found in (step.predict(idx, full=True), joestar.inference(model, graph, idx)):
        torch.testing.assert_close(found["hidden"], wanted["hidden"][idx])
        torch.testing.assert_close(found["scores"][0], wanted["scores"][0][idx])
    torch.testing.assert_close(joestar.inference(model, graph)["hidden"], wanted["hidden"])
