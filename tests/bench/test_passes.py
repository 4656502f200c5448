"""``joestar bench passes``: every model with all passes, without each that fires, and with all again."""

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.bench import passes
from joestar.cli.main import app
from joestar.fusion.backend.first import FirstPasses
from joestar.fusion.backend.joint import JointPasses
from joestar.fusion.backend.rewrites import counted, note
from joestar.fusion.table import BACKEND

pytestmark = pytest.mark.usefixtures("cheapest_captures")

ARGUMENTS = ["bench", "passes", "--shape", "tiny", "--steps", "2", "--batch-size", "50", "--fanouts", "3,2",
             "--hidden", "8"]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    def measured(model, without, setting):
        return passes._row(model, without, setting, torch.get_num_threads())

    monkeypatch.setattr(passes, "_measured", measured)
    monkeypatch.setattr(joestar, "compile", functools.partial(joestar.compile, backend="eager"))


def test_command_line(tmp_path):
    file = tmp_path / "passes.json"
    only = ["--models", "sage,residual_norm", "--only", "sample-gather-aggregate"]
    found = CliRunner().invoke(app, [*ARGUMENTS, *only, "--json", str(file)])
    assert found.exit_code == 0, found.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["model"], row["without"]) for row in rows] == [
        (model, without) for model in ("sage", "residual_norm") for without in ("", "sample-gather-aggregate", "")
    ]
    for row in rows:
        assert row["step"]["median"] > 0
        assert ("sample-gather-aggregate" in row["fired"]) == (row["without"] == ""), row
    assert "sample-gather-aggregate" in found.output and "%" in found.output


def test_passes_over_the_backends_graphs_are_counted():
    """Those that ran and changed nothing are left out; those of which nothing is known, from a cache, are not."""
    graph = torch.fx.Graph()
    graph.output(())
    with counted() as outer, counted() as found:
        FirstPasses(disabled=("join-casts",))(graph)
        JointPasses("cuda")(graph)
        note("gradient-sums", 2)
    note("gradient-sums", 1)
    assert outer == found and found["gradient-sums"] == 2 and set(found) == set(BACKEND) - {"join-casts", "overlap"}
    assert passes._in_backend(found, "") == ["gradient-sums", "join-casts", "overlap"]
    assert passes._in_backend(found, "overlap") == ["gradient-sums", "join-casts"]
    assert passes._in_backend({}, "") == list(BACKEND)


def test_wrong_words_are_refused():
    for wrong, message in ((["--models", "sega"], "unknown model"), (["--only", "fuse"], "unknown pass 'fuse'")):
        refused = CliRunner().invoke(app, [*ARGUMENTS, *wrong])
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_changes_are_told_from_the_mean_of_the_runs_with_all_passes():
    times = {"": [2.0, 4.0], "bias": [6.0]}
    rows = [{"model": "sage", "without": name, "step": {"median": value}, "memory": 2**20}
            for name, values in times.items() for value in values]  # fmt: skip
    assert [line.split()[-3:-1] for line in passes.lines(rows)[1:]] == [["-33.3", "%"], ["+33.3", "%"], ["+100.0", "%"]]
