"""Graphs of fronts and backs that take turns on two streams: the numbers of one graph, and nothing that waits.

The logic runs on CPUs: ``runtime/test_prefetch.py``, with stand-ins for graphs and streams.
"""

import pytest
import torch
import torch.nn.functional as F
from runtime.common import tight_bounds

import joestar
from joestar.bench.measure import launches
from joestar.bench.planted import planted
from joestar.store import FeatureStore

from .test_step_graph import BATCH, SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]


def make(where: str = "resident", **options):
    """A step that fixes the order of its sums: with and without prefetch they have the same bits."""
    torch.manual_seed(0)
    graph = planted(SHAPE, "cuda")
    if where != "resident":
        hot = torch.arange(0, SHAPE.nodes, 5) if where == "cached" else None
        graph.ndata["x"] = FeatureStore(graph.ndata["x"].cpu(), "cuda", hot=hot)
    net = joestar.nn.GraphSAGE(24, 32, 3, 6, dropout=0.5, norm="batch_norm").cuda()
    sampler = joestar.NeighborSampler(graph, [8, 5, 3], seed=5)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    return joestar.compile(net, sampler, F.cross_entropy, optimizer, **{"deterministic": True, **options})


def losses_of(step, interrupted: bool = True) -> list[float]:
    found, idx = [], step.graph.train_idx
    for epoch in range(2):
        for position, loss in enumerate(step.epoch(idx, BATCH)):
            found.append(loss)
            if interrupted and position == 3:
                found.append(step(idx[:150]))
            if interrupted and position == 6:
                found.append(torch.tensor(step.evaluate(idx[:500])["accuracy"]))
            if interrupted and position == 9 and epoch == 0:
                step.graph.ndata["y"][:5000] = 0
    return [float(loss) for loss in found]


def same(ours, theirs) -> None:
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name


@pytest.mark.parametrize("where", ["resident", "pinned", "cached"])
def test_the_same_bits_as_one_graph(where):
    ours, plain = make(where, prefetch=True), make(where)
    assert losses_of(ours) == losses_of(plain)
    same(ours, plain)
    assert ours.counters.prefetched > 15 and ours.counters.padded_steps == ours.counters.steps


@pytest.mark.parametrize("patience", [1000, 2])
def test_overflows_are_redone_and_graphs_captured_again(monkeypatch, patience):
    tight_bounds(monkeypatch, 1.0)
    ours, plain = (make("pinned", prefetch=ahead, patience=patience, backend="eager") for ahead in (True, False))
    assert losses_of(ours) == losses_of(plain)
    same(ours, plain)
    assert ours.counters.fallbacks == plain.counters.fallbacks > 1


@pytest.mark.parametrize(("where", "graphs"), [("resident", 2), ("pinned", 3)])
def test_few_graphs_per_step_and_no_synchronisation(where, graphs):
    step = make(where, prefetch=True, deterministic=False)
    losses = step.epoch(step.graph.train_idx, BATCH)
    next(losses), next(losses)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            next(losses)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = launches(lambda: next(losses))
    assert found["syncs"] == 0 and graphs <= found["launches"] <= graphs + 1, (
        found
    )  # and the number of the front's step


def test_steps_on_streams_of_the_users():
    ours, plain = make("pinned", prefetch=True), make("pinned")
    streams = [torch.cuda.Stream() for _ in range(3)]
    found, epoch = [], ours.epoch(ours.graph.train_idx, BATCH)
    for position in range(len(epoch)):
        with torch.cuda.stream(streams[position % 3]):
            found.append(next(epoch))
    torch.cuda.synchronize()
    assert [float(loss) for loss in found] == [float(loss) for loss in plain.epoch(plain.graph.train_idx, BATCH)]


def test_gradients_are_those_of_the_latest_step():
    ours, plain = make("pinned", prefetch=True), make("pinned")
    idx = ours.graph.train_idx
    for _ in zip(ours.epoch(idx, BATCH), plain.epoch(idx, BATCH), strict=True):
        for mine, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)


def test_memory_of_old_graphs_is_freed():
    step = make("pinned", prefetch=True, backend="eager")
    held = []
    for _ in range(5):
        step._runner._captured = ()
        losses_of(step, interrupted=False)
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= 1.02 * held[1], held
