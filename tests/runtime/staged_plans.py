"""Plans and first stages of the tests of steps over macro-batches."""

import random
import types

import torch

import joestar
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch
from joestar.stages.plan import Plan

NODES, EDGES, BATCH = 300, 900, 16


class Whole(LargeBatch):
    """A first stage that keeps every neighbour, so that mini-batches are those of the whole graph."""

    repeats = False

    def sample(self, graph, sampler, seeds, key):
        return super().sample(graph, joestar.NeighborSampler(graph, [-1, -1]), seeds, key)


def plans(monkeypatch):
    """A function that sets the plan of the next steps: seeds per macro-batch, hot nodes, cold slots, room for edges."""

    def fix(seeds=48, hot=40, cold=NODES, edges=EDGES):
        found = Plan(1 << 30, False, seeds, 4, hot, cold, edges, hot_ids=torch.arange(0, 5 * hot, 5), batch=BATCH)
        monkeypatch.setattr(Planner, "plan", lambda self: found)

    fix()
    return fix


def made_up_clock(number: int):
    """A module ``time`` by whose clock anything takes between a microsecond and a second, at random, the same in every
    run."""
    rng, now = random.Random(f"clock {number}"), [0.0]

    def perf_counter() -> float:
        now[0] += 10.0 ** rng.uniform(-6, 0)
        return now[0]

    return types.SimpleNamespace(perf_counter=perf_counter)
