"""Datasets on disk become the graph that they are, whatever the memory, and whenever the conversion is stopped."""

import json
import sys
import tempfile
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import joestar
from joestar.data import edge_sources, external_sort, text_blocks
from joestar.data.convert import convert
from joestar.data.folder_writer import FolderWriter
from joestar.data.stream_nodes import converted
from joestar.data.structure import EdgeRules
from joestar.errors import ConfigError, DataError

from .converting import FORMS, RULES, expected_csc, full_after, run_and_kill, small_pieces, write_edges
from .small import SPLITS, write_csv, write_split

QUIET = {"verbose": False, "memory": "1MiB"}
ANY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def edge_lists(draw, most=200):
    """(edges [2, E], nodes): some with hubs, duplicates and self-loops."""
    nodes, count = draw(st.integers(1, 60)), draw(st.integers(0, most))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    edges = random.integers(0, nodes, (2, count))
    if draw(st.booleans()):
        edges[1, : count // 2] = random.integers(0, nodes)
    return edges, nodes


def assert_structure(graph, edges, nodes, rules):
    indptr, indices = expected_csc(edges, nodes, rules)
    assert graph.indptr.tolist() == indptr.tolist()
    assert graph.indices.tolist() == indices.tolist() and graph.indices.dtype == torch.int32


@ANY
@given(edge_lists(), st.sampled_from(RULES), st.integers(5, 90), st.integers(1, 60), st.integers(3, 80))
def test_any_edges_any_rules_any_memory(monkeypatch, given_edges, rules, step, capacity, offsets):
    edges, nodes = given_edges
    small_pieces(monkeypatch, step, capacity, offsets)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        chosen = {key: getattr(rules, key) for key in ("undirected", "drop_duplicates", "drop_self_loops")}
        made = convert(write_edges(path, "npy", edges), path / "graph", num_nodes=nodes, **chosen, **QUIET)
        assert_structure(joestar.load(made, verify=True), edges, nodes, rules)
        assert [entry.name for entry in made.parent.iterdir() if "partial" in entry.name] == []
        meta = json.loads((made / "meta.json").read_text())
        indptr, indices = (np.load(made / f"{key}.npy") for key in ("indptr", "indices"))
        rows = np.repeat(np.arange(nodes), np.diff(indptr))
        assert meta["self_loops"] == int((rows == indices).sum()) and meta["directed"] is not rules.undirected


@pytest.mark.parametrize("arrow", [True, False])
def test_every_form_of_edges(tmp_path, monkeypatch, arrow):
    edges = np.random.default_rng(1).integers(0, 50, (2, 300))
    edges[0, 0] = 49
    small_pieces(monkeypatch, 41, 64)
    if not arrow:
        monkeypatch.setattr(text_blocks, "_by_arrow", lambda *arguments: None)
    for number, form in enumerate(FORMS):
        if not arrow and "csv" not in form:
            continue
        place = tmp_path / str(number)
        place.mkdir()
        file = write_edges(place, form, edges)
        rules = EdgeRules(True, True, False)
        made = convert(file, place / "graph", undirected=True, drop_self_loops=False, **QUIET)
        assert_structure(joestar.load(made), edges, 50, rules)


def test_it_is_the_graph_in_memory(tmp_path):
    edges = np.random.default_rng(2).integers(0, 200, (2, 3000))
    graph = joestar.Graph.from_edge_index(torch.from_numpy(edges), 200)
    made = joestar.load(convert(write_edges(tmp_path, "csv", edges), tmp_path / "graph", num_nodes=200, **QUIET))
    assert torch.equal(made.indptr, graph.indptr)
    for v in range(200):
        ends = slice(int(made.indptr[v]), int(made.indptr[v + 1]))
        assert torch.equal(made.indices[ends], graph.indices[ends].sort()[0]), "the same rows, ascending"


def whole_folder(path, nodes=90, edges=700):
    """A folder of edges, features, labels and splits."""
    path.mkdir(exist_ok=True)
    random = np.random.default_rng(3)
    write_edges(path, "npy", random.integers(0, nodes, (2, edges)))
    np.save(path / "features.npy", random.standard_normal((nodes, 5)))
    np.save(path / "labels.npy", np.where(random.random(nodes) < 0.2, np.nan, random.integers(0, 4, nodes)))
    for part, ids in zip(("train", "val", "test"), np.split(random.permutation(nodes), [40, 60]), strict=True):
        np.save(path / f"{part}_idx.npy", ids)
    return path


@pytest.mark.parametrize("dtype", [None, "fp16", "bf16"])
def test_features_labels_and_splits(tmp_path, monkeypatch, dtype):
    source = whole_folder(tmp_path / "source")
    monkeypatch.setattr("joestar.data.stream_nodes.MOST", 37)
    graph = joestar.load(convert(source, tmp_path / "graph", dtype=dtype, check=True, **QUIET), verify=True)
    x, y = torch.from_numpy(np.load(source / "features.npy")), np.load(source / "labels.npy")
    kind = {None: torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert torch.equal(graph.ndata["x"], x.float().to(kind))
    assert graph.ndata["y"].tolist() == np.where(np.isnan(y), -100, y).astype(int).tolist()
    assert (graph.num_classes, graph.multilabel, graph.name) == (4, False, "source")
    assert graph.val_idx.tolist() == np.load(source / "val_idx.npy").tolist()


def test_bf16_is_rounded_as_pytorch_rounds():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~(np.abs(values) > 3.38e38)]
    values = np.concatenate([values, np.float32([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1.00390625, 1.01171875])])
    found = torch.from_numpy(converted(values[:, None], "bfloat16", 0, "").reshape(-1)).view(torch.bfloat16)
    expected = torch.from_numpy(values).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_targets_and_several_labels(tmp_path):
    source = whole_folder(tmp_path / "source")
    for name, array, task in (
        ("targets", np.linspace(0, 1, 90), "regression"),
        ("tasks", np.eye(90, 3), None),
        ("quantities", np.linspace(0, 1, 270).reshape(90, 3), None),
    ):
        np.save(tmp_path / "y.npy", array)
        made = convert(source, tmp_path / name, labels=tmp_path / "y.npy", task=task, **QUIET)
        graph = joestar.load(made)
        assert torch.equal(graph.ndata["y"], torch.from_numpy(array).float())
        assert (graph.num_classes, graph.multilabel) == ((3, True) if name == "tasks" else (None, False))


# --- published layouts ---


def test_ogb_folders_are_as_load_reads_them(tmp_path):
    random = np.random.default_rng(4)
    edges, x, y = random.integers(0, 7, (2, 20)), random.standard_normal((7, 3)), np.array([0, 1, 2, 0, 1, 2, 0])
    text = tmp_path / "ogbn_products"
    for name, rows in (("edge", edges.T), ("num-node-list", [7]), ("node-feat", x), ("node-label", y)):
        write_csv(text / "raw" / f"{name}.csv.gz", rows)
    write_split(text, "sales_ranking", SPLITS)
    packed, plain = tmp_path / "ogbn_papers100M", tmp_path / "plain"
    for folder, save in ((packed, np.savez_compressed), (plain, np.savez)):
        (folder / "raw").mkdir(parents=True)
        labels = np.array([[0], [1], [2], [0], [1], [2], [np.nan]], dtype=np.float32)
        save(folder / "raw" / "data.npz", edge_index=edges, node_feat=x.astype(np.float32), num_nodes_list=[7])
        save(folder / "raw" / "node-label.npz", node_label=labels)
        write_split(folder, "time", SPLITS | {"train": [0, 3]})
    for folder in (text, packed, plain):
        graph, expected = joestar.load(convert(folder, tmp_path / f"{folder.name}-out", **QUIET)), joestar.load(folder)
        assert torch.equal(graph.indptr, expected.indptr) and torch.equal(graph.indices, expected.indices)
        assert torch.equal(graph.ndata["x"], expected.ndata["x"])
        assert torch.equal(graph.ndata["y"], expected.ndata["y"])
        assert graph.train_idx.tolist() == expected.train_idx.tolist()
        assert (graph.name, graph.num_classes) == (expected.name, expected.num_classes)
    (text / "raw" / "node-feat.csv.gz").write_bytes((text / "raw" / "node-feat.csv.gz").read_bytes()[:40])
    with pytest.raises(DataError, match=r"node-feat.csv.gz: expected a table.*Is it complete"):
        convert(text, tmp_path / "cut", **QUIET)


def test_mag240m_papers(tmp_path):
    random = np.random.default_rng(5)
    folder = tmp_path / "mag240m_kddcup2021"
    cites, papers = folder / "processed" / "paper___cites___paper", folder / "processed" / "paper"
    for place in (cites, papers):
        place.mkdir(parents=True)
    edges, x = random.integers(0, 30, (2, 100)), random.standard_normal((30, 8)).astype(np.float16)
    y = np.where(random.random(30) < 0.5, np.nan, random.integers(0, 5, 30)).astype(np.float32)
    y[:10] = np.arange(10) % 5
    np.save(cites / "edge_index.npy", edges)
    np.save(papers / "node_feat.npy", x)
    np.save(papers / "node_label.npy", y)
    torch.save(
        {"train": np.arange(6), "valid": np.arange(6, 10), "test-dev": np.arange(20, 22)}, folder / "split_dict.pt"
    )
    graph = joestar.load(convert(folder, tmp_path / "graph", **QUIET))
    assert_structure(graph, edges, 30, EdgeRules())
    assert graph.ndata["x"].dtype == torch.float16 and torch.equal(graph.ndata["x"], torch.from_numpy(x))
    assert graph.train_idx.tolist() == list(range(6)) and graph.val_idx.tolist() == [6, 7, 8, 9]
    assert graph.num_classes == 5 and graph.name == "mag240m-c"
    splits = folder / "split_dict.pt"  # as the published file has it: NumPy 1, PyTorch 1
    torch.save({"train": np.arange(6), "valid": np.arange(6, 9)}, splits, _use_new_zipfile_serialization=False)
    splits.write_bytes(splits.read_bytes().replace(b"cnumpy._core.", b"cnumpy.core."))
    assert b"cnumpy.core.multiarray" in splits.read_bytes()
    assert joestar.load(convert(folder, tmp_path / "again", **QUIET)).val_idx.tolist() == [6, 7, 8]
    torch.save({"train": np.arange(6), "valid": Path("code")}, splits)
    with pytest.raises(DataError, match=r"split_dict.pt: expected a dict with 'train' and 'valid' ids"):
        convert(folder, tmp_path / "other", **QUIET)


# --- memory, kills, full disks ---


def test_memory_stays_under_the_limit(tmp_path, monkeypatch):
    random = np.random.default_rng(6)
    nodes, count = 150_000, 400_000
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "edges.npy", random.integers(0, nodes, (2, count)))
    np.save(source / "features.npy", np.ones((nodes, 16), np.float32))
    np.save(source / "labels.npy", np.ones(nodes))
    limit = 2 << 20
    tracemalloc.start()
    try:
        convert(source, tmp_path / "graph", undirected=True, dtype="bf16", verbose=False, memory=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    assert peak < 0.25 * (2 * 2 * count * 8), "a quarter of the edges' keys"


def test_memory_of_the_process_stays_near_the_limit_however_many_nodes(tmp_path):
    """What tracemalloc does not see: maps of files, which grow with the graph."""
    np.save(tmp_path / "edges.npy", np.arange(2000).reshape(2, -1))
    resident = [0]

    def note(phase, done, total):
        resident[0] = resident[0] or grown("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def grown(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    nodes = 6_000_000  # 48 MB of offsets
    convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=nodes, progress=note, **QUIET)
    assert grown("VmHWM") - resident[0] < 24 << 20
    assert json.loads((tmp_path / "graph" / "meta.json").read_text())["in_degree"]["isolated"] == nodes - 1000


def test_files_that_do_not_fit_become_no_more_than_needed(tmp_path, monkeypatch):
    """Their names are noted after every file: thousands of them took ten times as long as the sorting."""
    small_pieces(monkeypatch, 1000, 100)
    names = []
    opened = external_sort.open_to_append
    monkeypatch.setattr(
        external_sort, "open_to_append", lambda path, size: names.append(path.name) or opened(path, size)
    )
    edges = np.random.default_rng(3).integers(0, 30, (2, 9000))  # all in the first of the files
    np.save(tmp_path / "edges.npy", edges)
    made = convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=1 << 16, **QUIET)
    assert 9000 / 100 < len(names) < 4 * 9000 / 100
    assert_structure(joestar.load(made), edges, 1 << 16, EdgeRules(False, False, False))


