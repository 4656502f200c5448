"""Plans are chosen by measured speeds: whatever a machine measures, what it chooses fits its budget and trains."""

import itertools
import math
import random
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.data.planted import Shape
from joestar.errors import ConfigError, JoestarWarning
from joestar.staged import partition_planning, planning
from joestar.staged.heaviest import heaviest_steps, reach
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch, plan
from joestar.stages.plan import Speeds
from tests.runtime.staged_plans import made_up_clock

pytestmark = pytest.mark.usefixtures("cheapest_captures")

CASES, QUICK = 40, 3


class Case:
    """A random graph, sampler, budget and machine; ``repr`` says it."""

    def __init__(self, number: int):
        rng = random.Random(f"any speed {number}")
        nodes, degree, skew = rng.choice((500, 1000)), rng.choice((2.0, 6.0, 12.0)), rng.uniform(0.3, 1.2)
        self.graph = planted(Shape(nodes, degree, skew, 16, 0.4, 6.0, 16, 4, rng.randint(40, 160), head=0.2))
        self.fanouts = rng.choice(([2, 2], [5, 3], [-1], [3, 3, 2], [-1, -1]))
        self.batch, self.share = rng.choice((1, 7, 20, 50)), rng.uniform(0.4, 0.99)
        self.speeds = Speeds(*(v * math.exp(rng.uniform(-7, 7)) for v in (47e9, 3e12, 1.5e-4, 1e15, 1e-3)))
        self.number, self.sampler = number, joestar.NeighborSampler(self.graph, self.fanouts, seed=number)

    def __repr__(self) -> str:
        return (
            f"case {self.number}: {self.graph!r}, {self.fanouts}, batch {self.batch}, {self.share:.3f}, {self.speeds}"
        )

    def step(self):
        """A step within a share of what everything takes; ``None`` where nothing fits."""
        torch.manual_seed(self.number)
        net = joestar.nn.GraphSAGE(16, 8, len(self.fanouts), 4)
        whole = sum(Planner(net, self.sampler, 1, batch=self.batch, speeds=self.speeds).resident().values())
        try:
            return joestar.compile(
                net, self.sampler, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.01), backend="eager",
                memory=int(self.share * whole), batch_size=self.batch, warm_up=2,
            )  # fmt: skip
        except ConfigError:  # too small
            return None


@pytest.mark.parametrize("number", [n if n < QUICK else pytest.param(n, marks=pytest.mark.fuzz) for n in range(CASES)])
def test_whatever_is_measured_the_plan_fits_and_trains(monkeypatch, number):
    case = Case(number)
    monkeypatch.setattr(Planner, "_measured", lambda self: case.speeds)
    monkeypatch.setattr(plan, "time", made_up_clock(number))
    step = case.step()
    if step is None:
        return
    found = step.plan
    assert found.memory <= found.budget == int(found.budget) and not found.fits, case
    assert found.num_seeds % case.batch == 0 or found.num_seeds == case.graph.train_idx.numel(), case
    losses = [loss.item() for _ in range(2) for loss in step.epoch(case.graph.train_idx, case.batch)]
    assert len(losses) == 2 * -(-case.graph.train_idx.numel() // case.batch) and all(map(math.isfinite, losses)), case
    assert step.traffic.cut <= 0.1 * step.traffic.macro_batches + 1, case


def test_the_slowest_decides(monkeypatch):
    """So the tests here see different plans: larger macro-batches where sampling one takes long, whatever its size."""
    case = Case(2)
    found = []
    for seconds in (0.0, 1.0):
        ticks = itertools.count()
        monkeypatch.setattr(plan, "time", types.SimpleNamespace(perf_counter=lambda: seconds * next(ticks)))  # noqa: B023
        net = joestar.nn.GraphSAGE(16, 8, len(case.fanouts), 4)
        planner = Planner(net, case.sampler, 1, batch=case.batch, speeds=Speeds(bus=1e5))
        planner.budget = int(0.9 * sum(planner.resident().values()))
        found.append(planner.plan().num_seeds)
    assert found[0] < found[1], found


# --- steps that are heavier than others ---


@pytest.fixture(scope="module")
def hubs():
    """400 seeds with a neighbour each, but two with 1,000; nodes behind them have none."""
    torch.manual_seed(0)
    plain = torch.stack([torch.randint(400, 3000, (400,)), torch.arange(400)])
    many = [torch.stack([torch.randperm(2600)[:1000] + 400, torch.full((1000,), hub)]) for hub in (17, 203)]
    graph = joestar.Graph.from_edge_index(torch.cat([plain, *many], 1), 3000)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(3000, 16), torch.randint(0, 4, (3000,))
    graph.train_idx = torch.arange(400)
    return graph


def test_a_step_that_is_heavier_than_others_has_room(hubs, monkeypatch):
    """Of 100 steps an epoch has two that hold a seed with as many neighbours as all others together."""
    net, sampler = joestar.nn.GraphSAGE(16, 8, 1, 4), joestar.NeighborSampler(hubs, [-1])
    planner = Planner(net, sampler, 1, batch=4, speeds=Speeds())
    budget = int(0.8 * sum(planner.resident().values()))
    monkeypatch.setattr(Planner, "_measured", lambda self: Speeds())
    step = joestar.compile(
        net, sampler, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.01), backend="eager", memory=budget,
        batch_size=4, first_stage=LargeBatch(4), warm_up=2,
    )  # fmt: skip
    assert not step.plan.fits and step.plan.memory <= budget
    assert len(list(step.epoch(hubs.train_idx, 4))) == 100 and not step.traffic.cut


