"""``joestar evaluate`` and ``joestar predict``, from a run to scores and predictions; other files are refused."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli import saved
from joestar.cli.main import app

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NUM_NODES = 40


def call(*arguments, code=0):
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, [*map(str, arguments)], env=environment, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


def write_graph(path, width=8, classes=2, labels=None, seed=0):
    rng = np.random.default_rng(seed)
    community = np.arange(NUM_NODES) % classes
    edges = rng.integers(0, NUM_NODES, (2, 1500))
    edges = edges[:, community[edges[0]] == community[edges[1]]]
    x = rng.standard_normal((NUM_NODES, width)).astype(np.float32) + community[:, None]
    np.savez(path, edge_index=edges, symmetric=0, x=x, y=community if labels is None else labels(community))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(file of the model, graph, report) of one short run."""
    folder = tmp_path_factory.mktemp("run")
    graph = write_graph(folder / "graph.npz")
    best, report = folder / "best.pt", folder / "r.json"
    flags = ["--hidden", "8", "--epochs", "4", "--fanouts", "4,4", "--batch-size", "12", "--norm", "batch"]
    flags += ["--backend", "eager", "--execution", "exact", "--device", "cpu", "--save", best, "--report", report]
    shown = call("train", graph, *flags)
    assert f"joestar evaluate {best}" in shown
    return best, graph, json.loads(report.read_text())


def test_evaluate_gives_the_score_that_training_printed(trained):
    best, graph, report = trained
    facts = json.loads(call("evaluate", best, "--json"))
    assert facts["scores"] == {"accuracy": report["results"]["test"]}
    assert (facts["nodes"], facts["count"]) == ("test", 8)
    shown = call("evaluate", best, "--nodes", "all", "--full")
    assert "all, 40" in shown and "accuracy" in shown
    model = saved.read(best).build(joestar.load(graph))
    loaded = joestar.load(graph)
    with torch.no_grad():
        hits = model(loaded, loaded.ndata["x"]).argmax(1) == loaded.ndata["y"]
    assert json.loads(call("evaluate", best, "--nodes", "all", "--full", "--json"))["scores"]["accuracy"] == (
        pytest.approx(float(hits.float().mean()))
    )


def test_predictions_as_a_table_and_as_an_array(trained, tmp_path):
    best, graph, _ = trained
    table, array = tmp_path / "p.csv", tmp_path / "p.npy"
    assert f"Wrote predictions for 40 nodes to {table}" in call("predict", best, "--full", "--out", table)
    call("predict", best, "--full", "--out", array)
    loaded = joestar.load(graph)
    with torch.no_grad():
        logits = saved.read(best).build(loaded)(loaded, loaded.ndata["x"])
    np.testing.assert_allclose(np.load(array), logits.numpy(), atol=1e-5)
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0] == ["node", "prediction", "score"]
    assert [int(row[0]) for row in rows[1:]] == list(range(NUM_NODES))
    assert [int(row[1]) for row in rows[1:]] == logits.argmax(1).tolist()
    np.testing.assert_allclose([float(row[2]) for row in rows[1:]], logits.softmax(1).max(1).values, atol=1e-5)
    other = write_graph(tmp_path / "other.npz", seed=3)
    call("predict", best, other, "--nodes", "val", "--out", table)
    expected = joestar.load(other).val_idx.tolist()
    assert [int(line.split(",")[0]) for line in table.read_text().splitlines()[1:]] == expected


def test_several_tasks_per_node(tmp_path):
    graph = write_graph(tmp_path / "g.npz", labels=lambda c: np.stack([c, 1 - c, c], axis=1))
    best, table = tmp_path / "best.pt", tmp_path / "p.csv"
    flags = ["--hidden", "8", "--epochs", "3", "--fanouts", "4", "--backend", "eager", "--execution", "exact"]
    call("train", graph, *flags, "--device", "cpu", "--save", best)
    assert "micro F1" in call("evaluate", best)
    call("predict", best, "--full", "--out", table)
    loaded = joestar.load(graph)
    with torch.no_grad():
        expected = saved.read(best).build(loaded)(loaded, loaded.ndata["x"]) > 0
    for row, line in zip(expected, table.read_text().splitlines()[1:], strict=True):
        _, tasks, scores = line.split(",")
        assert [int(task) for task in tasks.split()] == row.nonzero()[:, 0].tolist()
        assert all(float(score) > 0.5 for score in scores.split())


