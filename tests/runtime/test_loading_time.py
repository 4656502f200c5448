"""What a load takes at least: measured on loads that bring next to nothing; every macro-batch of a plan pays it."""

import importlib.util
import itertools
import types

import pytest
import torch

import joestar
from joestar.bench.planted import planted
from joestar.staged import planning
from joestar.staged.planning import Planner
from joestar.stages import loading_time
from joestar.stages.arena import Arena
from joestar.stages.loading_time import FIRST, REPEATS, seconds_per_load
from joestar.stages.plan import Speeds

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def graph():
    return planted("tiny")


@pytest.fixture
def loads(monkeypatch):
    """A clock that goes on by a second with every look at it and by five with every load; nodes that were loaded."""
    ticks, fresh, load = itertools.count(), [], Arena.load

    def slow(self, made):
        found = load(self, made)
        fresh.append(found.fresh)
        [next(ticks) for _ in range(5)]
        return found

    monkeypatch.setattr(loading_time, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(Arena, "load", slow)
    return fresh


@pytest.mark.parametrize("own_book", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("reuse", [True, False])
def test_loads_are_timed_that_give_slots_anew(graph, loads, own_book, reuse):
    sampler = joestar.NeighborSampler(graph, [3, 2])
    assert seconds_per_load(graph, sampler, graph.train_idx, torch.device("cpu"), own_book, reuse) == 6.0
    assert len(loads) == FIRST + REPEATS and min(loads) > 0


def test_of_samplers_that_have_no_fast_way_and_edges_with_data(loads):
    graph = planted("tiny")
    graph.edata["w"] = torch.rand(graph.num_edges)
    for sampler in (joestar.LayerDependentSampler(graph, [8, 8]), joestar.NeighborSampler(graph, [3, -1], probs="w")):
        assert seconds_per_load(graph, sampler, graph.train_idx, torch.device("cpu"), False, True) == 6.0


def test_every_macro_batch_of_a_plan_pays_for_its_load(graph):
    net, sampler = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, 2, 4), joestar.NeighborSampler(graph, [3, 2])

    def plan(load: float):
        planner = Planner(net, sampler, 1, batch=10, speeds=Speeds(bus=1e6, load=load))
        planner.budget = int(0.9 * sum(planner.resident().values()))
        return planner.plan()

    without, some, many = plan(0.0), plan(1e-3), plan(1e3)
    assert some.seconds["loads"] == pytest.approx(some.macro_batches * 1e-3)
    assert some.seconds["bus"] == pytest.approx(some.bus / 1e6)
    assert without.seconds["loads"] == 0
    assert many.epoch_seconds >= 1e3 * many.macro_batches and "loads decide)" in str(many)
    assert many.macro_batches <= min(some.macro_batches, without.macro_batches)


def test_nothing_is_measured_where_everything_fits(graph, monkeypatch):
    """Of loads: how fast the device is, is; an epoch of steps is expected to take so long."""
    monkeypatch.setattr(planning, "seconds_per_load", lambda *given: pytest.fail("measured"))
    net, sampler = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, 2, 4), joestar.NeighborSampler(graph, [3, 2])
    plan = Planner(net, sampler, 1 << 40).plan()
    assert plan.fits and plan.epoch_seconds > 0