def test_text_is_parsed_side_by_side_in_order(tmp_path, monkeypatch):
    edges = np.random.default_rng(4).integers(0, 1000, (2, 20_000))
    file = write_edges(tmp_path, "csv", edges)
    monkeypatch.setattr(edge_sources, "threads_for", lambda limit, share: 4)
    threads, parse = set(), edge_sources.columns_of

    def slower_at_first(block, *arguments):
        threads.add(threading.get_ident())
        if block.start < 100:  # the first block: no other may be written before it
            later.wait(timeout=30)
        else:
            later.set()
        return parse(block, *arguments)

    later = threading.Event()
    monkeypatch.setattr(edge_sources, "columns_of", slower_at_first)
    monkeypatch.setattr(edge_sources, "TEXT_BLOCK", 20_000)
    made = convert(file, tmp_path / "graph", num_nodes=1000, **QUIET)
    assert later.is_set() and len(threads) > 1
    assert_structure(joestar.load(made), edges, 1000, EdgeRules(False, False, False))


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


# --- wrong inputs ---


def test_two_conversions_at_a_time(tmp_path):
    source, errors = whole_folder(tmp_path / "source"), []

    def progress(what, done, total):
        if what == "features" and not errors:
            with pytest.raises(DataError, match="another process is writing the same graph here") as error:
                convert(source, tmp_path / "graph", **QUIET)
            errors.append(error)

    convert(source, tmp_path / "graph", progress=progress, **QUIET)
    assert errors and joestar.load(tmp_path / "graph", verify=True).num_nodes == 90


