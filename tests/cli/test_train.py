import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import joestar
from joestar.cli.config import build_config
from joestar.cli.train import run
from joestar.errors import ConfigError
from joestar.profile.environment import Environment
from joestar.profile.ledger import Counters, PassSummary, ProgramRecord, Report, SetRecord
from joestar.runtime import compiler

SECONDS = (9.0, 0.2, 0.4)
PASSES = [PassSummary("dce", 9, 50, 41, 1.0, False), PassSummary("extract-select", 2, 41, 40, 1.0, False)]
SETS = [SetRecord("hop 0", 3, 1, 2.0, 3, 4, 0.5), SetRecord("hop 1", 3, 1, 2.0, 3, None, None)]
PROGRAM = ProgramRecord("train", "", "", PASSES, [], [], SETS, 64, 1, {}, {"capture": 1.5, "backend": 2.0})
COUNTERS = Counters(steps=9, exact_steps=2, overflows=1)
ENVIRONMENT = Environment("0", "2", "3", "cpu", 1)
REPORT = Report(ENVIRONMENT, "GraphSAGE", "sampler", "eager", "padded", [PROGRAM], COUNTERS)


class Step:
    """Stands in for a compiled step: what ``run`` may call, and what it was called with."""

    def __init__(self, model, sampler, **options):
        self.model, self.sampler, self.options = model, sampler, options
        self.plan, self.whole = None, sampler.graph

    def fit(self, train_idx, val_idx, epochs, batch_size, patience, scheduler, on_epoch, metric, **saving):
        self.fitted = (len(train_idx), len(val_idx), epochs, batch_size, patience)
        self.saving = saving
        self.scheduler = scheduler
        records = [
            SimpleNamespace(epoch=epoch, loss=1.0 - epoch / 10, val=0.5 + epoch / 10 * (epoch < 2), seconds=seconds)
            for epoch, seconds in enumerate(SECONDS)
        ]
        for record in records:
            on_epoch(record)
        return SimpleNamespace(best_epoch=1, records=records)

    def evaluate(self, idx, batch_size, metric):
        assert len(idx) == 1000
        return {"accuracy": 0.75}

    def report(self):
        return REPORT


@pytest.fixture
def steps(monkeypatch):
    made = []

    def compile(*args, **options):
        made.append(Step(*args, **options))
        return made[-1]

    monkeypatch.setattr(joestar, "compile", compile, raising=False)
    return made


def test_run_passes_the_settings_on_and_reports(steps, tmp_path):
    flags = {"fanouts": "5,3", "hidden": 8, "epochs": 3, "batch_size": 64, "patience": 2, "clip_grad_norm": 1.5}
    flags |= {"backend": "eager", "execution": "exact", "seed": 3, "device": "cpu", "scheduler": "cosine"}
    files = {"report": str(tmp_path / "r.json"), "save": str(tmp_path / "best.pt")}
    console = Console(record=True, width=120, force_terminal=False)
    run(build_config(None, flags | files), console)
    [step] = steps
    assert step.fitted == (140, 500, 3, 64, 2)
    assert (list(step.sampler.fanouts), step.sampler.seed) == ([5, 3], 3)
    expected = {"clip_grad_norm": 1.5, "backend": "eager", "execution": "exact"}
    assert {key: step.options[key] for key in expected} == expected
    assert step.scheduler.T_max == 3
    assert step.saving == {"checkpoints": None, "checkpoint_every": None, "resume": False}
    assert step.options["optimizer"].param_groups[0]["params"] == list(step.model.parameters())

    shown = console.export_text()
    for text in ("2 of 3", "60.00%", "75.00%", "0.300 s", "9.000 s", "epoch 3/3  loss 0.8000"):
        assert text in shown
    assert "9 training steps: 7 padded, 2 exact; 1 overflows, 0 recompilations" in shown
    assert "program 'train': extract-select 2x; padding up to 50%; made in 3.5 s" in re.sub(r"\s*\n\s+", "; ", shown)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["results"]["validation"] == 0.6
    assert report["results"]["best_epoch"] == 2
    assert report["settings"]["fanouts"] == [5, 3]
    assert report["epochs"][2] == {"epoch": 3, "loss": 0.8, "validation": 0.5, "seconds": 0.4}
    assert report["ledger"]["counters"]["steps"] == 9
    checkpoint = torch.load(tmp_path / "best.pt", weights_only=True)
    assert checkpoint["settings"]["model"] == "sage"
    step.model.load_state_dict(checkpoint["model"])


