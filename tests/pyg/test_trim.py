"""Layers over the union of a sample's hops compute only rows that somebody reads, and what they give stays PyG's."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest
from lowering.harness import seeded
from torch import nn
from torch_geometric import nn as gnn

import joestar
from pyg.common import expected, toy_graph

pytestmark = [pytest.mark.usefixtures("cheapest_captures"), pytest.mark.every(2)]

SEEDS = torch.tensor([3, 17, 40, 5, 59, 8, 22, 31])
BATCHES = (SEEDS, torch.tensor([51, 53]), torch.tensor([22, 31, 22, 0, 44, 12]))
WEIGHT = ("edge_weight",)


class ReadsAll(nn.Module):
    """The second layer is told the mean of the first one's rows over all nodes of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = gnn.SAGEConv(8, 8), gnn.SAGEConv(8, 8), gnn.SAGEConv(8, 4)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index) + x.mean(0, keepdim=True)
        return self.last(x, edge_index)


class Skips(nn.Module):
    """The last layer sees the features and what the first one made of them; edges are also read backwards."""

    def __init__(self, backwards: bool):
        super().__init__()
        self.first, self.last, self.backwards = gnn.GraphConv(8, 8), nn.Linear(24, 4), backwards
        self.second = gnn.SAGEConv(8, 8) if backwards else gnn.GCNConv(8, 8)

    def forward(self, x, edge_index):
        one = F.elu(self.first(x, edge_index))
        two = self.second(one, edge_index.flip(0) if self.backwards else edge_index)
        return self.last(torch.cat([x, one, two], 1))


def gin(inputs: int, outputs: int):
    return gnn.GINConv(nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs)), train_eps=True)


class Products(nn.Module):
    """Rows times a matrix, and times blocks of it; where ``every``, products of all rows with one another are added."""

    def __init__(self, every: bool = False):
        super().__init__()
        self.convs, self.every = nn.ModuleList([gnn.SAGEConv(8, 8) for _ in range(3)]), every
        self.matrix = nn.Parameter(torch.rand(8, 8) - 0.5)
        self.blocks = nn.Parameter(torch.rand(2, 4, 4) - 0.5)

    def forward(self, x, edge_index):
        for conv in self.convs[:2]:
            x = conv(x, edge_index) @ self.matrix
            if self.every:
                x = x + (x @ x.t() @ x) * 0.01 + torch.einsum("ac,dc->ad", x, x) @ x * 0.01
            x = torch.einsum("abc, bcd -> abd", x.view(-1, 2, 4), self.blocks).reshape(-1, 8).relu()
        return self.convs[2](x, edge_index)[:, :4]


MODELS = {
    "sage": (lambda: gnn.GraphSAGE(8, 8, 3, 4), (), 3),
    "fewer layers than hops": (lambda: gnn.GraphSAGE(8, 8, 2, 4), (), 2),
    "more layers than hops": (lambda: gnn.GraphSAGE(8, 8, 5, 4), (), 3),
    "maximum": (lambda: gnn.GraphSAGE(8, 8, 3, 4, aggr="max"), (), 3),
    "loops and weights": (lambda: gnn.GCN(8, 8, 3, 4), WEIGHT, 3),
    "weights": (lambda: gnn.Sequential("x, edge_index, edge_weight", [
        (gnn.GraphConv(8, 8), "x, edge_index, edge_weight -> x"), nn.ELU(), (gnn.GraphConv(8, 4), "x, edge_index -> x"),
    ]), WEIGHT, 2),
    "own factor trained": (lambda: gnn.Sequential("x, edge_index", [
        (gin(8, 8), "x, edge_index -> x"), (gin(8, 8), "x, edge_index -> x"), (gin(8, 4), "x, edge_index -> x"),
    ]), (), 3),
    "layer norm": (lambda: gnn.GraphSAGE(8, 8, 3, 4, norm="layer_norm", norm_kwargs={"mode": "node"}), (), 3),
    "batch norm": (lambda: gnn.GraphSAGE(8, 8, 3, 4, norm="batch_norm"), (), 1),
    "jumping": (lambda: gnn.GraphSAGE(8, 8, 3, 4, jk="cat"), (), 3),
    "attention": (lambda: gnn.GAT(8, 8, 3, 4, heads=2), (), 3),
    "reads all": (ReadsAll, (), 2),
    "skips": (lambda: Skips(False), (), 2),
    "backwards": (lambda: Skips(True), (), 0),
    "products": (Products, (), 3),
    "products of all": (lambda: Products(True), (), 1),
}  # fmt: skip
"""Name -> (what makes the model, its edge data, aggregations that become smaller)."""
OFTEN = ("sage", "loops and weights", "jumping", "reads all", "backwards")


