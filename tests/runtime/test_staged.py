"""Steps over macro-batches: the same numbers as over the whole graph, whatever happens between two steps."""

import copy
import gc
import statistics
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.errors import ConfigError, GraphError, SamplerError, StageError
from joestar.profile.numbers import parse_bytes
from joestar.runtime.executor import Executor
from joestar.staged import staging
from joestar.staged.step import StagedStep, borders
from joestar.stages import LargeBatch
from tests.runtime.staged_plans import BATCH, EDGES, NODES, Whole, plans

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    src = (torch.rand(EDGES) ** 2 * NODES).long()
    made = joestar.Graph.from_edge_index(torch.stack([src, torch.randint(0, NODES, (EDGES,))]), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    made.edata["w"] = torch.rand(EDGES)
    made.train_idx = torch.randperm(NODES)[:150]
    return made


@pytest.fixture
def planned(monkeypatch):
    return plans(monkeypatch)


def parts(graph, model="sage"):
    """GCN reads the degrees of the whole graph."""
    torch.manual_seed(1)
    kinds = {"sage": joestar.nn.GraphSAGE, "gcn": joestar.nn.GCN}
    net = kinds[model](8, 6, 2, 4, dropout=0.5)
    for conv in net.convs if model == "gcn" else ():
        conv.norm = "graph"
    return net, torch.optim.Adam(net.parameters(), 0.01)


def compiled(graph, staged, whole=True, sampler=None, optimizer=True, model="sage", **options):
    net, adam = parts(graph, model)
    sampler = sampler or joestar.NeighborSampler(graph, [3, 3], seed=5)
    given = (F.cross_entropy, adam) if optimizer else ()
    stage = {"memory": "1GiB", "first_stage": (Whole if whole else LargeBatch)(48)} if staged else {}
    step = joestar.compile(net, sampler, *given, backend="eager", warm_up=4, **stage, **options)
    if staged and whole:
        step.first_stage = Whole(step.first_stage.num_seeds)
    return step


def run(step, graph, epochs=2):
    return [torch.stack(list(step.epoch(graph.train_idx, BATCH))).tolist() for _ in range(epochs)]


def same(a, b):
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("cold", "model"),
    [
        pytest.param(NODES, "sage", id="roomy-sage"),
        pytest.param(165, "gcn", id="tight-gcn"),
        pytest.param(NODES, "gcn", id="roomy-gcn", marks=pytest.mark.fuzz),
        pytest.param(165, "sage", id="tight-sage", marks=pytest.mark.fuzz),
    ],
)
def test_training_and_predictions_are_those_of_the_whole_graph(graph, planned, model, cold):
    """The second one cuts macro-batches in two: they need more nodes than there is room for."""
    planned(cold=cold)
    ours, plain = (compiled(graph, staged, model=model) for staged in (True, False))
    assert isinstance(ours, StagedStep)
    assert run(ours, graph) == run(plain, graph)
    same(ours, plain)
    assert torch.equal(ours.predict(graph.train_idx, 20), plain.predict(graph.train_idx, 20))
    assert ours.evaluate(graph.train_idx) == plain.evaluate(graph.train_idx, BATCH)
    assert (ours.traffic.cut > 0) == (cold < NODES)
    assert (ours.traffic.alone > 0) == (cold < NODES)
    assert ours.traffic.fresh < ours.traffic.cold  # rows of earlier macro-batches were found again
    assert ours.traffic.macro_batches >= 8
    assert not ours.traffic.again
    assert set(ours.traffic.seconds) == {"first stage", "load", "steps waited"}


def test_slots_that_the_device_gives(graph, planned):
    """More of this in ``test_staged_own_book.py``."""
    pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")
    from .device_book import book_on_device

    planned(cold=165)
    with book_on_device():
        ours, plain = (compiled(graph, staged) for staged in (True, False))
        assert ours.arena.own_book
        assert run(ours, graph, 2) == run(plain, graph, 2)
    assert 0 < ours.traffic.fresh < ours.traffic.cold
    same(ours, plain)


