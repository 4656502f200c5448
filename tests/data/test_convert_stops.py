"""A conversion that is stopped, killed or out of disk goes on to the same folder."""

import json
import sys

import numpy as np
import pytest

import joestar
from joestar.data import external_sort
from joestar.data.convert import convert
from joestar.data.folder_writer import FolderWriter
from joestar.data.structure import EdgeRules
from joestar.errors import DataError

from .converting import (
    FORMS,
    QUIET,
    assert_structure,
    full_after,
    run_and_kill,
    small_pieces,
    whole_folder,
    write_edges,
)


def stopped_and_resumed(folder, source, arguments, random, most):
    """Kills a conversion again and again, later each time; how often, until one came to its end."""
    kills, after = 0, 1
    while not run_and_kill(lambda: convert(source, folder, **arguments), after):
        kills += 1
        assert not folder.exists(), "nothing half-written is ever there"
        after = int(random.integers(1, most + 5 * kills))  # a piece may take more than `most` writes
        assert kills < 200
    return kills


@pytest.mark.parametrize(
    "form", ["npy", *(pytest.param(form, marks=pytest.mark.fuzz) for form in ("csv", "npz packed"))]
)
def test_killed_anywhere_it_goes_on_to_the_same_folder(tmp_path, monkeypatch, form):
    small_pieces(monkeypatch, 60, 40)
    monkeypatch.setattr("joestar.data.stream_nodes.MOST", 100)
    monkeypatch.setattr("joestar.data.edge_sources.TEXT_BLOCK", 1000)
    source = whole_folder(tmp_path / "source", edges=500)
    edges = np.load(source / "edges.npy")
    given = write_edges(source, form, edges)
    features = {"features": source / "features.npy", "labels": source / "labels.npy", "undirected": True} | QUIET
    whole = convert(given, tmp_path / "whole", **features)
    random = np.random.default_rng(7)
    kills = stopped_and_resumed(tmp_path / "again", given, features, random, 120)
    assert kills > 3
    for path in whole.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again", "source", "whole"]


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(20))
def test_killed_anywhere_more_often(tmp_path, monkeypatch, seed):
    random = np.random.default_rng(seed)
    small_pieces(monkeypatch, int(random.integers(5, 90)), int(random.integers(2, 60)), int(random.integers(3, 40)))
    monkeypatch.setattr("joestar.data.stream_nodes.MOST", int(random.integers(5, 400)))
    source = whole_folder(tmp_path / "source", nodes=int(random.integers(60, 200)), edges=int(random.integers(1, 900)))
    given = write_edges(source, str(random.choice(FORMS)), np.load(source / "edges.npy"))
    chosen = {"features": source / "features.npy", "undirected": bool(random.integers(2))} | QUIET
    whole = convert(given, tmp_path / "whole", **chosen)
    stopped_and_resumed(tmp_path / "again", given, chosen, random, int(random.integers(40, 400)))
    for path in whole.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_after_a_full_disk_it_goes_on(tmp_path, monkeypatch):
    small_pieces(monkeypatch, 100, 1000)
    source = whole_folder(tmp_path / "source", nodes=600, edges=3000)
    whole = convert(source, tmp_path / "whole", **QUIET)
    sizes = [3000, 6000, 9000, 11_000]
    for size in sizes:
        with full_after(size), pytest.raises(DataError, match=r"cannot write the graph.*Is there space"):
            convert(source, tmp_path / "graph", **QUIET)
        assert not (tmp_path / "graph").exists()
        partial = next(tmp_path.glob("graph.partial-*"))
        with pytest.raises(DataError, match=r"half-written.*Run the same"):
            joestar.load(partial)
    again = convert(source, tmp_path / "graph", **QUIET)
    for path in whole.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    source = whole_folder(tmp_path / "source")
    with pytest.raises(RuntimeError, match="stop"):
        convert(source, tmp_path / "graph", progress=stop_at("features"), **QUIET)
    monkeypatch.setattr(external_sort.Sorter, "_deal", None)
    monkeypatch.setattr(external_sort.Sorter, "_sorted", None)
    convert(source, tmp_path / "graph", **QUIET)


def test_another_source_begins_anew(tmp_path):
    source = whole_folder(tmp_path / "source")
    with pytest.raises(RuntimeError, match="stop"):
        convert(source, tmp_path / "graph", progress=stop_at("features"), **QUIET)
    edges = np.load(source / "edges.npy")[:, :300]
    np.save(source / "edges.npy", edges)
    assert_structure(
        joestar.load(convert(source, tmp_path / "graph", **QUIET)), edges, 90, EdgeRules(False, False, False)
    )


