"""The benchmarks run, on graphs of the promised shape, against a baseline that computes the same thing."""

import dataclasses
import functools
import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import joestar
from joestar.bench import inference
from joestar.bench import step as step_module
from joestar.bench.baselines import BlockModel, EagerStep, TorchSampler
from joestar.bench.measure import time_epochs
from joestar.bench.planted import SHAPES, Shape, _shuffle, planted
from joestar.bench.setting import IDS, Setting
from joestar.bench.step import logical_bytes
from joestar.cli.bench import _step_tables, _user_tables
from joestar.cli.console import columns
from joestar.cli.main import app
from joestar.data.planted import MIXED
from joestar.errors import ConfigError
from joestar.runtime.inference import Inference

from .easy import easy_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def test_planted_graph():
    shape = SHAPES["tiny"]
    graph = planted("tiny")
    assert graph.num_nodes == shape.nodes and graph.ndata["x"].shape == (shape.nodes, shape.features)
    assert graph.num_edges / shape.nodes == pytest.approx(shape.degree, rel=0.1)
    assert int(graph.indices.min()) >= 0 and int(graph.indices.max()) < shape.nodes
    assert graph.train_idx.unique().numel() == shape.train
    same = planted("tiny")
    assert torch.equal(graph.indices, same.indices) and torch.equal(graph.ndata["x"], same.ndata["x"])
    assert _near(graph, shape) == pytest.approx(shape.community / shape.nodes, abs=0.02), "ids say nothing"
    src, dst, _ = graph.coo()
    alike = (graph.ndata["y"][src.long()] == graph.ndata["y"][dst.long()]).double().mean().item()
    kept = (1 - MIXED) ** 2 * (shape.inside + (1 - shape.inside) / shape.classes)
    assert alike == pytest.approx(kept + (1 - (1 - MIXED) ** 2) / shape.classes, abs=0.1), "labels move along"
    centres = torch.stack([graph.ndata["x"][graph.ndata["y"] == label].mean(0) for label in range(shape.classes)])
    nearest = torch.cdist(graph.ndata["x"], centres).argmin(1)
    assert 0.25 < (nearest == graph.ndata["y"]).double().mean() < 0.45, "features move along, and are not enough"


def test_planted_ids_have_communities_in_a_row():
    shape, graph = SHAPES["tiny"], planted("tiny", shuffled=False)
    assert _near(graph, shape) == pytest.approx(shape.inside, abs=0.1)
    assert torch.equal(graph.in_degrees(), planted("tiny").in_degrees()), "the rest is drawn alike"


def test_the_shuffle_is_a_permutation():
    place, id_at = _shuffle(1000, 0, "cpu")
    assert torch.equal(id_at[place], torch.arange(1000, dtype=torch.int32)) and place.unique().numel() == 1000