def test_compilation_is_named_only_where_something_compiles(steps):
    for flags, words in (({"backend": "eager"}, "nothing was compiled"), ({}, "first epoch, with compilation")):
        console = Console(record=True, width=80, force_terminal=False)
        run(build_config(None, {"hidden": 8, "epochs": 3, "device": "cpu", **flags}), console)
        shown = console.export_text()
        assert words in shown
        assert ("ompiling" in shown.replace(words, "")) == (flags == {})


def test_without_a_compiler_nothing_is_compiled(steps, monkeypatch):
    monkeypatch.setattr(compiler, "problem", lambda: ("no C++ compiler", "Install g++."))
    console = Console(record=True, width=80, force_terminal=False)
    content = run(build_config(None, {"hidden": 8, "epochs": 3, "device": "cpu"}), console)
    assert "Going on with --backend eager" in console.export_text()
    assert steps[0].options["backend"] == content["settings"]["backend"] == "eager"


def test_progress_bar_on_a_terminal(steps):
    console = Console(record=True, width=160, force_terminal=True)
    run(build_config(None, {"hidden": 8, "epochs": 3, "device": "cpu"}), console)
    shown = console.export_text()
    assert "3/3" in shown
    assert "loss 0.8000  val 50.00%  0.400 s/epoch" in shown


def test_the_same_seed_gives_the_same_parameters(steps):
    for seed in (1, 1, 2):
        run(build_config(None, {"hidden": 8, "seed": seed, "device": "cpu"}), Console(quiet=True))
    first, second, third = (step.model.convs[0].lin_l.weight for step in steps)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_checkpoints_are_of_the_same_run(steps, tmp_path):
    console = Console(record=True, width=120, force_terminal=False)
    flags = {"fanouts": "5,3", "hidden": 8, "backend": "eager", "device": "cpu", "checkpoints": str(tmp_path / "c")}
    run(build_config(None, flags | {"keep": 2, "checkpoint_every": 5}), console)
    saved = steps[0].saving["checkpoints"]
    assert (saved.keep, saved.extra["settings"]["hidden"]) == (2, 8) and steps[0].saving["checkpoint_every"] == 5
    saved.save({"a": 1})
    with pytest.raises(ConfigError, match="holds 1 checkpoints already: go on with --resume"):
        run(build_config(None, flags), console)
    with pytest.raises(ConfigError, match=r"other settings: hidden \(8, now 16\)"):
        run(build_config(None, flags | {"resume": True, "hidden": 16}), console)
    run(build_config(None, flags | {"resume": True, "epochs": 7}), console)
    assert steps[-1].saving["resume"] and "Going on from checkpoint-000000001.pt" in console.export_text()
    with pytest.raises(ConfigError, match="--resume and --checkpoint-every need --checkpoints"):
        build_config(None, {"resume": True})


def test_a_run_does_not_go_on_over_other_data(steps, tmp_path):
    """Behind the same path; numbers of floating point may differ by machine, and what older versions wrote says
    nothing: both are said."""
    path, rng = tmp_path / "graph.npz", np.random.default_rng(0)
    held = {
        "edge_index": rng.integers(0, 5000, (2, 9000)), "x": rng.standard_normal((5000, 5)).astype(np.float32),
        "y": np.arange(5000) % 3,
    }  # fmt: skip
    np.savez(path, **held)
    flags = {"dataset": str(path), "fanouts": "5,3", "hidden": 8, "backend": "eager", "device": "cpu"}
    flags |= {"checkpoints": str(tmp_path / "c")}

    def said(**more):
        console = Console(record=True, width=400, force_terminal=False)
        run(build_config(None, flags | more), console)
        return console.export_text()

    said()
    checkpoints = steps[0].saving["checkpoints"]
    checkpoints.save({"a": 1})
    assert "other numbers" not in said(resume=True)
    np.savez(path, **(held | {"x": held["x"] + np.eye(5000, 5, dtype=np.float32)}))
    assert "Going on over other numbers than before: features of" in said(resume=True)
    np.savez(path, **(held | {"y": (np.arange(5000) + 1) % 3}))
    with pytest.raises(ConfigError, match=r"a run over other data: labels.* of .*graph\.npz are others now"):
        said(resume=True)
    del checkpoints.extra["graph"]
    checkpoints.save({"a": 1})
    assert "cannot be told: another version of Joestar read them" in said(resume=True)