def test_deterministic_steps_find_no_rows_of_earlier_macro_batches(graph, planned):
    """So that no order of nodes depends on what came before; results are the same, also where an epoch goes on."""
    planned(cold=2 * NODES)
    ours, plain = (compiled(graph, staged, deterministic=True) for staged in (True, False))
    assert run(ours, graph, 1) == run(plain, graph, 1)
    assert ours.traffic.fresh == ours.traffic.cold > 0
    epoch = ours.epoch(graph.train_idx, BATCH)
    losses = [next(epoch).item() for _ in range(5)]
    other = compiled(graph, True, deterministic=True)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    losses += [loss.item() for loss in other.epoch(graph.train_idx, BATCH)]
    assert losses == run(plain, graph, 1)[0]
    same(other, plain)


def test_what_happens_between_two_steps_changes_nothing(graph, planned):
    ours, plain = (compiled(graph, staged) for staged in (True, False))

    def disturbed(step):
        losses = []
        for at, loss in enumerate(epoch := step.epoch(graph.train_idx, BATCH)):
            losses.append(loss.item())
            if at == 1:
                losses.append(step.evaluate(graph.train_idx[:30], 30)["accuracy"])
            if at == 4:
                losses += [loss.item() for loss in step.epoch(graph.train_idx[:40], BATCH)]
            if at == 6:
                losses.append(step(torch.tensor([3, 1, 4])).item())
            if at == 7:
                break
        losses += [loss.item() for loss in epoch]
        return losses

    assert disturbed(ours) == disturbed(plain)
    same(ours, plain)
    assert ours.traffic.again == 3


def test_an_epoch_goes_on_elsewhere(graph, planned):
    one, plain = (compiled(graph, staged) for staged in (True, False))
    epochs = one.epoch(graph.train_idx, BATCH), plain.epoch(graph.train_idx, BATCH)
    for _ in range(5):
        assert next(epochs[0]).item() == next(epochs[1]).item()
    other = compiled(graph, True)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert [x.item() for x in other.epoch(graph.train_idx, BATCH)] == [x.item() for x in epochs[1]]
    same(other, plain)


def test_the_users_own_sampler_decides_what_a_macro_batch_holds(graph, planned):
    step = compiled(graph, True, whole=False)
    losses = run(step, graph, 12)
    assert sum(losses[-1]) < sum(losses[0])
    assert step.traffic.edges < 12 * 4 * graph.num_edges


def test_seeds_of_steps_are_the_users(graph, planned):
    step = compiled(graph, True)
    seeds = torch.cat([seeds for _, seeds in step.epoch(graph.train_idx, BATCH, with_seeds=True)])
    assert torch.equal(seeds.sort().values.long(), graph.train_idx.sort().values)
    plain = compiled(graph, False)
    assert torch.equal(seeds, torch.cat([s for _, s in plain.epoch(graph.train_idx, BATCH, with_seeds=True)]))


def test_weighted_picks_and_edge_data(graph, planned):
    def sampler():
        return joestar.NeighborSampler(graph, [3, 3], seed=2, probs="w")

    ours, plain = (compiled(graph, staged, sampler=sampler()) for staged in (True, False))
    assert run(ours, graph) == run(plain, graph)


def test_a_loop_of_ones_own(graph, planned):
    ours, plain = (compiled(graph, staged, optimizer=False) for staged in (True, False))
    seeds = graph.train_idx[:20]
    for step in (ours, plain):
        F.cross_entropy(step(seeds), graph.ndata["y"][seeds]).backward()
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_every_step_is_of_one_macro_batch():
    assert borders(8, 30) == [0, 2, 10, 18, 26, 30]
    assert borders(3, 10) == [0, 1, 4, 7, 10]
    assert borders(1, 3) == [0, 1, 2, 3]
    assert borders(12, 12) == borders(40, 12) == [0, 12]


def test_what_a_first_stage_raises_ends_the_epoch_with_it(graph, planned):
    step = compiled(graph, True)
    step.first_stage = _Failing(48)
    epoch = step.epoch(graph.train_idx, BATCH)
    next(epoch)  # the first macro-batch, a quarter of one
    with pytest.raises(StageError, match="out of milk") as caught:
        next(epoch)
    assert isinstance(caught.value.__cause__, RuntimeError)
    step.first_stage = Whole(48)
    assert len(list(step.epoch(graph.train_idx, BATCH))) == 10


