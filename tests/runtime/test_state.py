"""What steps keep between epochs, autocast, and the allocator's switch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ConfigError
from joestar.ops import memory
from joestar.runtime import state as state_module
from joestar.runtime.state import StepState

from .common import CLASSES, FEATURES, make_step, planted_graph, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(100, 900)


def test_losses_handed_out_are_never_written_again(monkeypatch):
    monkeypatch.setattr(state_module, "LOSSES", 20)  # two epochs of eight steps, then another array
    step = make_step("padded")
    kept = []
    for _ in range(5):
        losses = list(step.epoch(IDX, 100))
        kept.append((losses, [loss.item() for loss in losses]))
    for losses, values in kept:
        assert [loss.item() for loss in losses] == values
    assert len({loss for _, values in kept for loss in values}) == 40


def test_replaced_tensors_change_the_version(monkeypatch):
    monkeypatch.setattr(state_module, "LOSSES", 6)
    state = StepState(0, torch.device("cpu"))
    versions = []
    runs = []
    for seeds, batch in ((10, 5), (10, 5), (7, 4), (7, 4), (12, 6), (12, 3)):
        runs.append(state.begin(torch.arange(seeds), batch, 0, torch.float32))
        state.hold(runs[-1])
        versions.append(state.version)
    kept = [after == before for before, after in itertools.pairwise(versions)]
    assert kept == [True, True, False, False, False], "same; fewer seeds; losses full; more seeds; losses full"
    state.hold(runs[0])
    assert state.losses is runs[0].array and state.version > versions[-1], "a run keeps its place for losses"
    assert state.run.tolist() == [10, 5, 0] and state.order[:10].tolist() == list(range(10))


def test_runs_take_turns():
    """What one run left is what it finds: its epoch, its step, its seeds."""
    state = StepState(3, torch.device("cpu"))
    first = state.begin(torch.arange(10, 20), 5, 1, torch.float32)
    second = state.begin(torch.arange(4), 3, -2, torch.float32)
    first.position = 1
    for run, key in ((first, [3, 1, 1]), (second, [3, -2, 0]), (first, [3, 1, 1])):
        state.hold(run)
        assert state.key.tolist() == key and state.order[: run.order.numel()].tolist() == run.order.tolist()
        assert state.run.tolist() == [run.order.numel(), run.batch, run.offset]
    state.key[2] = 7  # nothing is set anew while the run is held
    state.hold(first)
    assert state.key.tolist() == [3, 1, 7]


def _own_loop(graph, autocast):
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(FEATURES, 16, 2, CLASSES)
    sampler = joestar.NeighborSampler(graph, [5, 3], seed=7)
    step = joestar.compile(net, sampler, backend="eager", autocast=autocast)
    return net, sampler, step


@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
def test_autocast(features):
    graph = planted_graph()
    graph.ndata["x"] = graph.ndata["x"].to(features)
    net, sampler, step = _own_loop(graph, torch.bfloat16)
    logits = step(IDX[:50])
    assert logits.dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in net.parameters())
    blocks = sampler.sample(graph.keyed(7, 0, 1), IDX[:50].int())
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(blocks, graph.ndata["x"][blocks[0].srcs.long()])
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)
    F.cross_entropy(logits.float(), graph.ndata["y"][IDX[:50]]).backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_training_with_autocast_is_near_training_without():
    graph = planted_graph()
    ours, theirs = (train(make_step("padded", graph=graph, autocast=a), IDX) for a in (torch.bfloat16, None))
    assert ours == pytest.approx(theirs, rel=0.05) and ours != theirs


@pytest.mark.parametrize("model", ["GraphSAGE", "GCN", "GIN", "GAT"])
@pytest.mark.every(2)
def test_autocast_of_biases_added_elsewhere(model):
    """Parameters stay in float32, whichever op adds them to rows in the short dtype."""
    fused = {"bias": "on-read", "epilogue": "fused", "backward": "linked"}

    def step(**options):
        torch.manual_seed(0)
        graph = planted_graph()
        graph.ndata["x"] = graph.ndata["x"].to(torch.bfloat16)
        extra = {"heads": 2} if model == "GAT" else {}
        net = getattr(joestar.nn, model)(FEATURES, 16, 3, CLASSES, dropout=0.5, **extra)
        sampler = joestar.NeighborSampler(graph, [5, 4, 3], seed=7)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        return joestar.compile(
            net, sampler, F.cross_entropy, optimizer, backend="eager", autocast=torch.bfloat16, **options
        )

    plain = step()
    losses = train(plain, IDX[:300])
    sites = plain._executors["train"].program.sites
    choices = {site.key: fused[site.kind] for site in sites if fused.get(site.kind) in site.options}
    assert any(key.startswith(("bias:", "epilogue:")) for key in choices), sites
    assert train(step(choices=choices), IDX[:300]) == pytest.approx(losses, rel=0.05)


def test_refused_options():
    with pytest.raises(ConfigError, match="autocast must be"):
        make_step("padded", autocast=torch.float64)
    with pytest.raises(ConfigError, match="needs a graph on a GPU"):
        make_step("padded", cuda_graph=True)


@pytest.mark.parametrize("setting", ["keep_freed_memory", "keep_stack_chunks"])
def test_the_allocators_can_be_left_alone(setting, monkeypatch):
    called = []
    monkeypatch.setattr(f"joestar._native.{setting}", lambda: called.append(1) or True)
    monkeypatch.setenv(memory.OPT_OUT, "0")
    assert getattr(memory, setting)() is False and not called
    monkeypatch.delenv(memory.OPT_OUT)
    assert getattr(memory, setting)() is True and called


def test_losses_of_runs_that_take_turns_are_final(monkeypatch):
    """Behind a step of a run that began before the array was full, the next ones were written over others."""
    monkeypatch.setattr(state_module, "LOSSES", 8)
    step, kept = make_step(), []

    def keep(loss):
        kept.append((loss, loss.item()))

    def singles(count):
        for _ in range(count):
            keep(step(IDX[:20]))

    singles(3)
    epoch = step.epoch(IDX, -(-len(IDX) // 4))
    keep(next(epoch))
    singles(2)
    keep(next(epoch))
    singles(12)
    keep(next(epoch))
    singles(3)
    assert all(loss.item() == value for loss, value in kept)
