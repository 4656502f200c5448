"""Spectral norms, whose vectors every training step turns, are those of a plain loop: weights, vectors, predictions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import joestar
from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
from tests.runtime.common import CLASSES, FEATURES, planted_graph, tight_bounds

GRAPH = planted_graph(nodes=500, dtype=torch.float64)
IDX = torch.arange(120)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = joestar.nn.SAGEConv(FEATURES, 8), joestar.nn.SAGEConv(8, 8)
        self.head = spectral_norm(nn.Linear(8, CLASSES), n_power_iterations=2)
        spectral_norm(self.second.lin_l)
        self.double()

    def forward(self, blocks, x):
        return self.head(self.second(blocks[1], self.first(blocks[0], x).relu()).relu())


def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    ours, plain = Net(), Net()
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def rows(model, sampler, seeds, epoch: int, number: int):
    context = SamplingContext(step_key(0, epoch, number, "cpu"))
    blocks = sampler.sample(GRAPH.with_context(context), seeds)
    return model(blocks, GRAPH.ndata["x"][blocks[0].srcs])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_vectors_are_turned_once_per_step(execution, backend, monkeypatch):
    """Also of a batch that outgrows its bounds, frozen ones not at all, and by no prediction."""
    tight_bounds(monkeypatch, 1.0)
    ours, plain = pair()
    sampler = joestar.NeighborSampler(GRAPH, [3, 3])
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (ours, plain)]
    step = joestar.compile(
        ours, sampler, F.cross_entropy, optimizers[0], backend=backend, execution=execution, warm_up=2, patience=1000
    )
    for epoch in range(3):
        losses = list(step.epoch(IDX, 30, shuffle=False))
        for number, seeds in enumerate(IDX.split(30)):
            optimizers[1].zero_grad()
            loss = F.cross_entropy(rows(plain, sampler, seeds, epoch, number), GRAPH.ndata["y"][seeds])
            loss.backward()
            optimizers[1].step()
            torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-10, atol=0, check_dtype=False)
        torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
        predicted = step.predict(IDX[:30])
        plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(predicted, rows(plain, sampler, IDX[:30], -1, 0), rtol=1e-9, atol=1e-12)
        plain.train()
        if epoch == 1:
            for model in (ours, plain):
                model.head.parametrizations.eval()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    if execution == "padded":
        assert step.counters.fallbacks
