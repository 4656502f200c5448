"""The plan: random sizes, hotness and budgets, on macro-batches that nobody sampled."""

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

import joestar
from joestar.bench.planted import planted
from joestar.data.planted import Shape
from joestar.runtime.seeds import shuffled
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch
from joestar.stages.large_batch import Recycled
from joestar.stages.plan import PARTS, Costs, Look, Speeds, choose, least, parts_of


class World:
    """Macro-batches of so many seeds: ``n(M) = N (1 - exp(-M f / N))`` nodes, popular ones first; ``repr`` says it."""

    def __init__(self, number: int):
        rng = random.Random(f"plan {number}")
        self.nodes, self.fanout = rng.randint(50, 4000), rng.choice((1.5, 8.0, 60.0))
        self.skew, self.density = rng.choice((0.0, 0.5, 1.5, 3.0)), rng.uniform(0.2, 12)
        self.total = rng.randint(10, self.nodes)
        self.batch = rng.randint(1, max(1, self.total // 4))
        fixed = {"tables": rng.choice((0, 10_000)), "step": rng.randint(0, 200_000)}
        self.costs = Costs(
            fixed, rng.choice((20.0, 132.0, 1000.0)), rng.choice((4.0, 8.0, 40.0)), rng.choice((0.0, 512.0))
        )
        self.speeds = Speeds(10.0 ** rng.uniform(5, 9), 1e12, 1e-4)
        self.compute = 10.0 ** rng.uniform(-3, 1)
        torch.manual_seed(number)
        self.popularity = torch.arange(1, self.nodes + 1, dtype=torch.float64) ** -self.skew
        self.score = self.popularity[torch.randperm(self.nodes)]

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not torch.is_tensor(value))

    def sample(self, number: int, index: int = 0):
        """What a first stage might have given."""
        torch.manual_seed(1000 * number + index)
        count = max(1, int(self.nodes * (1 - 2.718281828 ** (-number * self.fanout / self.nodes))))
        ids = torch.multinomial(self.score, count).sort().values
        return SimpleNamespace(ids=ids, num_nodes=count, num_rows=count, num_edges=int(count * self.density))

    def look(self) -> Look:
        """At nothing yet."""
        return Look(self.sample, self.score, torch.device("cpu"))

    @property
    def wanted(self) -> list[int]:
        """Sizes of macro-batches, as the planner tries them."""
        sizes = {max(1, -(-self.total // parts) // self.batch) * self.batch for parts in PARTS}
        return sorted({min(size, self.total) for size in sizes})

    def choose(self, budget: int, look: Look | None = None):
        """The plan."""
        return choose(look or self.look(), self.wanted, self.costs, budget, self.total, self.compute, self.speeds)

    def budgets(self) -> list[int]:
        """From too small to more than enough."""
        look = self.look()
        look.at(self.wanted[0])
        enough = sum(least(look, self.wanted[0], self.costs).values())
        return [int(enough * share) for share in (0.5, 0.99, 1.0, 1.3, 2, 6)]


WORLDS = [World(number) for number in range(12)]
QUICK = 3
cases = [pytest.param(w, id=str(i), marks=() if i < QUICK else pytest.mark.fuzz) for i, w in enumerate(WORLDS)]
worlds = pytest.mark.parametrize("world", cases)


@worlds
def test_a_plan_keeps_to_its_budget(world):
    for budget in world.budgets():
        look = world.look()
        plan = world.choose(budget, look)
        if plan is None:
            continue
        assert plan.memory == sum(plan.parts.values()) <= budget, world
        assert plan.parts == parts_of(look, plan.num_seeds, world.costs, plan.hot), world
        assert 0 <= plan.hot <= world.nodes and plan.cold >= 1 and plan.edges >= 1, world
        assert plan.num_seeds * (plan.macro_batches - 1) < world.total <= plan.num_seeds * plan.macro_batches, world
        assert plan.num_seeds in look.known, world
        room = world.sample(plan.num_seeds)
        ranks = look._rank[room.ids]
        assert int((ranks >= plan.hot).sum()) <= plan.cold and room.num_edges <= plan.edges, world


@worlds
def test_it_refuses_what_does_not_fit_and_nothing_else(world):
    for budget in world.budgets():
        look = world.look()
        plan = world.choose(budget, look)
        fits = [sum(least(look, number, world.costs).values()) <= budget for number in world.wanted]
        assert (plan is not None) == any(fits), (budget, world)


@worlds
def test_more_memory_is_not_slower(world):
    """For sizes that were all looked at, and without the time that sampling them took."""
    look = world.look()
    for number in world.wanted:
        look.at(number)
    still = {n: dataclasses.replace(shape, seconds=0.0) for n, shape in look.known.items()}
    look.known.update(still)
    epochs = [plan.epoch_seconds for budget in world.budgets() if (plan := world.choose(budget, look)) is not None]
    assert len(epochs) >= 4
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(epochs)), (epochs, world)


@worlds
def test_sizes_between_samples_are_between_theirs(world):
    look = world.look()
    for number in (world.wanted[0], world.wanted[-1], world.wanted[len(world.wanted) // 2]):
        look.at(number)
    known = sorted(look.known.values(), key=lambda shape: shape.seeds)
    for below, above in itertools.pairwise(known):
        for number in range(below.seeds, above.seeds + 1, max(1, (above.seeds - below.seeds) // 9)):
            shape = look.shape(number)
            for name in ("nodes", "edges"):
                low, high = sorted((getattr(below, name), getattr(above, name)))
                assert low * (1 - 1e-9) <= getattr(shape, name) <= high * (1 + 1e-9), (name, number, world)
    for number in world.wanted:
        shares = [look.share(number, hot) for hot in range(0, world.nodes + 1, max(1, world.nodes // 20))]
        assert shares[0] == 0 and shares == sorted(shares) and look.share(number, world.nodes) == 1, world


@pytest.mark.parametrize("hot", [0, 30, 10**9])
def test_the_number_of_hot_nodes_can_be_given(hot):
    world = WORLDS[1]
    look = Look(world.sample, world.score, torch.device("cpu"), hot=hot)
    plan = world.choose(1 << 40, look)
    assert plan.hot == min(hot, world.nodes) and look.hottest(plan.hot).numel() == plan.hot
    needed = sum(least(look, world.wanted[0], world.costs).values())
    assert needed == sum(parts_of(look, world.wanted[0], world.costs, plan.hot).values())
    assert world.choose(needed - 1, look) is None or plan.num_seeds != world.wanted[0]


def test_rows_that_lie_apart_come_as_slowly_as_was_measured():
    speeds = Speeds(bus=50.0, sparse=((4.0, 48.0), (16.0, 48.0), (64.0, 40.0)))
    assert [speeds.rows_over_bus(every) for every in (0.5, 4, 16, 64, 1000)] == [48, 48, 48, 40, 40]
    assert speeds.rows_over_bus(32) == pytest.approx((48 * 40) ** 0.5)
    assert Speeds(bus=50.0).rows_over_bus(100) == 50
    rates = [speeds.rows_over_bus(2 ** (exponent / 8)) for exponent in range(100)]
    assert rates == pytest.approx(sorted(rates, reverse=True)) and len(set(rates)) > 10


def test_sparse_rows_take_longer():
    """Of a plan: rows at the rate at which they lie, structure at that of the bus."""
    world = WORLDS[1]
    look, number, costs = world.look(), world.wanted[-1], dataclasses.replace(world.costs, bus=512.0)
    look.at(number)
    budget = sum(parts_of(look, number, costs, world.nodes // 2).values())
    speeds = Speeds(bus=1e6), Speeds(bus=1e6, sparse=((1.0, 1e5),))
    plain, slow = (choose(look, [number], costs, budget, world.total, 0.0, of) for of in speeds)
    rows = plain.nodes * plain.fresh * plain.macro_batches * 512.0
    assert rows > 0 and plain.seconds["bus"] == pytest.approx(plain.bus / 1e6)
    assert slow.seconds["bus"] == pytest.approx(rows / 1e5 + (plain.bus - rows) / 1e6)


def test_the_hottest_nodes_are_those_of_the_largest_scores():
    world = WORLDS[0]
    look = world.look()
    for count in (0, 1, 7, world.nodes):
        hottest = look.hottest(count)
        others = torch.ones(world.nodes, dtype=torch.bool).index_fill_(0, hottest, False)
        assert hottest.numel() == count and (world.score[hottest].diff() <= 0).all()
        assert not count or not others.any() or world.score[hottest].min() >= world.score[others].max()


def test_the_share_of_hot_rows_is_that_of_epochs():
    """Not only of the macro-batches from which was counted which nodes are hot: those look hotter than others."""
    graph = planted(Shape(60_000, 20.0, 0.9, 64, 0.4, 6.0, 32, 4, 6_000, head=0.2))
    net, sampler, stage = joestar.nn.GraphSAGE(32, 8, 2, 4), joestar.NeighborSampler(graph, [5, 5]), LargeBatch(500)
    whole = sum(Planner(net, sampler, 1 << 40, batch=50, speeds=Speeds()).resident().values())
    plan = Planner(net, sampler, int(0.6 * whole), batch=50, first_stage=stage, speeds=Speeds()).plan()
    parts = shuffled(graph.train_idx, 0, 0).to(graph.indices.dtype).split(plan.num_seeds)
    needed = torch.cat([stage.sample(graph, sampler, part, (0, 0, i)).ids for i, part in enumerate(parts)])
    assert abs(float(torch.isin(needed.long(), plan.hot_ids.long()).double().mean()) - plan.share) < 0.01


@pytest.mark.parametrize("own_book", [False, True])
def test_macro_batches_are_timed_in_memory_that_is_used_again(monkeypatch, own_book):
    """As in a run. What is found of them is what it is in memory of their own."""
    graph = planted(Shape(20_000, 20.0, 0.9, 64, 0.4, 6.0, 32, 4, 6_000, head=0.2))
    net, sampler = joestar.nn.GraphSAGE(32, 8, 2, 4), joestar.NeighborSampler(graph, [5, 5])
    seen, real = [], Look.at

    def at(look, number):
        sample, look.sample = look.sample, lambda *given: seen.append(sample(*given)) or seen[-1]
        real(look, number)
        look.sample = sample
        pairs = itertools.pairwise(macro.indptr.data_ptr() for macro in seen[-3:])
        again.extend(one == other for one, other in pairs)

    def plan():
        planner = Planner(net, sampler, 1 << 30, batch=50, first_stage=LargeBatch(500), speeds=Speeds())
        planner.own_book = own_book
        return planner.plan()

    again, found = [], []
    monkeypatch.setattr(Look, "at", at)
    found.append(plan())
    assert again and all(again)
    monkeypatch.setattr("joestar.staged.planning.Recycled", _New)
    again.clear()
    found.append(plan())
    assert not any(again)
    one, other = found
    assert one.hot_ids.equal(other.hot_ids)
    for name in ("num_seeds", "hot", "cold", "edges", "nodes", "mean_edges", "share", "fresh", "bus", "memory"):
        assert getattr(one, name) == getattr(other, name), name


class _New:
    """Memory of its own for everything, of which none is given back."""

    def __init__(self):
        self.kept = []

    def again(self):
        """Nothing is free."""

    def __call__(self, n, dtype):
        self.kept.append(torch.empty(n, dtype=dtype))
        return self.kept[-1]


def test_recycled_memory():
    """The same at the same turn; larger where need be; of every dtype."""
    memory = Recycled()
    first = [memory(100, torch.int32), memory(7, torch.int64)]
    first[0].fill_(1), first[1].fill_(2)
    memory.again()
    assert memory(50, torch.int64).data_ptr() == first[0].data_ptr() and memory(0, torch.int32).numel() == 0
    assert memory(3, torch.int64).shape == (3,)
    memory.again()
    grown = memory(1000, torch.int64)
    assert grown.shape == (1000,) and grown.dtype == torch.int64 and int(first[0].sum()) == 100, "not freed under it"


def test_hidden_rows_cross_the_bus_and_take_the_host_s_time():
    """The same size of macro-batches with and without rows that are read and left behind; and making them was timed."""
    world = WORLDS[0]
    speeds = Speeds(1e6, 1e12, 1e-4, load=0.25)
    costs = {"none": world.costs, "some": dataclasses.replace(world.costs, pulled=3e5, pushed=1e5, hidden=3.0)}
    found = {}
    for name, given in costs.items():
        look = Look(world.sample, world.score, torch.device("cpu"), hot=0, seconds=0.5)
        found[name] = choose(look, [world.total], given, 1 << 30, world.total, 1.0, speeds)
    none, some = found["none"], found["some"]
    assert none.macro_batches == 1 and none.seconds["first stage"] == pytest.approx(1.2 * 0.5)
    assert some.bus == pytest.approx(none.bus + 3e5)
    assert some.seconds["bus"] == pytest.approx(none.seconds["bus"] + 4e5 / 1e6)
    assert none.seconds["loads"] == 0.25 and some.seconds["loads"] == pytest.approx(0.25 + 3.0)
    assert "loads and first stage" not in none.seconds
    both = some.seconds["loads and first stage"]
    assert both == pytest.approx(0.25 + 3.0 + 0.5) == max(some.seconds.values())
    assert some.epoch_seconds == pytest.approx(both + 1.2 * 0.5) and "loads and first stage decide)" in str(some)
