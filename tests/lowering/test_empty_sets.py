"""Batches without edges, of which something is computed from all edges: parameters stay those of plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn

from .harness import NUM_CLASSES, NUM_FEATURES, NUM_NODES, WIDTH, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")

ISOLATED = 6
EDGES = {
    "a mean as a gate": lambda m, b: m * m.mean(0).sigmoid(),
    "centred and scaled": lambda m, b: (m - m.mean(0)) / (m.std(0, unbiased=False) + 1e-5),
    "a variance": lambda m, b: m * m.var(0, unbiased=False),
    "shares": lambda m, b: m.exp() / m.exp().sum(0),
    "shares of everything": lambda m, b: m / m.abs().sum(),
    "a logarithm": lambda m, b: m * m.exp().sum(0).log(),
    "a norm": lambda m, b: m / m.norm(),
    "an inverse root": lambda m, b: m * m.square().sum(0).rsqrt(),
    "their number": lambda m, b: m / b.num_edges,
    "its root": lambda m, b: m / b.num_edges**0.5,
    "correlations": lambda m, b: m @ (m.T @ m / b.num_edges),
    "a mean without gradient": lambda m, b: m / (m.detach().mean() + 1),
    "a mean of what is made of it": lambda m, b: m * (m / (m.mean() + 2)).mean(0),
}


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.first, self.last = form, nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, blocks, x):
        (block,) = blocks
        h = self.first(x)
        of_edges = self.form(block.apply_edges(fn.copy_u(h)), block)
        return self.last(block.pull(fn.copy_e(of_edges), "sum") + h[: block.num_dst])


@pytest.mark.every(3)
@pytest.mark.parametrize("name", EDGES)
def test_training_goes_on_behind_a_batch_without_edges(name):
    graph = small_graph(isolated=ISOLATED)
    sampler = joestar.NeighborSampler(graph, [3])
    torch.manual_seed(0)
    model = Net(EDGES[name]).double()
    plain = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(net.parameters(), 0.1) for net in (model, plain))
    step = joestar.compile(model, sampler, F.cross_entropy, ours, backend="eager", slack=0.5)
    alone = torch.arange(NUM_NODES - 4, NUM_NODES)
    seeds = torch.cat([torch.arange(8), alone, torch.arange(8)])
    losses = []
    for number, (loss, batch) in enumerate(step.epoch(seeds, 4, shuffle=False, with_seeds=True)):
        blocks = sampler.sample(graph.keyed(0, 0, number), batch)
        expected = F.cross_entropy(plain(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][batch])
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        losses.append((loss.item(), expected.item(), blocks[0].num_edges))
    assert [edges for _, _, edges in losses].count(0) == 1
    for loss, expected, _ in losses:
        assert loss == pytest.approx(expected, rel=1e-10)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert step.report().counters.padded_steps == len(losses) - 1
