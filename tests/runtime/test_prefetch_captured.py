"""Captured steps made a step early, with stand-ins for CUDA graphs and streams.

The fronts' stream works as soon, or as late, as its waits allow.
"""

import contextlib
from typing import ClassVar
from unittest import mock

import pytest
import torch

from joestar.runtime import prefetch
from tests.runtime import stand_ins
from tests.runtime.common import make_step, tight_bounds, train
from tests.runtime.prefetch_loops import IDX, LOOPS, both, graph_of, other_steps

pytestmark = pytest.mark.usefixtures("cheapest_captures")


class Stream:
    """Work in order, carried out when somebody waits for it, or at once."""

    current: "Stream"

    def __init__(self, late: bool):
        self.late, self.work, self.log = late, [], []

    def do(self, work) -> None:
        self.work.append(work)
        if not self.late:
            self.finish()

    def finish(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()

    def wait_stream(self, other: "Stream") -> None:
        other.finish()


class Graph:
    """In place of a ``StepGraph``: what it captured runs again, and leaves its results in the same memory."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, step, device, memory=None, beside=False, ahead=False):
        self.step, self.beside, self.overlapped, self.seconds = step, beside, [], 0.0
        self.graph, self.memory = self, memory
        for _ in range(2):
            step()
        Graph.made.append(self)

    def replay(self) -> None:
        Stream.current.do(self.step)

    def free(self) -> None:
        Graph.made.remove(self)


class Box(stand_ins.Box):
    """Work of the steps' stream ends before its word is read."""

    def wait(self):
        Stream.current.finish()
        return self.word


@pytest.fixture(params=[False, True], ids=["soon", "late"])
def captured(request, monkeypatch):
    """Runners capture their steps; the fronts' stream is slow, or at once."""
    main, side = Stream(late=False), Stream(late=request.param)
    Stream.current = main
    Graph.made.clear()

    @contextlib.contextmanager
    def on(stream):
        Stream.current = stream
        yield
        Stream.current = main

    def leave(places, turn, new):
        """As what a graph captured, into the memory of its first run."""
        kept = places[turn]
        if kept is None:
            seeds, count, *made = (value.clone() for value in (new.seeds, new.count, *new.made))
            places[turn] = prefetch.Batch(seeds, count, made)
            return
        for place, value in zip([kept.seeds, kept.count, *kept.made], [new.seeds, new.count, *new.made], strict=True):
            place.copy_(value)

    monkeypatch.setattr(prefetch, "StepGraph", Graph)
    monkeypatch.setattr(prefetch, "_leave", leave)
    monkeypatch.setattr(prefetch, "GraphMemory", mock.Mock)
    monkeypatch.setattr(prefetch, "own_stream", lambda *_: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    with stand_ins.captured_steps(Graph, Box):
        yield side


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.each("loop")
def test_graphs_that_take_turns_leave_the_same_bits(loop, captured, monkeypatch):
    ours = both(loop, monkeypatch, store=True)
    assert ours.captures >= 1 and not captured.work


@pytest.mark.parametrize("patience", [1000, 2])
def test_graphs_that_take_turns_redo_and_are_captured_again(captured, monkeypatch, patience):
    tight_bounds(monkeypatch, 1.0)
    ours = both(other_steps, monkeypatch, patience=patience, model_options={"norm": "batch_norm"}, least=2)
    assert ours.fallbacks > 1 and ours.captures > 1


def test_gradients_are_those_of_the_latest_step(captured, monkeypatch):
    def loop(step):
        found = []
        for loss in step.epoch(IDX, 100):
            found += [loss.clone(), *(p.grad.clone() for p in step.model.parameters())]
        return found

    both(loop, monkeypatch, accumulate=2)


@pytest.mark.parametrize("store", [False, True], ids=["resident", "store"])
def test_fronts_share_no_memory_with_what_runs_beside_them(captured, store):
    step = make_step(prefetch=True, graph=graph_of(store))
    train(step, IDX, epochs=1)
    graphs = step._runner.graph
    fronts, backs = ([graph for graph in Graph.made if graph.beside is beside] for beside in (True, False))
    memories = [graph.memory for graph in fronts]
    assert graphs.fronts + graphs.fars == fronts and len(graphs.fars) == (2 if store else 0) and graphs.backs == backs
    assert len(set(map(id, memories))) == len(memories) == (4 if store else 2)
    assert memories[0].tables is memories[1].tables
    assert len(backs) == 2 and backs[0].memory is backs[1].memory and backs[0].memory not in memories
    step._runner.drop_graph()
    assert Graph.made == []


@pytest.mark.parametrize("store", [False, True], ids=["resident", "store"])
def test_every_batch_is_made_once_and_two_steps_early_where_rows_are_far(captured, store, monkeypatch):
    step = make_step(prefetch=True, graph=graph_of(store))
    train(step, IDX, epochs=1)
    graphs, done = step._runner.graph, []
    for name in ("fronts", "fars", "backs"):
        for turn, graph in enumerate(getattr(graphs, name)):
            key = graphs.state.key if name == "backs" else graphs.keys[turn]
            monkeypatch.setattr(graph, "step", _noted(done, name, graph.step, key))
    train(step, IDX, epochs=1)
    steps = sorted({position for _, position in done})
    for name in ("fronts", "backs", *(["fars"] if store else [])):
        assert [position for which, position in done if which == name] == steps, name
    if store:
        for position in steps[2:]:
            made, read, before = (done.index(each) for each in (
                ("fronts", position), ("fars", position), ("backs", position - 1)
            ))  # fmt: skip
            assert made < read and made < before


def _noted(done, name, work, key):
    def carried_out():
        done.append((name, int(key[2])))
        work()

    return carried_out
