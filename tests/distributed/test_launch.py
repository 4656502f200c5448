"""Whole runs as users start them: torchrun, and the command line, with real captures."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, torch, torch.nn.functional as F
import joestar
from joestar.bench.planted import planted

joestar.distributed.init(device="cpu")
graph = planted("tiny")
model = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, num_layers=2, out_channels=graph.num_classes)
step = joestar.compile(model, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy,
                       torch.optim.Adam(model.parameters(), 0.01), BACKEND)
for epoch in range(3):
    losses = [float(loss) for loss in step.epoch(graph.train_idx, 20)]
    if epoch == 1 and joestar.distributed.rank() == FAILING:
        raise ValueError("made up")
said = f"done {joestar.distributed.rank()} {losses[-1]} {step.evaluate(graph.val_idx)}\\n"
sys.stdout.write(said)  # in one piece: both ranks have one pipe
"""


def _torchrun(tmp_path, failing: int, backend: str) -> subprocess.CompletedProcess:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FAILING", str(failing)).replace("BACKEND", f"backend={backend!r}"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return _run(words)


def _run(words) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=environment)


def test_torchrun_with_inductor(tmp_path):
    done = _torchrun(tmp_path, -1, "inductor")
    assert done.returncode == 0, done.stderr
    first, second = sorted(line for line in done.stdout.splitlines() if line.startswith("done"))
    assert first.split()[2:] == second.split()[2:]


def test_torchrun_shows_what_one_rank_raised(tmp_path):
    done = _torchrun(tmp_path, 1, "eager")
    assert done.returncode != 0 and "done" not in done.stdout
    assert "ValueError: made up" in done.stderr


def test_the_command_line_on_two_processes_trains_what_one_trains(tmp_path):
    results = []
    for name, words in (
        ("two", ["--processes", "2", "--batch-size", "35", "--shard", "2MiB"]),
        ("one", ["--batch-size", "70"]),
    ):
        path = tmp_path / f"{name}.json"
        done = _run(
            [
                "-m",
                "joestar",
                "train",
                "--device",
                "cpu",
                "--backend",
                "eager",
                "--epochs",
                "4",
                "--report",
                str(path),
                *words,
            ]
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("best epoch") == 1
        results.append(json.loads(path.read_text()))
    for two, one in zip(*(result["epochs"] for result in results), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["validation"] == pytest.approx(one["validation"], abs=0.01)
    assert results[0]["results"]["test"] == pytest.approx(results[1]["results"]["test"], abs=0.01)


def test_the_command_line_on_two_processes_under_a_memory_budget(tmp_path):
    path = tmp_path / "run.json"
    given = ["--device", "cpu", "--backend", "eager", "--epochs", "3", "--fanouts", "5,5", "--hidden", "16"]
    words = ["--batch-size", "10", "--memory", "15MiB", "--processes", "2", "--report", str(path)]
    done = _run(["-m", "joestar", "train", "cora", *given, *words])
    assert done.returncode == 0, done.stderr
    assert "2 ranks, of which this is 0: " in done.stdout and done.stdout.count("best epoch") == 1
    content = json.loads(path.read_text())
    assert content["ledger"]["feeding"]["counts"]["macro-batches"] > 3
    assert content["epochs"][-1]["loss"] < content["epochs"][0]["loss"]


def test_the_command_line_on_two_processes_over_partitions_and_resumed(tmp_path):
    parts, path = tmp_path / "parts.npz", tmp_path / "run.json"
    done = _run(["-m", "joestar", "partition", "cora", "--parts", "16", "--out", str(parts), "--compare", "none"])
    assert done.returncode == 0, done.stderr
    given = ["--device", "cpu", "--backend", "eager", "--fanouts", "5,5", "--hidden", "16", "--batch-size", "10"]
    saved = ["--checkpoints", str(tmp_path / "saved"), "--report", str(path)]
    staged = ["--memory", "64MiB", "--partitions", str(parts), "--processes", "2"]
    for more in (["--epochs", "2"], ["--epochs", "3", "--resume"]):
        done = _run(["-m", "joestar", "train", "cora", *given, *saved, *staged, *more])
        assert done.returncode == 0, done.stderr
        assert "2 ranks, of which this is 0: " in done.stdout and done.stdout.count("best epoch") == 1
    losses = [epoch["loss"] for epoch in json.loads(path.read_text())["epochs"]]
    assert "Going on from checkpoint-" in done.stdout and len(losses) == 3 and losses == sorted(losses, reverse=True)