class _Failing(Whole):
    def sample(self, graph, sampler, seeds, key):
        if key[2] == 1:
            raise RuntimeError("out of milk")
        return super().sample(graph, sampler, seeds, key)


def test_no_thread_is_left_behind(graph, planned):
    step = compiled(graph, True)
    for _ in step.epoch(graph.train_idx, BATCH):
        break
    run(step, graph, 1)
    step.evaluate(graph.train_idx)
    del _
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("joestar")]


def test_a_step_that_has_no_room_says_so(graph, planned):
    """Where the budget has none either: more of this in ``test_staged_room.py``."""
    planned(cold=10)
    step = compiled(graph, True)
    step.plan.budget = 10_000
    with pytest.raises(StageError, match=r"single step of 16 seeds.*memory=9.8 KiB. Give memory=") as caught:
        list(step.epoch(graph.train_idx, BATCH))
    assert isinstance(caught.value.__cause__, GraphError)


def test_what_fits_is_resident(graph):
    net, adam = parts(graph)
    step = joestar.compile(
        net, joestar.NeighborSampler(graph, [3, 3], seed=5), F.cross_entropy, adam, backend="eager", warm_up=4,
        memory="1GiB",
    )  # fmt: skip
    assert step.plan.fits
    assert "everything fits into 1.0 GiB" in str(step.plan)
    plain = compiled(graph, False)
    assert run(step, graph) == run(plain, graph)
    assert step.evaluate(graph.train_idx) == plain.evaluate(graph.train_idx)


def test_what_fits_has_an_expected_epoch_and_what_came(graph):
    """Said before training, and in the report beside the epochs behind the first."""
    net, adam = parts(graph)
    sampler = joestar.NeighborSampler(graph, [3, 3], seed=5)
    step = joestar.compile(
        net, sampler, F.cross_entropy, adam, backend="eager", warm_up=4, memory="1GiB", batch_size=16
    )
    assert step.plan.epoch_seconds > 0 and "an epoch: at least" in str(step.plan)
    assert not step.report().feeding.epoch
    for _ in range(3):
        list(step.epoch(graph.train_idx, BATCH))
    next(step.epoch(graph.train_idx, BATCH))  # one that is left does not count
    assert len(step._times) == 3
    (epoch,) = step.report().feeding.epoch
    assert epoch.what == "an epoch, s (at least)" and epoch.planned == step.plan.epoch_seconds
    assert epoch.measured == statistics.median(step._times[1:])


@pytest.mark.parametrize(("free", "warned"), [(50, []), (10, ["only 10.0 GiB of the memory of cuda:0 are free"])])
def test_a_budget_is_compared_with_the_gpu(monkeypatch, free, warned):
    """A GPU that has less in all refuses; one where others hold memory warns."""
    net = torch.nn.Linear(2, 2)
    monkeypatch.setattr(staging, "torch", SimpleNamespace(device=torch.device, cuda=SimpleNamespace(
        mem_get_info=lambda device: (free << 30, 80 << 30), memory_reserved=lambda device: 0,
        memory_allocated=lambda device: 0,
    )))  # fmt: skip
    on_gpu = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda:0"))]))
    assert staging.budget_on(net, "100GiB") == 100 << 30, "no GPU"
    with pytest.raises(ConfigError, match=r"memory=100.0 GiB is more than the 80.0 GiB that cuda:0 has in all"):
        staging.budget_on(on_gpu, "100GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert staging.budget_on(on_gpu, "40GiB") == 40 << 30
    assert len(caught) == len(warned) and all(w in str(c.message) for w, c in zip(warned, caught, strict=True))


def test_defaults_of_the_script_change_nothing():
    """Planning, loading and stepping take neither the default device nor the default dtype."""
    made, losses = planted("tiny"), []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        torch.manual_seed(0)
        net = joestar.nn.GraphSAGE(16, 8, 2, 5)
        sampler, adam = joestar.NeighborSampler(made, [2, 2], seed=1), torch.optim.Adam(net.parameters())
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                step = joestar.compile(
                    net, sampler, F.cross_entropy, adam, backend="eager", memory="270KiB", batch_size=20,
                    first_stage=joestar.LargeBatch(100),
                )  # fmt: skip
                losses.append([loss.item() for loss in step.epoch(made.train_idx, 20)])
        finally:
            torch.set_default_dtype(before)
        assert not step.plan.fits
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"memory": "a lot"}, "memory must be a number of bytes"),
        ({"memory": 1000}, "memory=1000 B is too small: macro-batches of"),
        ({"memory": "1GiB", "tune": True}, "tune=True does not go with memory="),
        ({"first_stage": 48}, "first_stage must be a joestar.LargeBatch or joestar.Partitions; got int"),
        ({"memory": "1GiB", "batch_size": 0}, "batch_size must be a positive integer"),
    ],
)
def test_unusable_arguments(graph, given, text):
    net, adam = parts(graph)
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        joestar.compile(net, joestar.NeighborSampler(graph, [3, 3]), F.cross_entropy, adam, **given)