def edit(name, change):
    def damage(source):
        array = np.load(source / name)
        np.save(source / name, change(array))

    return damage


def put(row, column, value):
    def change(array):
        array[row, column] = value
        return array

    return change


def cut(name):
    return lambda source: (source / name).write_bytes((source / name).read_bytes()[:-9])


def csv(text):
    def damage(source):
        (source / "edges.npy").unlink()
        (source / "edges.csv").write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (edit("edges.npy", put(1, 617, 90)), {}, r"edges.npy: column 617: the destination 90 is no node.*0\.\.89"),
        (edit("edges.npy", put(0, 3, -1)), {}, r"edges.npy: column 3: the source -1 is no node"),
        (edit("edges.npy", np.float32), {}, "ids of nodes must be integers; got float32"),
        (
            edit("edges.npy", lambda e: np.concatenate([e, e])),
            {},
            r"edges must be integers \[2, E\] or \[E, 2\].*\[4, 700",
        ),
        (cut("edges.npy"), {}, r"edges.npy: the file is truncated: \[2, 700\] of int64 need 11,328 bytes.*11,319"),
        (cut("features.npy"), {}, "features.npy: the file is truncated"),
        (lambda source: (source / "labels.npy").write_text("labels"), {}, "labels.npy: expected an .npy file"),
        (edit("features.npy", put(77, 3, np.nan)), {"check": True}, "must be finite; row 77, column 3 is nan"),
        (edit("features.npy", put(77, 3, 1e39)), {}, r"beyond float32: store bf16 or fp32; row 77, column 3 is 1e\+39"),
        (edit("features.npy", put(5, 1, 70_000)), {"dtype": "fp16"}, r"beyond float16.*row 5, column 1 is 70000"),
        (edit("features.npy", lambda x: x[:50]), {}, r"is no node: ids must lie in 0\.\.49 \(50 nodes\)"),
        (edit("features.npy", lambda x: x[0]), {}, r"features must be \[N, F\] with F > 0; got \[5\]"),
        (edit("labels.npy", lambda y: y - 2), {}, r"class ids must be 0..C-1.*row \d+ is -2"),
        (edit("labels.npy", lambda y: y / 2), {}, r"class ids must be whole numbers; row \d+ is .*--task regression"),
        (edit("labels.npy", lambda y: y * np.nan), {}, "not one of the 90 nodes has a label"),
        (edit("val_idx.npy", lambda ids: ids + 89), {}, "the val split names node"),
        (edit("val_idx.npy", lambda ids: np.repeat(ids, 2)), {}, "nodes twice, for example"),
        (edit("val_idx.npy", np.float64), {}, "a split must be integer node ids"),
        (lambda source: (source / "edges.npy").unlink(), {}, "none of its files is known"),
        (csv("source,target\n0,1\n1,two\n"), {}, r"edges.csv: line 3, field 2: expected whole numbers; got 'two'"),
        (csv("source,target\n0,1\n1,\n"), {}, r"edges.csv: line 3, field 2: expected whole numbers; got ''"),
        (csv("source,target\n0,1\n1,2,3\n"), {}, r"edges.csv: line 3 has 3 fields, expected 2"),
        (csv("source,target\n0,1\n1,99\n"), {}, r"row 1 of the table \(about line 3\): the destination 99 is no node"),
        (csv("0,1\n1,1.5\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '1.5'"),
        (lambda source: None, {"dtype": "int8"}, "dtype must be one of fp32, fp16, bf16"),
        (lambda source: None, {"memory": "4KiB"}, "too little to work in"),
        (lambda source: None, {"task": "ranking"}, "task must be"),
        (lambda source: None, {"num_nodes": 0}, "num_nodes must be 1 to"),
    ],
)
def test_wrong_inputs(tmp_path, damage, arguments, message):
    source = whole_folder(tmp_path / "source")
    damage(source)
    with pytest.raises((DataError, ConfigError), match=message):
        convert(source, tmp_path / "graph", **QUIET | arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "what cannot be gone on with is gone"


def test_ids_that_are_no_positions(tmp_path):
    with pytest.raises(DataError, match="the largest id is 1000000000, but there are 3 edges only"):
        convert(write_edges(tmp_path, "npy", np.array([[0, 1, 2], [1, 2, 10**9]])), tmp_path / "graph", **QUIET)
    with pytest.raises(DataError, match="expected 1 to 2,147,483,648 nodes"):
        convert(write_edges(tmp_path, "npy", np.full((2, 10), 1 << 40)), tmp_path / "other", num_nodes=None, **QUIET)
    with pytest.raises(DataError, match="there is no such file"):
        convert(tmp_path / "nothing", tmp_path / "other", **QUIET)
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="exists already"):
        convert(tmp_path / "edges.npy", tmp_path / "there", **QUIET)


