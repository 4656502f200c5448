"""What a step held on to is freed with it: features of a large graph would fill the device otherwise."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import joestar


def used(**options):
    """Weak references to what a step was made of, after it has trained and predicted."""
    torch.manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, 60, (2, 400)), 60)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(60, 6), torch.randint(0, 3, (60,))
    model = joestar.nn.GraphSAGE(6, 4, 2, 3, dropout=0.5)
    adam = torch.optim.Adam(model.parameters())
    step = joestar.compile(model, joestar.NeighborSampler(graph, [3, 3]), F.cross_entropy, adam, warm_up=2, **options)
    idx = torch.arange(40)
    for _ in range(2):
        list(step.epoch(idx, 20))
    step.predict(idx)
    step.evaluate(idx, batch_size=20)
    things = [step, model, graph, graph.ndata["x"], graph.indptr, step.graph.ndata["x"], step.graph.indices]
    return [weakref.ref(thing) for thing in things]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "eager"},
        pytest.param({"execution": "exact"}, marks=pytest.mark.fuzz),
        {"backend": "eager", "first_stage": joestar.LargeBatch(20)},
        pytest.param({"backend": "inductor"}, marks=pytest.mark.fuzz),
    ],
    ids=["padded", "exact", "macro-batches", "compiled"],
)
def test_nothing_is_kept(options):
    found = used(**options)
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
