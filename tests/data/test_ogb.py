import gzip

import numpy as np
import pytest
import torch

import joestar.data
from joestar.data import text_blocks
from joestar.data.archive import Archive
from joestar.data.ogb import read_table
from joestar.errors import DataError

from .small import EDGES, NUM_NODES, SPLITS, SYMMETRIC_EDGES, both_ways, edge_set, write_csv, write_split


@pytest.fixture
def csv_folder(tmp_path, features, labels):
    folder = tmp_path / "ogbn_products"
    write_csv(folder / "raw" / "edge.csv.gz", EDGES.T)
    write_csv(folder / "raw" / "num-node-list.csv.gz", [NUM_NODES])
    write_csv(folder / "raw" / "num-edge-list.csv.gz", [EDGES.shape[1]])
    write_csv(folder / "raw" / "node-feat.csv.gz", features)
    write_csv(folder / "raw" / "node-label.csv.gz", labels)
    write_split(folder, "sales_ranking", SPLITS)
    return folder


@pytest.fixture
def binary_folder(tmp_path, features, labels):
    folder = tmp_path / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    float_labels = labels.astype(np.float32).reshape(-1, 1)
    float_labels[6] = np.nan
    np.savez(
        folder / "raw" / "data.npz",
        edge_index=EDGES,
        node_feat=features,
        num_nodes_list=np.array([NUM_NODES]),
        num_edges_list=np.array([EDGES.shape[1]]),
        node_year=np.full((NUM_NODES, 1), 2015),
    )
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=float_labels)
    write_split(folder, "time", SPLITS | {"train": [0, 3]})
    return folder


def test_csv_layout_by_name(csv_folder, features, labels):
    graph = joestar.data.load("ogbn-products", root=csv_folder.parent)
    assert graph.name == "ogbn-products"
    assert graph.num_classes == 3
    assert edge_set(graph) == both_ways(SYMMETRIC_EDGES)
    torch.testing.assert_close(graph.ndata["x"], torch.from_numpy(features))
    assert graph.ndata["y"].tolist() == labels.tolist()
    assert graph.train_idx.tolist() == SPLITS["train"]
    assert graph.val_idx.tolist() == SPLITS["val"]


def test_csv_layout_by_path_and_under_pyg_folder_name(csv_folder):
    renamed = csv_folder.rename(csv_folder.parent / "ogbn_products_pyg")
    assert joestar.data.load(renamed).name == "ogbn-products"
    assert joestar.data.load("ogbn-products", root=renamed.parent).num_nodes == NUM_NODES


def test_binary_layout_has_missing_labels(binary_folder, features):
    graph = joestar.data.load("ogbn-papers100M", root=binary_folder.parent)
    assert graph.name == "ogbn-papers100M"
    assert graph.ndata["y"].tolist() == [0, 1, 2, 0, 1, 2, -100]
    assert edge_set(graph) == both_ways(SYMMETRIC_EDGES)
    assert torch.equal(graph.ndata["x"], torch.from_numpy(features))
    assert graph.train_idx.tolist() == [0, 3]


def test_environment_variable_names_the_root(csv_folder, monkeypatch):
    monkeypatch.setenv("JOESTAR_DATA", str(csv_folder.parent))
    assert joestar.data.load("ogbn-products").num_nodes == NUM_NODES


def test_missing_labels_in_csv(csv_folder):
    write_csv(csv_folder / "raw" / "node-label.csv.gz", ["0", "1", '""', "0.0", "1", "nan", "1"])
    graph = joestar.data.load(csv_folder, split="random")
    assert graph.ndata["y"].tolist() == [0, 1, -100, 0, 1, -100, 1]


def test_without_node_features_the_mean_of_edge_features(csv_folder):
    (csv_folder / "raw" / "node-feat.csv.gz").unlink()
    write_csv(csv_folder / "raw" / "edge-feat.csv.gz", np.arange(16).reshape(8, 2))
    write_csv(csv_folder / "raw" / "node-label.csv.gz", np.eye(NUM_NODES, 2, dtype=int))
    graph = joestar.data.load(csv_folder)
    assert graph.multilabel
    assert graph.num_classes == 2
    first = np.arange(0, 16, 2)[(EDGES == 0).any(axis=0)].mean()
    assert graph.ndata["x"][0].tolist() == pytest.approx([first, first + 1])
    assert graph.ndata["x"][6].tolist() == [0, 0]


def test_absent_dataset_says_where_it_looked_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JOESTAR_DATA", str(tmp_path / "here"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        joestar.data.load("ogbn-products")
    message = str(caught.value)
    assert f"nothing was found under {tmp_path / 'here'}, " in message
    assert "dataset." in message
    assert "pip install ogb" in message
    assert f"NodePropPredDataset('ogbn-products', '{tmp_path / 'here'}')" in message


