"""Match-Reorder on a GPU: rows loaded beside replayed steps; batches are those of resident features."""

import functools

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench import busy, epoch, epoch_modes
from joestar.bench.match import MatchedEpoch, RowBuffer
from joestar.bench.planted import planted
from joestar.bench.setting import Setting
from joestar.graph_api import Graph
from joestar.store import pin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BATCH = 200


def _compiled(graph, slack: float):
    """A step that learns nothing, so that a loss tells which batch it is of."""
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 32, 2, graph.num_classes, dropout=0.3).cuda()
    sampler, optimizer = joestar.NeighborSampler(graph, [10, 5], seed=3), torch.optim.SGD(net.parameters(), 0.0)
    return joestar.compile(net, sampler, F.cross_entropy, optimizer, slack=slack, warm_up=2, backend="eager")


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize(("room", "slack"), [(30_000, 0.1), (30_000, 0.0), (6_000, 0.1)])
def test_batches_are_those_of_resident_features(reorder, room, slack):
    """Also where batches overflow and are redone, and where rows have no slot."""
    graph = planted("mini")
    near = Graph.from_csc(graph.indptr.cuda(), graph.indices.cuda(), validate=False)
    near.ndata["y"], near.num_classes = graph.ndata["y"].cuda(), graph.num_classes
    buffer = RowBuffer(pin(graph.ndata["x"], "cuda"), torch.arange(500, device="cuda"), room)
    near.ndata["x"] = buffer
    seeds = graph.train_idx.cuda()
    plain, matched = _compiled(graph.to("cuda"), slack), _compiled(near, slack)
    for _ in range(3):
        expected = torch.stack(list(plain.epoch(seeds, BATCH)))
        given = MatchedEpoch(matched, seeds, BATCH, buffer, reorder)
        found = torch.stack(list(given))
        given.close()
        assert sorted(given.seen.order) == list(range(50))
        assert torch.allclose(found, expected[given.seen.order], rtol=2e-3)
        assert expected.unique().numel() > 45, "losses tell batches apart"
        slots = buffer.slot_of.long()
        there = torch.nonzero(slots >= 0).flatten()
        assert torch.equal(buffer.cache[slots[there]].cpu(), graph.ndata["x"][there.cpu()])


def test_how_busy_a_gpu_is():
    """What kernels take over the time that is given for a step, whatever else the GPU does: of a step that is said to
    take a minute they are a part, of one that is said to take none they are all."""
    a = torch.randn(1024, 1024, device="cuda")

    def steps(work):
        while True:
            work()
            yield

    torch.mm(a, a)
    minute = busy.busy_share(steps(lambda: torch.mm(a, a)), a.device, 60.0)
    assert 0 < minute < 0.5
    assert busy.busy_share(steps(lambda: torch.mm(a, a)), a.device, 1e-9) == 1.0
    assert busy.busy_share(steps(lambda: None), a.device, 1e-9) is None


def test_every_way_of_feeding_runs(monkeypatch):
    monkeypatch.setattr(epoch_modes.joestar, "compile", functools.partial(joestar.compile, backend="eager"))
    setting = Setting("mini", "cuda", ("sage",), fanouts=(10, 5), hidden=32, batch_size=200, epochs=1, baselines=())
    found = epoch.run(setting, "8GiB", say=print)  # other tests of this process hold some
    rows = {row["mode"]: row for row in found["rows"]}
    assert not any(row["note"] for row in found["rows"])
    assert rows["match-reorder"]["bus"] < rows["match"]["bus"] < rows["pinned"]["bus"]
    assert all(0 < row["busy"] <= 1 for row in found["rows"])
    assert all(row["predicted_memory"] for mode, row in rows.items() if mode != "cpu")