class _Holding:
    """A sampler with a tensor of its own."""

    def __init__(self, graph, held):
        self.graph, self.held = graph, held

    def sample(self, graph, seeds):
        return [graph[:, seeds].individual_sample(2)]


@pytest.mark.parametrize(
    "held", [torch.arange(0, NODES, 2), torch.rand(NODES), torch.rand(EDGES), torch.ones(NODES, dtype=torch.bool)]
)
def test_a_samplers_own_nodes_and_edges_are_refused(graph, planned, held):
    """Their numbers are those of the whole graph: read in an arena, they are silently those of others."""
    with pytest.raises(SamplerError, match=r"_Holding\.held is a tensor \[\d+\].*graph\.ndata or graph\.edata"):
        compiled(graph, True, sampler=_Holding(graph, held))
    compiled(graph, True, sampler=_Holding(graph, torch.rand(3)))


def test_weights_given_as_a_tensor_are_refused(graph, planned):
    with pytest.raises(SamplerError, match=r"NeighborSampler\.probs is a tensor"):
        compiled(graph, True, sampler=joestar.NeighborSampler(graph, [3, 3], probs=torch.rand(EDGES)))


def test_nodes_are_known_by_the_graphs_own_ids(graph, planned):
    """Draws and dropout are keyed by ``graph.ids``, not by positions."""
    graph.ids = torch.randperm(NODES, dtype=torch.int32) * 7 + 3
    try:
        ours, plain = (compiled(graph, staged) for staged in (True, False))
        assert run(ours, graph, 1) == run(plain, graph, 1)
        same(ours, plain)
    finally:
        graph.ids = None


def test_bytes_of_texts():
    assert parse_bytes("24GiB") == parse_bytes("24 gb") == 24 << 30
    assert parse_bytes("1.5k") == 1536
    assert parse_bytes(7) == 7
    for beyond in ("9" * 400 + "GiB", "1" + "0" * 30):
        with pytest.raises(ConfigError, match="memory must be a number of bytes"):
            parse_bytes(beyond)


def test_bounds_are_of_batches_of_several_macro_batches(graph, planned, monkeypatch):
    """The first macro-batch of an epoch is a quarter: its few batches are smaller than others and too much alike, so
    that others outgrew their bounds, and the step was compiled anew in the second epoch."""
    planned()
    step, seen, look, profile = compiled(graph, True), [], Executor.look, Executor.profile

    def looked(self, seeds, *given):
        seen.append((self.program.kind, seeds.numel(), frozenset(self.program.graph.ids[seeds].tolist())))
        look(self, seeds, *given)

    def profiled(self, seeds, batch, *given):
        assert seeds.numel() == 48 and batch == BATCH, "of a macro-batch of the usual size"
        return profile(self, seeds, batch, *given)

    monkeypatch.setattr(Executor, "look", looked)
    monkeypatch.setattr(Executor, "profile", profiled)
    run(step, graph, 1)
    shown = len(borders(3, -(-graph.train_idx.numel() // BATCH))) - 1
    assert step.traffic.macro_batches == shown > 3 and step.traffic.seeds == graph.train_idx.numel()
    step.predict(graph.train_idx, BATCH)
    assert not step.traffic.again
    for kind in ("train", "predict"):
        sets = [ids for of, _, ids in seen if of == kind]
        assert len(sets) > 1 and sum(map(len, sets)) == len(frozenset().union(*sets)), "of different seeds"
    executor = step._runner.executor
    assert len(executor.observed.batches) == executor.warm_up