def test_unknown_name_suggests_a_close_one(tmp_path):
    with pytest.raises(DataError, match=r"Did you mean 'ogbn-products'\? Known names: cora, ogbn-arxiv"):
        joestar.data.load("ogbn-product", root=tmp_path)
    with pytest.raises(DataError, match=r"holds neither meta.json .* nor raw/"):
        joestar.data.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("raw/edge.csv.gz", None, "edge.csv.gz is missing; .* holds .*node-feat.csv.gz"),
        ("raw/node-label.csv.gz", None, "node-label.csv.gz is missing"),
        ("raw/node-feat.csv.gz", None, "neither node-feat.csv.gz nor edge-feat.csv.gz is there"),
        ("split/sales_ranking/valid.csv.gz", None, "valid.csv.gz is missing"),
        ("raw/edge.csv.gz", ["0,x"], "edge.csv.gz: line 1, field 2: expected whole numbers; got 'x'"),
        ("raw/edge.csv.gz", ["0,1.5"], "edge.csv.gz: line 1, field 2: expected whole numbers; got '1.5'"),
        ("raw/node-feat.csv.gz", ["0,x"], "node-feat.csv.gz: expected comma-separated numbers, gzipped, but .*'x'"),
        ("raw/edge.csv.gz", ["0,1,2"], "expected two columns, source and destination; got 3"),
        ("raw/num-node-list.csv.gz", [3, 4], "expected one graph; the dataset holds 2"),
        ("raw/num-node-list.csv.gz", [4], "destination ids must lie in 0..3|source ids must lie in 0..3"),
        (
            "raw/node-label.csv.gz",
            [0, 1],
            r"labels must be \[7\] class ids or targets, or \[7, T\] targets; got shape \[2, 1\]",
        ),
    ],
)
def test_malformed_csv_folder(csv_folder, file, rows, message):
    (csv_folder / file).unlink()
    if rows is not None:
        write_csv(csv_folder / file, rows)
    with pytest.raises(DataError, match=message):
        joestar.data.load(csv_folder)


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_comments_in_tables(tmp_path, monkeypatch, arrow, dtype):
    if not arrow:
        monkeypatch.setattr(text_blocks, "_by_arrow", lambda *given: None)
    write_csv(tmp_path / "edge.csv.gz", ["# source, target, all", "", "0,1", "# of more", "2,3  # the last"])
    assert read_table(tmp_path / "edge.csv.gz", dtype).tolist() == [[0, 1], [2, 3]]
    write_csv(tmp_path / "edge.csv.gz", ["# nothing else"])
    with pytest.raises(DataError, match="the file is empty"):
        read_table(tmp_path / "edge.csv.gz", dtype)
    if dtype == np.int64:
        write_csv(tmp_path / "edge.csv.gz", ["# comments count", "0,1", "0,x"])
        with pytest.raises(DataError, match="line 3, field 2"):
            read_table(tmp_path / "edge.csv.gz", dtype)


def test_truncated_download(csv_folder):
    path = csv_folder / "raw" / "edge.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"edge.csv.gz: expected a table, but it cannot be read .* Is it complete"):
        joestar.data.load(csv_folder)
    with gzip.open(path, "wb") as file:
        file.write(b"")
    with pytest.raises(DataError, match=r"edge.csv.gz: expected comma-separated numbers, but the file is empty"):
        joestar.data.load(csv_folder)


def test_several_split_schemes(csv_folder):
    write_split(csv_folder, "random", SPLITS)
    assert joestar.data.load(csv_folder).train_idx.tolist() == SPLITS["train"]
    other = csv_folder.rename(csv_folder.parent / "mine")
    with pytest.raises(DataError, match=r"expected one split scheme; found random, sales_ranking"):
        joestar.data.load(other)


def test_heterogeneous_graph_is_refused(csv_folder):
    write_csv(csv_folder / "raw" / "num-node-dict.csv.gz", ["a,b", "1,2"])
    with pytest.raises(DataError, match=r"several types of nodes; Joestar reads graphs with one type only"):
        joestar.data.load(csv_folder)


def test_binary_without_features(binary_folder):
    np.savez(binary_folder / "raw" / "data.npz", edge_index=EDGES, num_nodes_list=np.array([NUM_NODES]))
    with pytest.raises(DataError, match=r"the key 'node_feat' is missing; the file has edge_index, num_nodes_list"):
        joestar.data.load(binary_folder)


@pytest.mark.parametrize("writer", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_archive_reads_stored_and_compressed_members(tmp_path, writer, order):
    big = np.asarray(np.arange(1 << 19, dtype=np.float32).reshape(512, -1), order=order)
    writer(tmp_path / "a.npz", big=big, small=np.arange(3))
    archive = Archive(tmp_path / "a.npz")
    assert np.array_equal(archive.read("big"), big)
    assert np.array_equal(archive.read("small"), np.arange(3))
    assert isinstance(archive.read("big").base, np.memmap) == (writer is np.savez)
