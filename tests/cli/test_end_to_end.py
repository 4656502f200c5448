"""The command from its arguments to its files, nothing replaced."""

import json
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli.main import app
from joestar.runtime.runner import StepRunner

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NUM_NODES = 60


@pytest.fixture
def dataset(tmp_path):
    """Two communities of thirty nodes; features say little, neighbours tell."""

    def write(labels):
        rng = np.random.default_rng(0)
        community = np.arange(NUM_NODES) % 2
        edges = rng.integers(0, NUM_NODES, (2, 2000))
        edges = edges[:, community[edges[0]] == community[edges[1]]]
        x = rng.standard_normal((NUM_NODES, 8)).astype(np.float32) + community[:, None]
        path = tmp_path / "communities.npz"
        np.savez(path, edge_index=edges, symmetric=0, x=x, y=labels(community))
        return str(path)

    return write


def train(*arguments):
    done = CliRunner().invoke(app, ["train", *arguments, "--device", "cpu"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


def test_exact_run_learns_and_writes_its_files(dataset, tmp_path):
    report, checkpoint = tmp_path / "r.json", tmp_path / "best.pt"
    flags = ["--hidden", "16", "--epochs", "8", "--fanouts", "5,5", "--batch-size", "20", "--dropout", "0"]
    flags += ["--backend", "eager", "--execution", "exact", "--class-weights", "--clip-grad-norm", "1"]
    path = dataset(lambda community: community)
    shown = train(path, *flags, "--scheduler", "cosine", "--report", str(report), "--save", str(checkpoint))
    assert "epoch 8/8  loss" in shown
    assert "test accuracy at that epoch" in shown
    assert "16 training steps: 0 padded, 16 exact" in shown
    written = json.loads(report.read_text())
    assert written["results"]["test"] > 0.9
    assert written["epochs"][-1]["loss"] < written["epochs"][0]["loss"]

    stored = torch.load(checkpoint, weights_only=True)
    model = joestar.nn.GraphSAGE(8, 16, 2, 2)
    model.load_state_dict(stored["model"])
    graph = joestar.load(path)
    hits = model.eval()(graph, graph.ndata["x"])[graph.test_idx].argmax(1) == graph.ndata["y"][graph.test_idx]
    assert float(hits.float().mean()) >= 0.9


def test_multilabel_run(dataset):
    path = dataset(lambda community: np.stack([community, 1 - community, community], axis=1))
    flags = ["--hidden", "16", "--epochs", "3", "--fanouts", "4", "--backend", "eager", "--execution", "exact"]
    assert "test micro F1 at that epoch" in train(path, *flags, "--class-weights", "--patience", "2")


def killed_after(steps: int, *arguments) -> None:
    """The command in a process that kills itself behind so many steps."""
    take, taken = StepRunner.take, []

    def counted(self, run):
        taken.append(take(self, run))
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return taken[-1]

    def run():
        torch.set_num_threads(1)
        StepRunner.take = counted
        train(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_the_same_command_goes_on_where_it_was_killed(dataset, tmp_path):
    """Losses, scores and the best weights are those of a run that nobody killed, bit for bit."""
    path = dataset(lambda community: community)
    flags = ["--hidden", "8", "--epochs", "4", "--fanouts", "5,5", "--batch-size", "6", "--scheduler", "cosine"]
    flags += ["--backend", "eager", "--execution", "exact", "--checkpoint-every", "2"]
    found = []
    for name, kills in (("whole", ()), ("killed", (1, 9))):
        report, best, kept = (str(tmp_path / f"{name}{end}") for end in (".json", ".pt", ""))
        command = [path, *flags, "--report", report, "--save", best, "--checkpoints", kept, "--resume"]
        for steps in kills:
            killed_after(steps, *command)
        shown = train(*command)
        assert ("Going on from checkpoint" in shown) == bool(kills)
        epochs = json.loads((tmp_path / f"{name}.json").read_text())["epochs"]
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in epochs]
        found.append((rows, torch.load(best, weights_only=True)["model"]))
    (rows, weights), (same_rows, same_weights) = found
    assert rows == same_rows and len(rows) == 4
    assert all(torch.equal(value, same_weights[name]) for name, value in weights.items())


@pytest.mark.slow
def test_default_run_reaches_the_accuracy_expected_of_cora():
    shown = train("cora", "--epochs", "30")
    line = next(line for line in shown.splitlines() if "test accuracy" in line)
    assert float(line.split("│")[2].strip(" %")) > 76
    assert "0 exact" in shown
