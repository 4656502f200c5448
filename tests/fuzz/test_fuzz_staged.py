"""Random programs over macro-batches: what a first stage that keeps everything gives is what the whole graph gives.

A case that fails is printed with its source and all that was drawn; ``PYTHONPATH=tests python -m pytest
tests/fuzz/test_fuzz_staged.py -k "[N]" -m ""`` repeats group N.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from captures import cheaper, quick

from joestar.profile.sizes import step_key
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch
from joestar.stages.plan import Speeds
from tests.distributed.ranks import run

from . import staged, staged_ranks
from .subjects import build, forget

PER_GROUP = 6
GROUPS, QUICK = 14, 1
"""Groups of cases; those of ``make test``."""
EDGES = 8, 2
"""Cases in which the edges of mini-batches are looked at; those of ``make test``."""

RANKS, PER_LAUNCH = 3, 16
"""Launches of two ranks, and the cases of each."""

fuzzed = partial(pytest.param, marks=pytest.mark.fuzz)


@pytest.mark.parametrize("group", [*range(QUICK), *map(fuzzed, range(QUICK, GROUPS))])
def test_macro_batches_of_everything_are_the_whole_graph(group):
    tally, wrong = staged.Tally(), []
    for case in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        found = staged.check(case, tally)
        wrong += [f"{staged.written_of(case).source}\n" + "\n".join(found)] if found else []
    assert not wrong, f"{len(wrong)} cases differ:\n\n" + "\n\n".join(wrong[:2])
    assert tally.cases >= PER_GROUP - 2, tally.refused
    assert tally.cut + tally.again and tally.plain and tally.whole_runs and tally.repeated and tally.of_whole, tally
    assert tally.crowded <= PER_GROUP // 2 and tally.finite >= tally.cases // 2, tally


@pytest.mark.fuzz
@pytest.mark.parametrize("group", range(RANKS))
def test_so_they_are_on_several_ranks(group, tmp_path):
    cases = list(range(group * PER_LAUNCH, (group + 1) * PER_LAUNCH))
    for outcome in run(2, staged_ranks.checked, cases, folder=tmp_path, seconds=400.0):
        assert outcome.code == 0, outcome.text
        wrong, tally = outcome.result["wrong"], outcome.result["tally"]
        assert not wrong, f"{len(wrong)} cases differ:\n\n" + "\n\n".join(wrong[:2])
        assert tally["cases"] >= PER_LAUNCH - 4 and tally["cut"] and tally["again"], tally
        assert not tally["crowded"] and tally["finite"] >= tally["cases"] // 2, tally


class Noted(LargeBatch):
    """A first stage that keeps a list of what it gave."""

    def __init__(self, num_seeds: int):
        super().__init__(num_seeds, eids=True)
        self.given = []

    def sample(self, graph, sampler, seeds, key):
        macro = super().sample(graph, sampler, seeds, key)
        self.given.append((macro, Counter(_edges_of(macro.ids, macro.indptr, macro.indices))))
        return macro


def _edges_of(ids, indptr, indices) -> list[tuple[int, int]]:
    """(source, destination) by ids in the whole graph."""
    rows = ids[torch.repeat_interleave(indptr.diff()).long()]
    return list(zip(ids[indices.long()].tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("case", [*range(EDGES[1]), *map(fuzzed, range(EDGES[1], EDGES[0]))])
def test_edges_of_mini_batches_are_edges_of_their_macro_batch(case):
    written = staged.written_of(f"edges {case}")
    subject = staged.own_graph(build([written])[0])
    subject.graph.ids = None  # edges are told by positions
    drawn = staged.Drawn(f"edges {case}", subject.graph, False)
    drawn.crowd(subject.graph, staged.hops_of(written))
    drawn.events, whole = {}, Counter(_edges_of(torch.arange(subject.graph.num_nodes), *_structure(subject.graph)))
    drawn.accumulate, start = 1, copy.deepcopy(subject.model)
    plan = mock.patch.object(Planner, "plan", lambda self: drawn.plan(self.graph.indices.dtype))
    speeds = mock.patch.object(Planner, "_measured", return_value=Speeds())
    with cheaper(quick), plan, speeds:
        trained = staged.Trained(subject, drawn, True)
        step = trained.step
        step.first_stage = stage = Noted(drawn.steps * drawn.batch)
        trained.noted = [staged.Noted(stage)]
        for number in range(2):
            epoch = trained._epoch(torch.tensor(drawn.order, dtype=subject.graph.indices.dtype))
            for position, (loss, seeds) in enumerate(epoch):
                trained.steps.append((staged.Taken(loss, seeds, number, position), drawn.batch))
                shown = _found(stage, step.arena.graph)
                assert not shown - whole
                slots = epoch._run.seeds(position)
                assert torch.equal(step.arena.graph.ids[slots.long()], seeds)
                key = step_key(0, number, position, "cpu")
                for block in step.sampler.sample(step.arena.graph.keyed(*key.tolist()), slots):
                    _check_block(block, step.arena.graph, shown)
                assert loss.shape == ()
    tally = staged.Tally()
    wrong = staged.plain_differences(replace(subject, model=start), drawn, trained, tally)
    forget([written])
    torch._dynamo.reset()
    assert not wrong, f"{written.source}\n" + "\n".join(wrong)
    assert len(trained.steps) == 2 * -(-len(drawn.order) // drawn.batch)
    unclear = written.autocast or "ropout" in written.source  # whose masks plain PyTorch may not know
    assert tally.plain == len(trained.steps) or unclear, tally


def _structure(graph):
    return graph.indptr, graph.indices


def _found(stage: Noted, arena) -> Counter:
    """The edges that the arena shows; they are those of a macro-batch that was given."""
    edges = Counter(_edges_of(arena.ids, arena.indptr, arena.indices[: int(arena.indptr[-1])]))
    assert any(edges == other for _, other in stage.given)
    return edges


def _check_block(block, arena, shown: Counter) -> None:
    """Its edges are among those that are shown."""
    rows = torch.repeat_interleave(block.indptr.diff())
    destinations = arena.ids[block.dsts.long()[rows]].tolist()
    sources = arena.ids[block.srcs.long()[block.indices.long()]].tolist()
    own = {(node, node) for node in destinations} if block._eids is None else set()  # self-loops that were added
    assert all((s, d) in shown or (s, d) in own for s, d in zip(sources, destinations, strict=True))


@pytest.mark.fuzz
def test_a_wrong_first_stage_is_found(monkeypatch):
    """The comparison is not empty: without half of the edges something differs."""
    right = LargeBatch.sample

    def without_half(self, *given):
        macro = right(self, *given)
        kept = macro.num_edges // 2
        ends = macro.indptr.clamp(max=kept)
        return type(macro)(macro.seeds, macro.ids, ends, macro.indices[:kept], macro.eids[:kept])

    monkeypatch.setattr(LargeBatch, "sample", without_half)
    monkeypatch.setattr(staged, "SAMPLED", 0.0)
    assert all(staged.check(case, staged.Tally()) for case in (1, 2))


@pytest.mark.parametrize("sampled", [pytest.param(0.0, marks=pytest.mark.fuzz), 1.0])
def test_slots_taken_for_ids_are_found(monkeypatch, sampled):
    """Nor is the one with plain PyTorch, and with models that compute with ids."""
    monkeypatch.setattr("joestar.lowering.lower.settle_slots", lambda *given: 0)
    monkeypatch.setattr(staged, "SAMPLED", sampled)
    assert any(staged.check(case, staged.Tally()) for case in (5, 11, 14))  # read ids, and are compared to their end


def test_programs_that_cannot_be_staged_are_left_out():
    for case in range(16):
        assert not any(piece in staged.written_of(case).source for piece in staged.WHOLE)
