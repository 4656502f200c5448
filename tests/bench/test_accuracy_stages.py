"""``benchmarks/accuracy_stages.py``: a step started over runs as a new one, seeds are paired, files are resumed."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import accuracy_stages  # noqa: E402
import stage_runs  # noqa: E402

from joestar.errors import GraphError  # noqa: E402

pytestmark = pytest.mark.usefixtures("cheapest_captures")

RECIPE = replace(stage_runs.RECIPES["planted"], epochs=2, batch=25, hidden=8, heads=2, fanouts=(4, 3), lr=0.02)


def task(model="sage", mode="large-batch"):
    return stage_runs.Task("planted", model, mode, RECIPE, backend="eager", nodes=2_000)


@pytest.fixture(scope="module")
def graph():
    return stage_runs.load(task(), None)


def same(one, other):
    assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        pytest.param("sage", "single", marks=pytest.mark.fuzz),
        pytest.param("sage", "large-batch", marks=pytest.mark.fuzz),
        pytest.param("sage", "partitions", marks=pytest.mark.slow),
        pytest.param("gat", "large-batch", marks=pytest.mark.slow),
        pytest.param("gat", "partitions", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_started_over_runs_as_a_new_one(graph, model, mode):
    """Bit for bit: parameters, optimizer, order, samples and dropout hold nothing of the seeds before.

    Bounds are those of the step that is started over: sums over padded rows depend on them in the last bit.
    """
    used, new = (stage_runs.Runs(task(model, mode), graph, seed) for seed in (0, 3))
    for seed in (0, 3):  # bounds are widened as far as both need
        used.run(seed)
    first = used.run(0)
    state, programs = new.step.state_dict(), used.step.state_dict()["programs"]
    new.step.load_state_dict(state | {"programs": programs})
    after_others, fresh = used.run(3), new.train()
    same(after_others, {"seed": 3, **fresh})
    for one, other in zip(used.model.parameters(), new.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert after_others["loss"] != first["loss"]
    same(used.run(0), first)
    if mode == "large-batch":
        assert used.step.traffic.macro_batches and used.step.traffic.cold, "some rows come from the CPU"


@pytest.mark.fuzz
def test_modes_begin_alike(graph):
    """The same weights and order: with all neighbours the runs of a pair are the same."""
    whole = replace(RECIPE, fanouts=(-1, -1))
    made = [
        stage_runs.Runs(replace(task("sage", mode), recipe=whole), graph).run(1) for mode in ("single", "large-batch")
    ]
    same(*made)


def test_intervals_are_students():
    differences = np.random.default_rng(0).normal(0.1, 0.4, 12)
    expected = stats.ttest_1samp(differences, 0).confidence_interval()
    assert accuracy_stages.interval(list(differences)) == pytest.approx((differences.mean(), *expected))
    assert accuracy_stages.interval([0.1])[1:] == (-math.inf, math.inf)
    assert [accuracy_stages.verdict(*ends, 0.15) for ends in ((-0.15, 0), (-0.2, 0), (-0.3, -0.16))] == [
        "holds", "open", "worse"
    ]  # fmt: skip


def test_so_many_seeds_are_needed():
    number, random = accuracy_stages.seeds_needed(0.4, 0.15), np.random.default_rng(0)
    lows = [accuracy_stages.interval(list(random.normal(0, 0.4, number)))[1] for _ in range(400)]
    assert np.mean(np.array(lows) >= -0.15) == pytest.approx(0.8, abs=0.07)
    assert accuracy_stages.seeds_needed(0.8, 0.15) > 3 * number


def written(out, mode, tests, first=0):
    runs = [{"seed": first + i, "test": value, "sampled": value} for i, value in enumerate(tests)]
    made = {"task": asdict(task(mode=mode)), "runs": runs}
    (out / f"planted-sage-{mode}.json").write_text(json.dumps(made))


def test_only_seeds_of_both_are_compared(tmp_path):
    written(tmp_path, "single", [80.0, 81.0, 82.0, 90.0])
    written(tmp_path, "large-batch", [81.1, 82.0, 90.4, 70.0], first=1)
    written(tmp_path, "partitions", [50.0, 50.5])
    (tmp_path / "table.json").write_text("[]")
    rows = accuracy_stages.rows(tmp_path, {"large-batch": 0.15, "partitions": 0.6})
    assert [(row["mode"], row["seeds"], row["verdict"]) for row in rows] == [
        ("large-batch", 3, "open"), ("partitions", 2, "worse")
    ]  # fmt: skip
    assert rows[0]["difference"] == pytest.approx(0.5 / 3)
    text = accuracy_stages.table(rows)
    assert "large-batch    3" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.fuzz
def test_the_first_epochs_of_a_run_are_a_shorter_run(graph, tmp_path):
    """Of both of a pair; runs that are too short, or have no curve, are left out."""
    for mode in ("single", "large-batch"):
        few, many = (
            stage_runs.Runs(replace(task("sage", mode), recipe=replace(RECIPE, epochs=epochs)), graph).run(1)
            for epochs in (2, 5)
        )
        same({"curve": many["curve"][:2]}, {"curve": few["curve"]})
        made = {"task": asdict(task(mode=mode)), "runs": [many, {"seed": 2, "test": 1.0, "sampled": 1.0}]}
        (tmp_path / f"planted-sage-{mode}.json").write_text(json.dumps(made))
        short = accuracy_stages.shortened(made, 2)["runs"]
        assert short == [{key: few[key] for key in ("seed", "val", "test", "epoch")}]
    assert [row["seeds"] for row in accuracy_stages.rows(tmp_path, {"large-batch": 0.15}, 5)] == [1]
    assert accuracy_stages.rows(tmp_path, {"large-batch": 0.15}, 6) == []


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch):
    made, run = [], []

    class Runs:
        def __init__(self, *given):
            made.append(given)
            self.step = type("Step", (), {"counters": type("C", (), {"steps": 1, "fallbacks": 0}), "plan": None})

        def run(self, seed):
            if seed == 4:
                raise GraphError("no room")
            run.append(seed)
            return {"seed": seed, "test": 1.0}

    monkeypatch.setattr(stage_runs, "Runs", Runs)
    monkeypatch.setattr(stage_runs, "load", lambda *given: None)
    accuracy_stages.work(task(mode="single"), None, tmp_path, 2, math.inf)
    accuracy_stages.work(task(mode="single"), None, tmp_path, 3, math.inf)
    accuracy_stages.work(task(mode="single"), None, tmp_path, 3, math.inf)
    assert run == [0, 1, 2] and len(made) == 2
    accuracy_stages.work(task(mode="single"), None, tmp_path, 9, 0.0)
    assert run == [0, 1, 2], "the time is up"
    with pytest.raises(SystemExit, match="another setting"):
        accuracy_stages.work(replace(task(mode="single"), columns=7), None, tmp_path, 3, math.inf)
    with pytest.raises(SystemExit, match=r"seeds \[4\] failed"):
        accuracy_stages.work(task(mode="single"), None, tmp_path, 6, math.inf)
    assert run == [0, 1, 2, 3, 5], "the other seeds are run"
    assert [path.name for path in tmp_path.iterdir()] == ["planted-sage-single.json"]
