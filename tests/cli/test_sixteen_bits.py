"""Features of 16 bits, as ``convert`` and ``generate`` write them, in every command; other dtypes beside them."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli import saved
from joestar.cli.main import app
from joestar.data import convert

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NODES = 60
PLAIN = ["--backend", "eager", "--execution", "exact", "--device", "cpu"]
KINDS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def call(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders by dtype and task."""
    path, rng = tmp_path_factory.mktemp("graphs"), np.random.default_rng(0)
    community = np.arange(NODES) % 3
    np.save(path / "edges.npy", np.stack([np.arange(NODES), (np.arange(NODES) + 3) % NODES]))
    np.save(path / "x.npy", 2 * np.eye(3)[community] + 0.1 * rng.standard_normal((NODES, 3)))
    labels = {"classes": community, "tasks": np.eye(3)[community], "values": community / 2}
    made = {}
    for task, y in labels.items():
        np.save(path / "y.npy", y)
        for dtype in KINDS:
            made[dtype, task] = convert(
                path / "edges.npy", path / f"{dtype}-{task}", features=path / "x.npy", labels=path / "y.npy",
                dtype=dtype, task="regression" if task == "values" else None, undirected=True, verbose=False,
                memory="1MiB",
            )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """Files of models by the dtype of what they were trained on; what the training printed."""
    path = tmp_path_factory.mktemp("models")
    flags = ["--epochs", 8, "--batch-size", 6, "--fanouts", "-1,-1", "--hidden", 16, "--dropout", 0.1, *PLAIN]
    shown = {d: call("train", folders[d, "classes"], *flags, "--save", path / f"{d}.pt") for d in KINDS}
    return {dtype: path / f"{dtype}.pt" for dtype in KINDS}, shown


def test_it_is_said_and_kept(trained):
    files, shown = trained
    for dtype, kind in KINDS.items():
        assert saved.read(files[dtype]).autocast == kind
        said = f"Features are {str(kind).removeprefix('torch.')}: the model runs under autocast"
        assert (said in shown[dtype]) == (kind is not None)


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
@pytest.mark.every(100)
def test_models_and_graphs_of_any_dtype(trained, folders, tmp_path, there, here):
    best, graph = trained[0][there], folders[here, "classes"]
    scores = json.loads(call("evaluate", best, graph, "--nodes", "all", "--full", "--json", "--device", "cpu"))
    assert scores["scores"]["accuracy"] > 0.95
    call("predict", best, graph, "--out", tmp_path / "p.npy", "--device", "cpu")
    logits = torch.from_numpy(np.load(tmp_path / "p.npy"))
    exact = joestar.load(folders["fp32", "classes"], verbose=False)
    with torch.no_grad():
        expected = saved.read(trained[0][there]).build(exact)(exact, exact.ndata["x"])
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0.03)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("classes", ("--model", "gcn", "--norm", "batch", "--class-weights")),
        ("tasks", ("--model", "gat", "--heads", 2, "--norm", "layer", "--class-weights")),
        ("values", ("--model", "gin", "--jk", "cat")),
        ("classes", ("--model", "sage", "--jk", "lstm", "--clip-grad-norm", 1.0)),
    ],
)  # fmt: skip
@pytest.mark.every(100)
def test_every_model_and_task_trains(folders, tmp_path, dtype, task, flags):
    report = tmp_path / "r.json"
    flags = [*flags, "--epochs", 2, "--fanouts", "2,2", "--hidden", 8, *PLAIN, "--report", report]
    call("train", folders[dtype, task], *flags)
    assert all(np.isfinite(epoch["loss"]) for epoch in json.loads(report.read_text())["epochs"])


def test_profile_and_plan(folders, tmp_path):
    graph = folders["bf16", "classes"]
    shown = call("profile", graph, "--steps", 1, "--no-ablation", "--fanouts", "2", "--backend", "eager", "--json",
                 tmp_path / "p.json")  # fmt: skip
    assert "Features are bfloat16" in shown
    assert json.loads((tmp_path / "p.json").read_text())["settings"]["autocast"] == "bfloat16"
    assert "Features are bfloat16" in call("plan", graph, "--fanouts", "2", "--memory", "64MiB", "--device", "cpu")