def broken_files(folder, best):
    content = torch.load(best, weights_only=True)
    model = torch.nn.Linear(2, 2)
    made = {
        "text.pt": lambda path: path.write_text("hello"),
        "short.pt": lambda path: path.write_bytes(best.read_bytes()[:500]),
        "pickled.pt": lambda path: torch.save(model, path),
        "bare.pt": lambda path: torch.save(model.state_dict(), path),
        "list.pt": lambda path: torch.save([1, 2], path),
        "newer.pt": lambda path: torch.save({**content, "joestar_model": 9}, path),
        "incomplete.pt": lambda path: torch.save({k: v for k, v in content.items() if k != "features"}, path),
        "swapped.pt": lambda path: torch.save({**content, "model": {"a": torch.zeros(1)}}, path),
        "settings.pt": lambda path: torch.save({**content, "settings": {"model": "mlp"}}, path),
        "checkpoint.pt": lambda path: joestar.runtime.checkpoint.write_checkpoint(path, {"step": {}}),
        "folder.pt": lambda path: path.mkdir(),
        "missing.pt": lambda path: None,
    }
    for name, write in made.items():
        write(folder / name)
    return [folder / name for name in made]


REMEDY = {
    "pickled.pt": "holds Python objects",
    "bare.pt": "holds bare parameters",
    "newer.pt": "has format 9; expected 1",
    "checkpoint.pt": "is a checkpoint of a run under way: go on with",
    "folder.pt": "is a folder",
    "missing.pt": "does not exist",
}


def test_data_that_changed_since_the_training_is_told(trained, tmp_path):
    """Other labels or splits behind the same path: what is scored may have been trained on."""
    best, graph, _ = trained
    assert json.loads(call("evaluate", best, "--json"))["changed"] == []
    was = graph.read_bytes()
    try:
        held = dict(np.load(graph))
        np.savez(graph, **(held | {"x": held["x"][::-1], "y": held["y"][::-1]}))
        facts = json.loads(call("evaluate", best, "--json"))
        assert facts["changed"][0] == "labels" and facts["changed"][-1] == "features"
        shown = " ".join(call("evaluate", best).split())
        assert "Changed since the training: labels" in shown and "may have been trained on" in shown
        assert json.loads(call("evaluate", best, graph, "--json"))["changed"] == facts["changed"], "the same place"
        other = tmp_path / "other.npz"
        other.write_bytes(graph.read_bytes())
        assert json.loads(call("evaluate", best, other, "--json"))["changed"] is None, "another graph was asked for"
        np.savez(graph, **(held | {"x": held["x"][::-1]}))
        shown = " ".join(call("evaluate", best).split())
        assert "Changed since the training: features." in shown and "trained on" not in shown
    finally:
        graph.write_bytes(was)


def test_what_compile_makes_of_columns_is_no_change(tmp_path):
    """A folder of float64 features and labels in int32, which steps read as float32 and int64."""
    graph = joestar.load(write_graph(tmp_path / "graph.npz"))
    graph.ndata["x"], graph.ndata["y"] = graph.ndata["x"].double(), graph.ndata["y"].int()
    joestar.data.save(graph, tmp_path / "folder")
    flags = ["--hidden", "8", "--epochs", "1", "--fanouts", "4,4", "--batch-size", "12", "--backend", "eager"]
    flags += ["--execution", "exact", "--device", "cpu", "--save", tmp_path / "best.pt"]
    call("train", tmp_path / "folder", *flags)
    assert json.loads(call("evaluate", tmp_path / "best.pt", "--json"))["changed"] == []


def test_other_files_are_refused_in_one_sentence(trained, tmp_path):
    for path in broken_files(tmp_path, trained[0]):
        error = call("evaluate", path, code=2)
        assert error.strip().splitlines()[-1].startswith(f"Error: {path}") and error.count("\n") <= 2, error
        assert REMEDY.get(path.name, saved.MADE_BY) in error, error


def test_other_graphs_are_refused(trained, tmp_path):
    best = trained[0]
    wide, many = write_graph(tmp_path / "wide.npz", width=9), write_graph(tmp_path / "many.npz", classes=3)
    tasks = write_graph(tmp_path / "tasks.npz", labels=lambda c: np.stack([c, c], axis=1))
    error = call("predict", best, wide, "--out", tmp_path / "p.csv", code=2)
    assert "was trained on 8 features per node" in error and "'wide' has 9: give a graph with the same" in error
    assert "knows 2 classes, but the graph 'many' has 3 classes" in call("evaluate", best, many, code=2)
    assert "knows 2 classes, but the graph 'tasks' has 2 tasks" in call("evaluate", best, tasks, code=2)
    bare = joestar.Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3, ndata={"x": torch.zeros(3, 8)})
    folder = joestar.data.save(bare, tmp_path / "bare")
    assert "has no labels to score against" in call("evaluate", best, folder, "--nodes", "all", code=2)
    assert "has no test nodes: choose --nodes all" in call("evaluate", best, folder, code=2)
    call("predict", best, folder, "--out", tmp_path / "p.csv")


