"""Weighted and layer-dependent samplers through ``joestar.compile``: padded training equals exact training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError, SamplerError
from tests.runtime.common import CLASSES, FEATURES, planted_graph, states_agree, tight_bounds, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 430)


def _graph():
    graph = planted_graph(nodes=600, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=generator)
    graph.edata["f"] = torch.randn(graph.num_edges, 4, generator=generator, dtype=torch.float64)
    return graph


class EdgeNet(nn.Module):
    """Messages gated by edge features, weighted by edge weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.gates = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])

    def forward(self, blocks, x):
        h = self.first(x)
        for gate, block in zip(self.gates, blocks, strict=True):

            def message(edges, gate=gate):
                weight = edges.data["w"].to(edges.src["h"].dtype)
                return edges.src["h"] * gate(edges.data["f"]).sigmoid() * weight[:, None]

            h = F.dropout(F.elu(h[: block.num_dst] + block.pull(message, "sum", src={"h": h})), 0.2, self.training)
        return self.last(h)


SAMPLERS = {
    "weighted": lambda graph: joestar.NeighborSampler(graph, [5, 3], seed=7, probs="w"),
    "weighted, replaced": lambda graph: joestar.NeighborSampler(graph, [4, 3], True, 7, graph.edata["w"]),
    "layers": lambda graph: joestar.LayerDependentSampler(graph, [60, 90], seed=7),
}


def _step(sampler, graph, execution, **options):
    torch.manual_seed(0)
    net = EdgeNet().double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    return joestar.compile(
        net, SAMPLERS[sampler](graph), F.cross_entropy, optimizer, execution=execution, backend="eager", **options
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_padded_training_equals_exact_training(sampler):
    graph = _graph()
    padded, exact = (_step(sampler, graph, execution) for execution in ("padded", "exact"))
    losses = train(padded, IDX)
    assert losses == pytest.approx(train(exact, IDX), rel=1e-10)
    assert losses[-1] < losses[0]
    states_agree(padded, exact, 1e-8)
    assert padded.counters.padded_steps == padded.counters.steps == 10


def test_overflows_are_redone(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    graph = _graph()
    padded = _step("weighted", graph, "padded", patience=1000)
    exact = _step("weighted", graph, "exact")
    assert train(padded, IDX) == pytest.approx(train(exact, IDX), rel=1e-9)
    states_agree(padded, exact, 1e-7)
    assert 0 < padded.counters.fallbacks < 10


def test_weights_may_not_be_replaced_after_compile():
    graph = _graph()
    step = _step("weighted, replaced", graph, "exact")
    train(step, IDX[:100], epochs=1)
    step.sampler.probs = torch.ones(graph.num_edges)
    with pytest.raises(ChangedAfterCompileError, match=r"sampler\.probs was replaced"):
        train(step, IDX[:100], epochs=1)


class Disordered:
    """Samples for the seeds in another order than they were asked for."""

    seed = 7

    def __init__(self, graph, change):
        self.graph, self.change = graph, change

    def sample(self, graph, seeds):
        near = graph[:, self.change(seeds)].individual_sample(3)
        return [graph[:, near.srcs].individual_sample(3), near]


CHANGES = {
    "sorted": lambda seeds: torch.sort(seeds, descending=True).values,
    "of others": lambda seeds: (seeds + 1) % 600,
    "each once": lambda seeds: torch.unique(seeds),
}


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_other_seeds_are_refused(change, execution):
    """They would be trained towards labels that are not theirs."""
    graph = planted_graph(nodes=600, dtype=torch.float64)
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=2, out_channels=CLASSES).double()
    sampler, adam = Disordered(graph, CHANGES[change]), torch.optim.Adam(net.parameters())
    step = joestar.compile(net, sampler, F.cross_entropy, adam, execution=execution, backend="eager")
    words = "Disordered.sample: the destinations of the last block must begin with the seeds, in their order"
    with pytest.raises(SamplerError, match=words):
        next(step.epoch(torch.cat([IDX[:30], IDX]), 50))


@pytest.mark.parametrize("seed", [None, "x", 2**64])
def test_seeds_of_samplers_of_ones_own(seed):
    sampler = Disordered(planted_graph(nodes=600), lambda seeds: seeds)
    sampler.seed = seed
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=2, out_channels=CLASSES)
    with pytest.raises(SamplerError, match=r"Disordered.seed must be a whole number in \[-2\*\*63, 2\*\*63\); got "):
        joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters()))