def test_what_is_left_out_is_said(tmp_path, capsys):
    (tmp_path / "edges.csv").write_text("source,target,weight\n0,1,0.5\n1,0,0.5\n1,1,1.0\n")
    convert(tmp_path / "edges.csv", tmp_path / "graph", undirected=True)
    said = capsys.readouterr().err
    assert "3 edges given; 1 self-loops kept; reverses added; duplicates dropped: 3 edges." in said
    assert "columns of edges that are not converted: weight" in said


def test_archives_say_what_they_hold(tmp_path, capsys):
    edges = np.array([[0, 1, 2], [1, 0, 2]])
    archive = {"edge_index": edges, "x": np.eye(3), "y": np.array([0, 1, 0]), "train_idx": [2, 0], "year": np.ones(3)}
    np.savez(tmp_path / "mine.npz", symmetric=1, **archive)
    graph = joestar.load(convert(tmp_path / "mine.npz", tmp_path / "graph"))
    assert_structure(graph, edges, 3, EdgeRules(False, True, True))
    assert graph.train_idx.tolist() == [2, 0] and torch.equal(graph.ndata["x"], torch.eye(3))
    said = capsys.readouterr().err
    assert "directed as given" in said and "keys that are not converted: year" in said
    np.savez(tmp_path / "sparse.npz", edge_index=edges, x_indptr=np.zeros(4))
    with pytest.raises(DataError, match=r"its features are sparse: joestar.data.save\(joestar.load"):
        convert(tmp_path / "sparse.npz", tmp_path / "other")


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