def test_other_arguments_are_refused(trained, tmp_path):
    best = trained[0]
    assert "--nodes: expected one of train, val, test, all" in call("evaluate", best, "--nodes", "some", code=2)
    assert "--device: expected one of auto, cpu, cuda" in call("evaluate", best, "--device", "gpu", code=2)
    assert "expected a name that ends in .csv or .npy" in call("predict", best, "--out", tmp_path / "p.txt", code=2)
    assert "not a folder that can be written to" in call("predict", best, "--out", tmp_path / "a" / "p.csv", code=2)
    (tmp_path / "e.csv").write_text("source,target\n0,1\n")
    assert "this is what the dataset" in call("predict", best, tmp_path / "e.csv", "--out", tmp_path / "e.csv", code=2)


def test_values_and_names_of_ones_own_tables(tmp_path):
    """Text ids and class names come back in the predictions; values are scored, and stopped, by their error."""
    rng = np.random.default_rng(0)
    (tmp_path / "edges.csv").write_text("src,dst\n" + "".join(f"n{a},n{b}\n" for a, b in rng.integers(0, 40, (300, 2))))
    header = "id,f0,f1,label\n"
    for kind, label in (("classes", lambda f: "big" if f > 0 else "small"), ("regression", lambda f: f"{3 * f:.4f}")):
        rows = [(f"n{i}", *rng.standard_normal(2)) for i in range(40)]
        text = header + "".join(f"{name},{f:.4f},{g:.4f},{label(f)}\n" for name, f, g in rows)
        (tmp_path / "nodes.csv").write_text(text)
        best, table = tmp_path / f"{kind}.pt", tmp_path / f"{kind}.csv"
        flags = ["--hidden", "8", "--epochs", "3", "--fanouts", "4", "--backend", "eager", "--execution", "exact"]
        shown = call("train", tmp_path, *flags, "--device", "cpu", "--save", best, "--scheduler", "plateau")
        wrong = call("predict", best, "--out", tmp_path / "nodes.csv", code=2)
        assert "this is what the dataset names already" in " ".join(wrong.split())
        lines = table.read_text().splitlines() if call("predict", best, "--full", "--out", table) else []
        assert {line.split(",")[0] for line in lines[1:]} == {name for name, *_ in rows}
        scores = json.loads(call("evaluate", best, "--json"))["scores"]
        if kind == "classes":
            assert {line.split(",")[1] for line in lines[1:]} <= {"big", "small"}
            assert list(scores) == ["accuracy"] and "test accuracy" in shown
        else:
            assert lines[0] == "node,prediction" and set(scores) == {"rmse", "mae", "r2"}
            assert "test RMSE" in shown and "%" not in shown.split("test RMSE")[1].splitlines()[0]
    flags += ["--metric", "mae", "--save", best, "--device", "cpu"]
    assert "test MAE" in call("train", tmp_path, *flags)
    assert list(json.loads(call("evaluate", best, "--json"))["scores"]) == ["mae"]


COLOURS = ("amber", "blue", "coral", "12", "3", "10")