def test_the_heaviest_steps_are_found(hubs):
    seeds = hubs.train_idx[torch.randperm(400, generator=torch.Generator().manual_seed(3))].int()
    found = heaviest_steps(joestar.NeighborSampler(hubs, [-1]), seeds, 4, 0)
    assert all(step.numel() == 4 and len(set(step.tolist())) == 4 for step in found)
    assert {17, 203} & set(found[0].tolist())
    together = heaviest_steps(joestar.NeighborSampler(hubs, [-1]), seeds, 100, 0)
    assert {17, 203} <= set(together[0].tolist()), "of many epochs"
    (short,) = {step.numel() for step in heaviest_steps(joestar.NeighborSampler(hubs, [-1]), seeds[:3], 4, 0)}
    assert short == 3


@pytest.mark.parametrize("fanouts", [[-1], [3], [-1, -1], [2, 5], [4, -1, 1]])
def test_reach_counts_the_first_two_hops(fanouts):
    graph = planted(Shape(300, 5.0, 0.8, 16, 0.4, 6.0, 16, 4, 90, head=0.2))
    degree = graph.indptr.diff().tolist()
    sources = [
        graph.indices[a:b].tolist() for a, b in zip(graph.indptr[:-1].tolist(), graph.indptr[1:].tolist(), strict=True)
    ]

    def taken(node: int, hop: int) -> int:
        return degree[node] if fanouts[hop] < 0 else min(degree[node], fanouts[hop])

    expected = [float(taken(seed, 0)) for seed in range(300)]
    if len(fanouts) > 1:
        beyond = [sum(taken(near, 1) for near in of) / max(1, len(of)) for of in sources]
        expected = [own * (1 + mean) for own, mean in zip(expected, beyond, strict=True)]
    found = reach(joestar.NeighborSampler(graph, fanouts), torch.arange(300))
    assert found.tolist() == pytest.approx(expected)
    own = types.SimpleNamespace(graph=graph)
    assert reach(own, torch.arange(300)).tolist() == degree


@pytest.mark.parametrize("clock", [0, *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(1, 12))])
@pytest.mark.parametrize("partitioned", [False, True])
def test_hot_nodes_that_are_given_train_as_those_of_the_plan(monkeypatch, partitioned, clock):
    """With none, and with as many as asked for. Macro-batches are of one size, as what is drawn depends on it: a plan
    for another one, which a faster machine finds better, has room for other ones, and cuts those that it has not.
    """
    for module in (plan, planning, partition_planning):
        monkeypatch.setattr(module, "time", made_up_clock(clock))
    graph, found = planted("tiny"), []
    for hot in (0, 5, None):
        torch.manual_seed(0)
        net = joestar.nn.GraphSAGE(16, 8, 2, graph.num_classes)
        stage = LargeBatch(100, hot=hot)
        if partitioned:
            stage = joestar.Partitions(joestar.partition(graph, 4), 2, hot=hot)
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, torch.optim.SGD(net.parameters(), 0.01),
            backend="eager", memory="900KiB", batch_size=50, first_stage=stage, warm_up=2, deterministic=True,
        )  # fmt: skip
        assert hot is None or step.plan.hot == step.arena.hot == hot
        losses = torch.stack(list(step.epoch(graph.train_idx, 50)))
        assert step.traffic.cut == 0
        found.append(losses.double())
    assert torch.allclose(found[0], found[1], atol=1e-6) and torch.allclose(found[0], found[2], atol=1e-6)


@pytest.mark.parametrize("hot", [-1, True, 0.5, "8GiB"])
def test_hot_nodes_are_a_number(hot):
    with pytest.raises(ConfigError, match="hot must be a number of nodes"):
        LargeBatch(hot=hot)


def test_a_state_of_another_plan_is_said():
    """Macro-batches of a resumed step are as large as they were; room for them is what was planned here."""
    graph = planted("tiny")

    def step_of(**stage):
        net = joestar.nn.GraphSAGE(16, 8, 2, graph.num_classes)
        return joestar.compile(
            net, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, torch.optim.SGD(net.parameters(), 0.01),
            backend="eager", memory="900KiB", batch_size=50, first_stage=LargeBatch(**stage),
        )  # fmt: skip

    one = step_of(num_seeds=100)
    state = one.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(num_seeds=100, hot=one.plan.hot).load_state_dict(state)
        step_of(num_seeds=50).load_state_dict({name: value for name, value in state.items() if name != "room"})
    given = f"LargeBatch\\(100, hot={one.plan.hot}\\)"
    for other in (step_of(num_seeds=50), step_of(num_seeds=100, hot=7)):
        with pytest.warns(JoestarWarning, match=f"macro-batches of 100 seeds and room for .*{given}") as seen:
            other.load_state_dict(state)
        assert seen[0].filename == __file__ and other.first_stage.num_seeds == 100
