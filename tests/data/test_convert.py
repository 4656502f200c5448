"""Datasets on disk become the graph that they are, whatever their form."""

import json
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import joestar
from joestar.data import edge_sources, text_blocks
from joestar.data.convert import convert
from joestar.data.stream_nodes import converted
from joestar.data.structure import EdgeRules
from joestar.errors import DataError

from .converting import FORMS, QUIET, RULES, assert_structure, small_pieces, whole_folder, write_edges
from .small import SPLITS, write_csv, write_split

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


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2 \n2 0  \n",
        "0 1 \n1 2 \n 2 0 \n",
        "source target \n0 1\n1 2 \n2 0\n",
        "\ufeff0 1\n1 2\n2 0\n",
        "\ufeff0,1\n1,2\n2,0\n",
        "\ufeffsource,target\n0,1\n1,2\n2,0\n",
        "\ufeff# said by a tool\n0\t1\n1\t2\n2\t0\n",
        "# a line of a licence\n" * 300 + "0 1\n1 2\n2 0\n",
        "+0,1\n1, 2\n2,00\n",
    ],
)
def test_blanks_marks_and_comments_are_no_fields(tmp_path, monkeypatch, text, arrow):
    if not arrow:
        monkeypatch.setattr(text_blocks, "_by_arrow", lambda *arguments: None)
    (tmp_path / "edges.csv").write_text(text)
    graph = joestar.load(convert(tmp_path / "edges.csv", tmp_path / "graph", **QUIET))
    assert_structure(graph, np.array([[0, 1, 2], [1, 2, 0]]), 3, EdgeRules(False, False, False))


def test_what_is_left_out_is_said(tmp_path, capsys):
    (tmp_path / "edges.csv").write_text("source,target,weight\n0,1,0.5\n1,0,0.5\n1,1,1.0\n")
    convert(tmp_path / "edges.csv", tmp_path / "graph", undirected=True)
    said = capsys.readouterr().err
    assert "3 edges given; 1 self-loops kept; reverses added; duplicates dropped: 3 edges." in said
    assert "columns of edges that are not converted: weight" in said and "files" not in said
    for name in ("valid_idx.npy", "x.npy", "README.txt"):
        (tmp_path / name).write_bytes(b"")
    convert(tmp_path, tmp_path / "other")
    assert "files that are not converted: valid_idx.npy, x.npy\n" in capsys.readouterr().err


def test_what_is_given_is_not_said_to_be_left_out(tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [1, 0]]))
    for name in ("features.npy", "x.npy"):
        np.save(tmp_path / name, np.ones((2, 3), np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 1]))
    monkeypatch.chdir(tmp_path)
    convert(tmp_path, tmp_path / "graph", features="x.npy", labels=tmp_path / "y.npy")
    assert "files that are not converted: features.npy\n" in capsys.readouterr().err
    convert(tmp_path, tmp_path / "other", labels="y.npy")
    assert "files that are not converted: x.npy\n" in capsys.readouterr().err


def test_ends_of_names_and_dtypes_of_any_kind(tmp_path, recwarn):
    pytest.importorskip("pyarrow")
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    file = write_edges(tmp_path, "parquet", edges).rename(tmp_path / "EDGES.PARQUET")
    np.save(tmp_path / "y.npy", np.array([0, np.nan, 2], np.float16))
    graph = joestar.load(convert(file, tmp_path / "graph", labels=tmp_path / "y.npy", **QUIET))
    assert_structure(graph, edges, 3, EdgeRules(False, False, False))
    assert graph.ndata["y"].tolist() == [0, -100, 2] and not recwarn.list


def test_archives_say_what_they_hold(tmp_path, capsys):
    edges = np.array([[0, 1, 2], [1, 0, 2]])
    archive = {"edge_index": edges, "x": np.eye(3), "y": np.array([0, 1, 0]), "train_idx": [2, 0], "year": np.ones(3)}
    np.savez(tmp_path / "mine.npz", symmetric=1, **archive)
    graph = joestar.load(convert(tmp_path / "mine.npz", tmp_path / "graph"))
    assert_structure(graph, edges, 3, EdgeRules(False, True, True))
    assert graph.train_idx.tolist() == [2, 0] and torch.equal(graph.ndata["x"], torch.eye(3))
    said = capsys.readouterr().err
    assert "directed as given" in said and "keys that are not converted: year" in said
    assert "features stay as they are (joestar.load of an archive standardises" in said
    np.savez(tmp_path / "sparse.npz", edge_index=edges, x_indptr=np.zeros(4))
    with pytest.raises(DataError, match=r"its features are sparse: joestar.data.save\(joestar.load"):
        convert(tmp_path / "sparse.npz", tmp_path / "other")