class Chance(nn.Module):
    """Layers, activations, norms, numbers, skips and seeds' rows at random."""

    def __init__(self, number: int):
        super().__init__()
        draw = random.Random(number)
        kinds = (gnn.SAGEConv, gnn.GCNConv, gnn.GraphConv, gnn.GATConv, gin, gnn.LEConv)
        self.convs = nn.ModuleList([draw.choice(kinds)(8, 8) for _ in range(draw.randint(1, 4))])
        forms = {
            "relu": torch.relu, "elu": F.elu, "norm": lambda h: F.layer_norm(h, (8,)), "times": lambda h: h * 0.5,
            "softmax": lambda h: h.softmax(1), "mean": lambda h: h - h.mean(1, keepdim=True),
            "all": lambda h: h - h.mean(0), "twice": lambda h: torch.cat([h, h], 1)[:, 4:12],
            "heads": lambda h: h.view(-1, 2, 4).flip(1).flatten(1),
        }  # fmt: skip
        self.steps = [[forms[draw.choice(list(forms))] for _ in range(draw.randint(0, 2))] for _ in self.convs]
        self.skips = [draw.random() < 0.4 for _ in self.convs]
        self.last = nn.Linear(8 * (1 + len(self.convs)), 4)

    def forward(self, x, edge_index):
        seen = [x]
        for conv, steps, skip in zip(self.convs, self.steps, self.skips, strict=True):
            h = conv(x, edge_index)
            for step in steps:
                h = step(h)
            x = x + h if skip else h
            seen.append(x)
        return self.last(torch.cat(seen, 1))


def results(output, model) -> list[torch.Tensor]:
    """The output, and gradients of a weighted sum of it."""
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    total, parameters = (output * weight).sum(), list(model.parameters())
    return [output.detach(), *torch.autograd.grad(total, parameters, materialize_grads=True)]


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.fuzz) for number in range(3, 30))])
def test_random_models_give_what_pyg_gives(number):
    compare(Chance(number), ())


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.fuzz) for n in MODELS])
def test_gives_what_pyg_gives(name):
    make, data, smaller = MODELS[name]
    program = compare(make(), data)
    assert {record.name: record.rewrites for record in program.passes}["trim"] == smaller


def compare(model, data):
    """Asserts that outputs and gradients are PyG's on every batch, padded and exact; returns the program."""
    seeded(model.double().train())
    other, graph = copy.deepcopy(model), toy_graph(data)
    sampler = joestar.NeighborSampler(graph, [4, 3, 2], seed=1)
    step = joestar.compile(model, sampler, backend="eager", warm_up=3)
    with cheaper(cheapest):
        found = [results(step(seeds), model) for seeds in BATCHES]
    program = step._executor("logits").program
    for number, (seeds, ours) in enumerate(zip(BATCHES, found, strict=True)):
        theirs = results(expected(other, sampler, seeds, (1, 0, number + 1), data), other)
        (exact,), _ = program.exact(seeds.to(graph.indices.dtype), torch.tensor([1, 0, number + 1]))
        for mine in (ours, results(exact, model)):
            for one, two in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    return program


def test_a_single_layer_samples_while_it_aggregates():
    graph = toy_graph()
    model, sampler = gnn.SAGEConv(8, 4).double(), joestar.NeighborSampler(graph, [4])
    step = joestar.compile(model, sampler, backend="eager", warm_up=2)
    with cheaper(cheapest):
        step(SEEDS)
    targets = {node.target for node in step._executor("logits").program.captured.gm.graph.nodes}
    assert torch.ops.joestar.sample_aggregate_cat.default in targets
    assert torch.ops.joestar.merge_hops.default not in targets