def _near(graph, shape) -> float:
    """Share of edges between ids of one community, were it consecutive."""
    src, dst, _ = graph.coo()
    return (src.long() // shape.community == dst.long() // shape.community).double().mean().item()


@pytest.mark.fuzz
def test_batches_meet_as_many_nodes_as_in_ogbn_products():
    """The shape of products at a twelfth of its nodes, where a few more neighbours coincide."""
    full = SHAPES["products"]
    small = Shape(**{**full.__dict__, "nodes": 200_000, "features": 1, "train": 20_000})
    graph = planted(small)
    sampler = joestar.NeighborSampler(graph, [15])
    sizes = [
        sampler.sample(graph.keyed(0, 0, i), part)[0].num_src
        for i, part in enumerate(graph.train_idx[:5000].split(1000))
    ]
    assert sum(sizes) / len(sizes) == pytest.approx(14_700, rel=0.06)


def test_unknown_shape():
    with pytest.raises(ConfigError, match="unknown shape 'large'"):
        planted("large")


def test_baseline_samples_distinct_neighbours():
    graph = planted("tiny")
    sampler = TorchSampler(graph.indptr, graph.indices, [4, 3])
    nodes = torch.arange(500)
    row, _ = sampler.neighbours(nodes, 4)
    assert torch.equal(torch.bincount(row, minlength=500), graph.in_degrees()[:500].clamp(max=4))
    ids, blocks = sampler.blocks(torch.arange(50))
    assert ids.unique().numel() == ids.numel() and torch.equal(ids[:50], torch.arange(50))
    edges = {(int(s), int(d)) for d in range(500) for s in graph.indices[graph.indptr[d] : graph.indptr[d + 1]]}
    for edge_index, count in blocks:
        assert int(edge_index[1].max()) < count
        pairs = set(zip(ids[edge_index[0]].tolist(), ids[edge_index[1]].tolist(), strict=True))
        assert {pair for pair in pairs if pair[1] < 500} <= edges
    assert (sampler.local == -1).all(), "the table is left clean"


def test_baseline_takes_every_neighbour():
    graph = planted("tiny")
    row, src = TorchSampler(graph.indptr, graph.indices, [-1]).neighbours(torch.tensor([7, 3]), -1)
    rows = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]].long() for v in (7, 3)]
    assert torch.equal(src, torch.cat(rows))
    assert torch.equal(row, torch.tensor([0, 1]).repeat_interleave(torch.tensor([len(part) for part in rows])))