def write_tables(folder, words, numbers=None, seed=0):
    """A folder whose features say which of ``COLOURS`` a node's label is, in numbers instead if there are such."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    chosen = rng.integers(0, len(words), 60)
    places = np.array([COLOURS.index(word) for word in words])[chosen]
    shown = [words[place] if numbers is None else numbers[place] for place in chosen]
    rows = [
        ",".join([f"n{i}", *(f"{4.0 * (place == other):.1f}" for other in range(len(COLOURS))), str(label)])
        for i, (place, label) in enumerate(zip(places, shown, strict=True))
    ]
    columns = ",".join(f"f{other}" for other in range(len(COLOURS)))
    (folder / "nodes.csv").write_text(f"id,{columns},label\n" + "\n".join(rows) + "\n")
    ends = [(i, rng.choice(np.flatnonzero(chosen == chosen[i]))) for i in range(60) for _ in range(2)]
    (folder / "edges.csv").write_text("source,target\n" + "".join(f"n{a},n{b}\n" for a, b in ends))
    return folder


def trained_on(folder, *more):
    best = folder.with_suffix(".pt")
    flags = ["--hidden", "16", "--epochs", "25", "--fanouts", "3", "--layers", "1", "--backend", "eager"]
    call("train", folder, *flags, "--execution", "exact", "--device", "cpu", "--save", best, *more)
    return best


NAMES = ("amber", "blue", "coral")


@pytest.mark.parametrize(
    ("words", "numbers", "part"),
    [
        (NAMES, None, slice(1, 3)),  # text
        (NAMES, None, slice(0, 1)),
        (NAMES, (0, 1, 2), slice(1, 3)),  # ids in training, ranked in the other graph
        (NAMES, (1, 2, 0), slice(0, 2)),
        (("12", "3", "10"), None, slice(1, 3)),  # ranked in both
    ],
)
def test_classes_are_compared_by_name(tmp_path, words, numbers, part):
    best = trained_on(write_tables(tmp_path / "all", words, numbers))
    other = write_tables(tmp_path / "some", words[part], None if numbers is None else numbers[part], seed=1)
    scores = json.loads(call("evaluate", best, other, "--nodes", "all", "--full", "--json"))["scores"]
    table = tmp_path / "p.csv"
    call("predict", best, other, "--full", "--out", table)
    labels = [line.split(",")[-1] for line in (other / "nodes.csv").read_text().splitlines()[1:]]
    predicted = [line.split(",")[1] for line in table.read_text().splitlines()[1:]]
    assert scores["accuracy"] == pytest.approx(np.mean([a == b for a, b in zip(labels, predicted, strict=True)]))
    assert scores["accuracy"] > 0.9
    folder = joestar.data.save(joestar.load(other, verbose=False), tmp_path / "saved")
    again = json.loads(call("evaluate", best, folder, "--nodes", "all", "--full", "--json"))["scores"]
    assert again == scores


def test_features_are_compared_by_name(tmp_path):
    """Columns in another order, which is that of other features to a model."""
    rows = [(f"n{i}", i % 7, (i * i) % 5, "ab"[i % 2]) for i in range(40)]

    def nodes(folder, *names):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "edges.csv").write_text("src,dst\n" + "".join(f"n{i},n{i * 3 % 40}\n" for i in range(40)))
        text = ",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
        (tmp_path / folder / "nodes.csv").write_text(text)
        return tmp_path / folder

    one, best = nodes("one", "id", "age", "size", "label"), tmp_path / "best.pt"
    flags = ["--hidden", "4", "--epochs", "1", "--fanouts", "2", "--backend", "eager", "--execution", "exact"]
    call("train", one, *flags, "--save", best)
    two = nodes("two", "id", "size", "age", "label")
    error = " ".join(call("predict", best, two, "--out", tmp_path / "p.csv", code=2).split())
    assert "feature 0 was 'age', and is 'size' in the graph 'two'. Put the columns" in error
    kept = joestar.data.save(joestar.load(one, verbose=False), tmp_path / "kept")
    graph = joestar.load(kept)
    assert graph.feature_names == ["age", "size"] and saved.read(best).feature_names == ["age", "size"]
    call("predict", best, kept, "--out", tmp_path / "p.csv")
    graph.ndata["x"] = torch.cat([graph.ndata["x"], graph.ndata["x"]], dim=1)  # other features, without names
    assert joestar.load(joestar.data.save(graph, tmp_path / "wide")).feature_names is None


def test_classes_that_the_model_does_not_know_are_refused(tmp_path):
    best = trained_on(write_tables(tmp_path / "two", NAMES[:2]))
    for words, numbers in ((NAMES[1:], None), (NAMES[:2], (0, 1))):
        other = write_tables(tmp_path / f"other{numbers}", words, numbers)
        error = " ".join(call("evaluate", best, other, "--nodes", "all", code=2).split())
        assert "knows the classes amber, blue, but labels of the graph" in error
        assert f"are {'coral' if numbers is None else '0, 1'}: give a graph with the classes" in error
        call("predict", best, other, "--out", tmp_path / "p.csv")


def test_predictions_need_no_labels(tmp_path):
    folder = write_tables(tmp_path / "all", NAMES)
    best, labelled, bare = trained_on(folder), tmp_path / "labelled.csv", tmp_path / "bare.csv"
    call("predict", best, folder, "--full", "--out", labelled)
    rows = (folder / "nodes.csv").read_text().splitlines()
    (folder / "nodes.csv").write_text("\n".join([rows[0], *(row.rsplit(",", 1)[0] + "," for row in rows[1:])]) + "\n")
    call("predict", best, folder, "--full", "--out", bare)
    assert bare.read_text() == labelled.read_text()
    assert "has no labels to score against" in call("evaluate", best, folder, "--nodes", "all", code=2)
    assert "no ndata['y']" in " ".join(call("train", folder, code=2).split())
    x = np.random.default_rng(0).standard_normal((5, len(COLOURS)))
    np.savez(tmp_path / "bare.npz", edge_index=[[0, 1], [1, 2]], x=x)
    call("predict", best, tmp_path / "bare.npz", "--out", bare)
    assert len(bare.read_text().splitlines()) == 6
