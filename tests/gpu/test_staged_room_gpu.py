"""Steps with more seeds than were planned for, in CUDA graphs: those of the whole graph on the GPU."""

import gc

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.stages import LargeBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NODES, EDGES, BATCH, LARGER = 20_000, 100_000, 20, 1_000


@pytest.mark.parametrize("book", ["0", "1"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_larger_steps_are_those_of_the_whole_graph(monkeypatch, backend, book):
    """Between and within epochs; of the arena that was nothing stays on the GPU."""
    monkeypatch.setenv("JOESTAR_GPU_BOOK", book)
    torch.manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, EDGES)), NODES)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(NODES, 256), torch.randint(0, 4, (NODES,))
    graph.train_idx, known = torch.randperm(NODES)[:2_000], torch.arange(4_000)
    found = []
    for staged in (True, False):
        torch.manual_seed(1)
        net, here = joestar.nn.GraphSAGE(256, 16, 2, 4).cuda(), graph if staged else graph.to("cuda")
        options = {"memory": "1GiB", "first_stage": LargeBatch(BATCH, hot=500), "batch_size": BATCH} if staged else {}
        step = joestar.compile(
            net, joestar.NeighborSampler(here, [-1, -1], seed=5), F.cross_entropy,
            torch.optim.SGD(net.parameters(), 0.01), backend=backend, **options,
        )  # fmt: skip
        idx = here.train_idx
        epoch = step.epoch(idx, BATCH)
        losses = [next(epoch) for _ in range(5)]
        predicted = [step.predict(known.to(idx.device), LARGER)]
        losses += [*epoch, step(idx[:LARGER]), *step.epoch(idx, LARGER), *step.epoch(idx, BATCH)]
        predicted.append(step.predict(known.to(idx.device), LARGER))
        found.append([torch.stack([loss.cpu() for loss in losses]), *(each.cpu() for each in predicted)])
        if staged:
            assert step.traffic.enlarged and step.arena.hot == 500
            assert step.plan.memory <= step.plan.budget
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=2e-3, atol=2e-3)


def test_the_arena_that_was_is_freed():
    torch.manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, EDGES)), NODES)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(NODES, 2048), torch.randint(0, 4, (NODES,))
    graph.train_idx = torch.randperm(NODES)[:2_000]
    net = joestar.nn.GraphSAGE(2048, 16, 2, 4).cuda()
    step = joestar.compile(
        net, joestar.NeighborSampler(graph, [-1, -1], seed=5), F.cross_entropy,
        torch.optim.SGD(net.parameters(), 0.01), backend="eager", memory="2GiB", batch_size=BATCH,
        first_stage=LargeBatch(BATCH),
    )  # fmt: skip
    list(step.epoch(graph.train_idx, BATCH))
    step.predict(graph.train_idx, BATCH)
    gc.collect()
    old, before = rows_of(step), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.predict(graph.train_idx, 5 * BATCH)
    assert step.traffic.enlarged and old > 100 << 20 and rows_of(step) > 0.9 * old
    assert torch.cuda.max_memory_allocated() - before < 0.5 * old  # at no time were both there


def rows_of(step) -> int:
    """Bytes of the arena's features and labels."""
    return sum(value.nbytes for value in step.graph.ndata.values())
