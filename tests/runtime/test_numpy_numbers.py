"""Whole numbers of NumPy wherever Python's go: the same programs, losses and messages."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ConfigError, SamplerError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")
GRAPH = planted_graph(nodes=600)
GRAPH.train_idx = torch.arange(200)
IDX = torch.arange(120)
MODELS = {
    "GraphSAGE": lambda n: joestar.nn.GraphSAGE(n(FEATURES), n(8), n(2), n(CLASSES)),
    "GAT": lambda n: joestar.nn.GAT(n(FEATURES), n(8), n(2), n(CLASSES), heads=n(2)),
    "GCN": lambda n: joestar.nn.GCN(n(FEATURES), n(8), n(2), n(CLASSES)),
    "GIN": lambda n: joestar.nn.GIN(n(FEATURES), n(8), n(2), n(CLASSES)),
}
SAMPLERS = {
    "list": lambda n: joestar.NeighborSampler(GRAPH, [n(3), n(2)], seed=n(5)),
    "array": lambda n: joestar.NeighborSampler(GRAPH, np.array([3, 2]), seed=n(5)),
    "layers": lambda n: joestar.LayerDependentSampler(GRAPH, [n(60), n(40)], seed=n(5)),
    "layers as an array": lambda n: joestar.LayerDependentSampler(GRAPH, np.array([60, 40]), seed=n(5)),
}


def losses(n, model="GraphSAGE", sampler="list", **options) -> list[float]:
    """Of two epochs; every number goes through ``n``."""
    torch.manual_seed(0)
    net = MODELS[model](n)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    options = {"backend": "eager", "warm_up": n(3), "patience": n(2), "accumulate": n(1), **options}
    step = joestar.compile(net, SAMPLERS[sampler](n), F.cross_entropy, optimizer, **options)
    history = step.fit(IDX, IDX[:50], n(2), n(40), n(3), log_every=n(2), loggers=lambda values, at: None)
    step.evaluate(IDX, batch_size=n(30))
    return [record.loss for record in history.records]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("model", "sampler", "execution"),
    [("GAT", "list", "padded"), ("GIN", "list", "exact"), *(("GraphSAGE", name, "padded") for name in SAMPLERS)],
)
def test_training(model, sampler, execution):
    given = [losses(n, model, sampler, execution=execution) for n in (int, np.int64)]
    assert given[0] == given[1]


def test_graph_level():
    graph = GRAPH.keyed(np.int64(1), np.int32(0), np.uint8(2))
    same = GRAPH.keyed(1, 0, 2)
    for k in (3, -1):
        picked = graph[:, IDX].individual_sample(np.int64(k))
        assert torch.equal(picked.indices, same[:, IDX].individual_sample(k).indices)
        graph, same = GRAPH.keyed(k), GRAPH.keyed(k)
    block = GRAPH.keyed(1)[:, IDX].collective_sample(np.int64(40))
    assert torch.equal(block.srcs, GRAPH.keyed(1)[:, IDX].collective_sample(40).srcs)


def test_first_stages_and_parts(tmp_path):
    n = np.int64
    parts = joestar.partition(GRAPH, n(4), passes=n(2), seed=n(1))
    assert torch.equal(parts.assignment, joestar.partition(GRAPH, 4, passes=2, seed=1).assignment)
    first = joestar.Partitions(parts, n(2), hubs=n(3), hub_steps=n(2), halo_fanout=n(2), max_age=n(4), hot=n(5))
    for value in (first.group, first.hubs, first.hub_steps, first.halo_fanout, first.max_age, first.hot):
        assert type(value) is int
    assert joestar.Partitions(parts, 2, ahead=n(2)).fanouts == [-1, -1]
    assert joestar.Partitions(parts, 2, ahead=[n(2), n(-1)]).fanouts == [2, -1]
    large = joestar.LargeBatch(n(50), hot=n(7))
    assert type(large.num_seeds) is int and type(large.hot) is int
    found = losses(n, first_stage=large, batch_size=n(40))
    assert found == losses(int, first_stage=joestar.LargeBatch(50, hot=7), batch_size=40)


def test_inference_and_layers():
    n = np.int64
    for make in MODELS.values():
        torch.manual_seed(0)
        model = make(n).eval()
        for options in ({}, {"layers": n(2), "batch_size": n(100), "memory_budget": n(1 << 30)}):
            assert joestar.inference(model, GRAPH, **options).shape == (600, CLASSES)
    mlp = joestar.nn.MLP([n(4), n(3), n(2)], norm=None)
    assert all(type(width) is int for width in mlp.channel_list)
    assert joestar.nn.NodeEmbedding(n(600), n(FEATURES), mlp).table.weight.shape == (600, FEATURES)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: joestar.NeighborSampler(GRAPH, [np.int64(0)]), SamplerError),
        (lambda: joestar.NeighborSampler(GRAPH, [np.float64(3)]), SamplerError),
        (lambda: joestar.NeighborSampler(GRAPH, [np.bool_(True)]), SamplerError),
        (lambda: joestar.nn.GraphSAGE(4, np.int64(-8), 2, 3), ConfigError),
        (lambda: joestar.partition(GRAPH, np.int64(0)), ConfigError),
    ],
)
def test_what_is_impossible_stays_so(call, error):
    with pytest.raises(error):
        call()
