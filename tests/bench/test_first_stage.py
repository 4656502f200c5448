"""``benchmarks/first_stage.py``: phases are those of the first stage, and do what it does."""

import importlib.util
from pathlib import Path

import torch

import joestar
from joestar.kernels.machine import num_threads, set_num_threads
from joestar.stages import LargeBatch

_SPEC = importlib.util.spec_from_file_location(
    "first_stage", Path(__file__).parents[2] / "benchmarks" / "first_stage.py"
)
first_stage = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(first_stage)

OPTIONS = first_stage.Options("tiny", 1.0, "cpu", [4, 10], [1, 2], [4, 3], 0.1, 64, 2)


def test_phases_make_the_macro_batch():
    stage = first_stage.Stage(OPTIONS)
    made = None
    for phase in stage.phases(4):
        made = phase(made)
    local, ids, indptr, indices, _, cold = made
    sampler = joestar.NeighborSampler(stage.graph, OPTIONS.fanouts)
    expected = LargeBatch(125).sample(stage.graph, sampler, stage.graph.train_idx[:125], (0, 0, 0))
    for name, found in (("seeds", local), ("ids", ids), ("indptr", indptr), ("indices", indices)):
        assert torch.equal(getattr(expected, name), found), name
    is_hot = stage.book.slot_of[ids.long()] < stage.book.hot
    assert stage.book.hot == 200 and torch.equal(cold, ids[~is_hot])


def test_rows_of_the_table():
    before = num_threads()
    try:
        rows = first_stage.measure(OPTIONS)
    finally:
        set_num_threads(before)
    assert [(row["part"], row["threads"]) for row in rows] == [("1/4", 1), ("1/4", 2), ("1/10", 1), ("1/10", 2)]
    for row in rows:
        phases = [row[f"{phase} ms"] for phase in ("sample", "write", "slots", "gather")]
        assert min(phases) > 0 and abs(sum(phases) - row["all ms"]) < 1e-9
        assert row["pick ms"] > 0 and row["pick CPU ms"] > 0
        assert len(first_stage.line(list(row.values())).split("|")) == len(first_stage.HEADERS) + 2
    assert {row["threads by"] for row in rows} <= {"jthread", "parlay"}
    assert rows[0]["nodes"] == rows[1]["nodes"] > rows[2]["nodes"] > 0


def test_of_several_rounds_the_least_counts():
    calls = []
    times, cpu, made = first_stage.best(3, lambda _: calls.append(1) or 5, lambda five: five + 1)
    assert len(calls) == 4 and made == 6 and len(times) == 2 and min(times) >= 0 and cpu >= 0