def test_after_the_machine_was_down_it_begins_anew(tmp_path):
    source = whole_folder(tmp_path / "source")
    with pytest.raises(RuntimeError, match="stop"):
        convert(source, tmp_path / "graph", progress=stop_at("features"), **QUIET)
    journal = next(tmp_path.glob("graph.partial-*")) / "journal.json"
    content = json.loads(journal.read_text())
    journal.write_text(json.dumps(content | {"boot": "another"}))
    seen = []
    convert(source, tmp_path / "graph", progress=lambda *what: seen.append(what[0]), **QUIET)
    assert "dealing edges" in seen


def stop_at(phase):
    def progress(what, done, total):
        if what == phase:
            raise RuntimeError("stop")

    return progress


def test_two_conversions_at_a_time(tmp_path):
    source, errors = whole_folder(tmp_path / "source"), []

    def progress(what, done, total):
        if what == "features" and not errors:
            with pytest.raises(DataError, match="another process is writing the same graph here") as error:
                convert(source, tmp_path / "graph", **QUIET)
            errors.append(error)

    convert(source, tmp_path / "graph", progress=progress, **QUIET)
    assert errors and joestar.load(tmp_path / "graph", verify=True).num_nodes == 90


@pytest.mark.parametrize("name", ["keys-000.staged", "indices.npy", "ndata.x.npy"])
def test_a_file_that_became_shorter_is_not_gone_on_with(tmp_path, monkeypatch, name):
    """What lies beyond its end would be zeros: edges and features that nobody has written."""
    small_pieces(monkeypatch, 50, 20)
    monkeypatch.setattr("joestar.data.stream_nodes.MOST", 100)
    source, seen = whole_folder(tmp_path / "source"), []

    def progress(what, done, total):
        seen.append(what)
        if seen.count(what) == 3 and what == phase:
            raise RuntimeError("stop")

    phase = {"keys-000.staged": "dealing edges", "indices.npy": "sorting edges", "ndata.x.npy": "features"}[name]
    with pytest.raises(RuntimeError, match="stop"):
        convert(source, tmp_path / "graph", progress=progress, **QUIET)
    (next(tmp_path.glob("graph.partial-*")) / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name}.*is shorter than it was.*Run it again"):
        convert(source, tmp_path / "graph", **QUIET)
    assert joestar.load(convert(source, tmp_path / "graph", **QUIET), verify=True).num_edges == 700


def test_what_is_in_the_way_at_the_end_costs_no_work(tmp_path, monkeypatch):
    source, target = whole_folder(tmp_path / "source"), tmp_path / "graph"

    def progress(what, done, total):
        target.mkdir(exist_ok=True)
        (target / "mine.txt").write_text("mine")

    with pytest.raises(DataError, match=r"exists already.*The graph is kept in .*: the same command then names it"):
        convert(source, target, progress=progress, **QUIET)
    (target / "mine.txt").unlink()  # and nothing else: what is there is left alone
    target.rmdir()
    monkeypatch.setattr(sys.modules["joestar.data.convert"], "_Work", None)
    assert joestar.load(convert(source, target, **QUIET), verify=True).num_edges == 700


@pytest.mark.parametrize("name", ["edges.npy", "features.npy", "train_idx.npy"])
@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_file_that_changes_while_it_is_read_is_told(tmp_path, name, change):
    """Half of the graph would be of the old file."""
    source = whole_folder(tmp_path / "source")

    def progress(what, done, total):
        if what == "checksums" and change == "written":
            (source / name).write_bytes((source / name).read_bytes() + b"more")
        elif what == "checksums":
            (source / name).unlink()

    with pytest.raises(DataError, match=rf"{name}: it was changed while it was read.*Run it again once"):
        convert(source, tmp_path / "graph", progress=progress, **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_complete_folder_only_wants_its_name(tmp_path, monkeypatch):
    source = whole_folder(tmp_path / "source")
    settle = FolderWriter.settle

    def stopped(self):
        raise RuntimeError("stop")

    monkeypatch.setattr(FolderWriter, "settle", stopped)
    with pytest.raises(RuntimeError, match="stop"):
        convert(source, tmp_path / "graph", **QUIET)
    monkeypatch.setattr(FolderWriter, "settle", settle)
    monkeypatch.setattr(sys.modules["joestar.data.convert"], "_Work", None)
    graph = joestar.load(convert(source, tmp_path / "graph", **QUIET), verify=True)
    assert_structure(graph, np.load(source / "edges.npy"), 90, EdgeRules(False, False, False))
    assert {path.suffix for path in (tmp_path / "graph").iterdir()} == {".npy", ".json"}