@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat"])
def test_baseline_learns(model):
    graph = easy_graph()
    torch.manual_seed(0)
    net = BlockModel(model, 16, 32, 2, graph.num_classes, heads=4, dropout=0.0)
    step = EagerStep(graph, [5, 5], net, torch.optim.Adam(net.parameters(), 1e-2))
    losses = [float(step(part)) for _ in range(12) for part in graph.train_idx.split(100)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_logical_bytes_of_one_layer():
    """10 destinations, 40 edges, 4 features: gathers of 50 rows, the joined matrix of 10 x 8 moved three times."""
    assert logical_bytes([10, 45], [40], 4, 8, 2) == 2 * (50 * 4 + 3 * 10 * 8)


def test_whole_epochs_are_timed():
    calls = []
    found = time_epochs(calls.append, 4, 0.0, torch.device("cpu"), 3, 5)
    assert calls.count(None) == found.count >= 3 and calls.count(1) >= 5 and found.steps == 4
    assert found.ms_per_step == pytest.approx(found.seconds * 250) and found.set_up_ms == found.one_step_ms
    assert found.rest_ms == pytest.approx(found.seconds * 1e3)


@pytest.fixture
def here(monkeypatch):
    """No processes, and no compiling: only the row of the baseline has a process of its own, as on a CPU all have."""
    alone = step_module._measured

    def measured(*given):
        _, how, _, setting, _ = given
        return (alone if how == "eager" and setting.dataset is None else step_module._row)(*given)

    monkeypatch.setattr(step_module, "_measured", measured)
    monkeypatch.setattr(joestar, "compile", functools.partial(joestar.compile, backend="eager"))


def test_a_step_ahead_is_asked_for(monkeypatch):
    """``--prefetch`` reaches ``compile``, of Joestar's rows alone, and the caption says so."""

    class AskedError(Exception):
        pass

    asked = []

    def compiled(*args, **options):
        asked.append(options["prefetch"])
        raise AskedError

    monkeypatch.setattr(joestar, "compile", compiled)
    monkeypatch.setattr(step_module, "_measured", step_module._row)
    for flags in ((), ("--prefetch",)):
        arguments = ["bench", "step", "--shape", "tiny", "--models", "sage", "--baselines", "none", *flags]
        assert isinstance(CliRunner().invoke(app, arguments).exception, AskedError)
    assert asked == [False, True]
    for prefetch in asked:
        rows = _rows(("sage",), ("joestar",), ids="shuffled")
        lines = _printed(_step_tables, {"setting": SETTING | {"prefetch": prefetch}, "rows": rows})
        assert ("prefetch" in "".join(lines)) == prefetch and max(map(len, lines)) <= 80


@pytest.mark.fuzz
def test_a_whole_measurement_from_the_command_line(here, tmp_path):
    arguments = ["bench", "step", "--shape", "tiny", "--models", "sage", "--steps", "3", "--batch-size", "60"]
    file = tmp_path / "step.json"
    found = CliRunner().invoke(app, [*arguments, "--fanouts", "3,2", "--hidden", "8", "--json", str(file)])
    assert found.exit_code == 0, found.output
    result = json.loads(file.read_text())
    assert result["setting"]["fanouts"] == [3, 2]
    assert [row["how"] for row in result["rows"]] == ["joestar", "eager"]
    for row in result["rows"]:
        assert row["step"]["p20"] <= row["step"]["median"] <= row["step"]["p80"] and row["step"]["steps"] == 3
        assert row["sampling"]["median"] > 0 and row["ids"] == "shuffled"
        epochs = row["epochs"]
        assert epochs["steps"] == 9 and epochs["ms_per_step"] == pytest.approx(epochs["seconds"] * 1e3 / 9)
        assert epochs["set_up_ms"] == pytest.approx(epochs["one_step_ms"] - row["step"]["median"])
    assert result["rows"][0]["counts"][0] == 60 and result["rows"][0]["logical_bytes"] > 0
    for wrong, message in (
        (["--shape", "huge"], "unknown shape"), (["--models", "mlp"], "unknown model"),
        (["--fanouts", "3,x"], "integers by commas"), (["--precision", "int8"], "unknown precision"),
        (["--device", "tpu"], "must be cpu or cuda"), (["--json", str(tmp_path)], "it is a folder"),
        (["--ids", "sorted"], "unknown order of ids"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_a_dataset_whose_training_nodes_are_one_batch(here):
    setting = Setting(
        dataset="cora", models=("gcn",), fanouts=(-1, -1), hidden=16, dropout=0.0, steps=2, warm_up=1, epochs=1
    )
    rows = step_module.run(setting)["rows"]
    assert [(row["how"], row["epochs"]["steps"]) for row in rows] == [("joestar", 1), ("eager", 1)]
    assert rows[0]["counts"][0] == 140


def test_both_orders_of_ids_are_measured_in_one_run(monkeypatch):
    seen = []
    row = step_module.Row("sage", "joestar", step_module.Timing(1.0, 1.0, 1.0, 1), 1.0, 1.0, 1)

    def measured(name, how, graph, setting, looks):
        seen.append((*setting.ids, _near(graph, SHAPES["tiny"]) > 0.5))
        return step_module.Row(**vars(row))

    monkeypatch.setattr(step_module, "_measured", measured)
    result = step_module.run(Setting("tiny", models=("sage",), baselines=(), ids=("shuffled", "planted")))
    assert seen == [("shuffled", False), ("planted", True)]
    assert [row["ids"] for row in result["rows"]] == ["shuffled", "planted"]


def test_the_profiler_comes_behind_all_that_is_timed(monkeypatch):
    """It stays in the process, and makes launches slower."""
    seen = []

    def measured(name, how, graph, setting, looks):
        seen.append(f"{name} {how}")
        row = step_module.Row(name, how, step_module.Timing(1.0, 1.0, 1.0, 1), 1.0, 1.0, 1)
        looks.append(lambda: step_module._look(row, lambda: seen.append(f"a step of {name} {how}")))
        return row

    def launches(step):
        step()
        return {"launches": 1.0}

    monkeypatch.setattr(step_module, "_measured", measured)
    monkeypatch.setattr(step_module, "launches", launches)
    rows = step_module.run(Setting("tiny", models=("sage", "gcn"), baselines=("eager",)))["rows"]
    every = [f"{name} {how}" for name in ("sage", "gcn") for how in ("joestar", "eager")]
    assert seen == [*every, *(f"a step of {which}" for which in every)]
    assert all(row["launches"] == {"launches": 1.0} for row in rows)


def test_bytes_that_inference_must_move():
    """Rows of features, then of 5 columns (updated before they are aggregated), per edge or once; ids; what is kept."""
    graph = planted("tiny")
    torch.manual_seed(0)
    gathered, unique = inference.traffic(Inference(joestar.nn.GraphSAGE(16, 8, 2, 5), graph).plan)
    nodes, edges = graph.num_nodes, graph.num_edges
    assert gathered - unique == 4 * (edges - nodes) * (16 + 5)
    structure = 2 * (4 * edges + 8 * (nodes + 1))
    assert unique == 4 * nodes * ((16 + 16 + 5 + 5) + (5 + 5 + 5)) + structure


def test_inference_is_measured(tmp_path):
    arguments = ["bench", "inference", "--shape", "tiny", "--models", "gcn", "--repeats", "2", "--hidden", "8"]
    file = tmp_path / "inference.json"
    arguments += ["--layers", "2", "--ids", "both", "--budget", "1", "--json", str(file)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "…" not in found.output
    table = [line for line in found.output.splitlines() if line.startswith(("model ", "sage ", "gcn "))]
    assert max(map(len, table)) <= 80
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert result["memory_budget"] == 2**30 and [row["ids"] for row in rows] == ["shuffled", "planted"]
    assert all(row["run"]["steps"] == 2 and row["gathered_bytes"] > row["unique_bytes"] > 0 for row in rows)


# --- tables ---


def _printed(show, result, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    show(result, console)
    return console.file.getvalue().splitlines()


def _rows(models, hows, **more) -> list[dict]:
    """Rows with the longest values that are to be expected."""
    step = {"median": 12345.678, "p20": 12345.678, "p80": 12345.678, "steps": 20}
    epochs = {"seconds": 1234.567, "count": 3, "steps": 1208, "ms_per_step": 12345.678, "one_step_ms": 12345.678,
              "set_up_ms": 1234.567, "rest_ms": 1.0}  # fmt: skip
    row = {"step": step, "epochs": epochs, "first_step_seconds": 123.4, "memory": 123 * 2**30, "sampling": step,
           "launches": {"launches": 1234.0, "kernels": 1234.0, "syncs": 123.0}, "note": ""}  # fmt: skip
    return [{"model": model, "how": how, **row, **more} for model in models for how in hows]


SETTING = dataclasses.asdict(Setting("products", "cuda", precision="tf32"))


def test_tables_of_steps_fit_80_columns():
    hows = ("joestar", "eager", "compile", "loader")
    rows = [row for ids in IDS for row in _rows(("sage", "gat"), hows, ids=ids)]
    lines = _printed(_step_tables, {"setting": SETTING, "rows": rows})
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    headers = [line.split() for line in lines if line.startswith("model")]
    assert [len(header) for header in headers] == [7, 11, 10], "words of the headers"
    assert sum(line.count("12345.678") for line in lines) == 16 * (3 + 2), "no number is cut"
    narrow = _printed(_step_tables, {"setting": SETTING, "rows": rows}, 40)
    assert sum(line.count("12345.678") for line in narrow) == 16 * (3 + 2), "nor on a narrower terminal"


def test_tables_of_user_models_fit_80_columns():
    rows = _rows(("degree_biased_sampler", "pna"), ("joestar", "eager"), note="123 batches redone exactly")
    lines = _printed(_user_tables, {"setting": SETTING, "rows": rows})
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    assert sum("123 batches redone exactly" in line for line in lines) == 4
    assert sum(line.count("12345.68") for line in lines) == 4 * 3


def test_columns_without_a_value_are_left_out():
    assert columns(("a", "b", "c"), [("x", "-", "10"), ("longer", "-", "")]) == ["a        c", "x       10", "longer"]
