"""What ``load`` refuses of a folder ``convert`` refuses, before it sorts edges; all that it reads tells of changes."""

import gzip

import numpy as np
import pytest
import torch

import joestar
from joestar.data.convert import convert
from joestar.data.convert_inputs import find_inputs
from joestar.errors import ConfigError, DataError

from .converting import QUIET, whole_folder, write_edges
from .small import EDGES, NUM_NODES, SPLITS, write_csv, write_split

X = np.random.default_rng(0).standard_normal((NUM_NODES, 3))
Y = np.array([0, 1, 2, 0, 1, 2, 0])


def ogb_folder(path, x=X, y=Y, splits=SPLITS):
    folder = path / "ogbn_products"
    for name, rows in (("edge", EDGES.T), ("num-node-list", [NUM_NODES]), ("node-feat", x), ("node-label", y)):
        write_csv(folder / "raw" / f"{name}.csv.gz", rows)
    write_split(folder, "sales_ranking", splits)
    return folder


def texts(value):
    rows = X.astype("U32")
    rows[4, 1] = value
    return rows


WRONG = {
    "more features": (
        {"x": np.concatenate([X, X[:2]])},
        {},
        r"(expected 7 rows.*the file has more|got shape|\[7, F\])",
    ),
    "fewer features": ({"x": X[:-1]}, {}, r"(expected 7 rows|\[7, F\])"),
    "more labels": ({"y": np.append(Y, 0)}, {}, r"labels must be \[7\]"),
    "beyond float32": ({"x": texts("1e39")}, {}, r"(row 4, column 1 is 1e\+39|1e\+39 at \[4, 1\]).*|beyond float32.*"),
    "beyond float32, below zero": ({"x": texts("-3.5e38")}, {}, r"beyond float32"),
    "beyond float64": ({"x": texts("1e400")}, {}, r"(line 5, field 2: expected numbers; got '1e400'|row 4, column 1)"),
    "no word for a number": ({"x": texts("0x10")}, {}, r"node-feat.csv.gz: "),
    "several values as classes": ({"y": X}, {"task": "classes"}, r"task='classes' with .*\[N, T\].* needs 0 and 1"),
    "label missing in a split": (
        {"y": np.where(Y == 1, np.nan, Y)},
        {},
        r"the val split holds 2 nodes without a label",
    ),
    "no training set": ({"splits": SPLITS | {"train": [], "val": [0, 3]}}, {}, r"train"),
    "a node in two splits": ({"splits": SPLITS | {"val": [0, 1]}}, {}, r"(overlap|twice).*node 0|twice, for example 0"),
    "a split that names no node": ({"splits": SPLITS | {"test": [7]}}, {}, r"the test split names node 7"),
}


@pytest.mark.parametrize("case", WRONG)
def test_folders_of_ogb(tmp_path, case):
    given, options, message = WRONG[case]
    folder, phases = ogb_folder(tmp_path, **given), set()
    with pytest.raises(DataError, match=message):
        joestar.load(folder, verbose=False, **options)
    with pytest.raises(DataError, match=message):
        convert(folder, tmp_path / "out", progress=lambda what, *_: phases.add(what), **QUIET | options)
    late = "features" in case or "beyond" in case or "number" in case
    assert late or phases <= {"labels"}, "nothing was parsed or sorted yet"
    assert [path.name for path in tmp_path.iterdir()] == ["ogbn_products"]


def test_infinite_features_of_text_are_those_that_are_written_so(tmp_path):
    graph = joestar.load(convert(ogb_folder(tmp_path, x=texts("-inf")), tmp_path / "out", **QUIET), verbose=False)
    assert graph.ndata["x"][4, 1] == -np.inf and graph.ndata["x"].isfinite().sum() == X.size - 1
    with pytest.raises(DataError, match=r"features must be finite; row 4, column 1 is -inf"):
        convert(tmp_path / "ogbn_products", tmp_path / "other", check=True, **QUIET)


def test_rows_behind_the_last_are_found_behind_blank_lines_and_blocks(tmp_path, monkeypatch):
    folder = ogb_folder(tmp_path)
    features = folder / "raw" / "node-feat.csv.gz"
    text = gzip.decompress(features.read_bytes())
    features.write_bytes(gzip.compress(text + b"\n" * 10_000))
    assert joestar.load(convert(folder, tmp_path / "out", **QUIET), verbose=False).num_nodes == NUM_NODES
    features.write_bytes(gzip.compress(text + b"\n" * 10_000 + b"1,2,3\n"))
    with pytest.raises(DataError, match="expected 7 rows, one per node; the file has more"):
        convert(folder, tmp_path / "other", **QUIET)


def change(name, array):
    return lambda source: np.save(source / name, array)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("train_idx.npy", np.empty(0, np.int64)), "the train split is empty"),
        (change("val_idx.npy", np.arange(90)), r"the splits name \d+ nodes twice"),
        (change("test_idx.npy", np.array([90])), "the test split names node 90"),
        (change("test_idx.npy", np.array([1 << 63], np.uint64)), f"the test split names node {1 << 63}"),
        (change("labels.npy", np.arange(90.0) % 3 + 0.5), "class ids must be whole numbers"),
        (change("labels.npy", np.zeros(89)), r"labels must be \[90\]"),
        (change("labels.npy", np.r_[np.zeros(10), np.full(80, np.nan)]), r"split holds \d+ nodes without a label"),
    ],
)
def test_labels_and_splits_are_looked_at_before_edges_are_sorted(tmp_path, damage, message):
    source, phases = whole_folder(tmp_path / "source"), set()
    damage(source)
    with pytest.raises(DataError, match=message):
        convert(source, tmp_path / "out", progress=lambda what, *_: phases.add(what), **QUIET)
    assert phases <= {"labels"}


def mag_folder(path):
    folder = path / "mag240m_kddcup2021"
    cites, papers = folder / "processed" / "paper___cites___paper", folder / "processed" / "paper"
    for place in (cites, papers):
        place.mkdir(parents=True)
    np.save(cites / "edge_index.npy", EDGES)
    np.save(papers / "node_feat.npy", X.astype(np.float16))
    np.save(papers / "node_label.npy", Y.astype(np.float32))
    torch.save({"train": np.arange(3), "valid": np.arange(3, 6)}, folder / "split_dict.pt")
    return folder


def test_splits_of_mag240m_are_integers(tmp_path):
    folder = mag_folder(tmp_path)
    torch.save({"train": np.arange(3) + 0.5, "valid": np.arange(3, 6)}, folder / "split_dict.pt")
    with pytest.raises(DataError, match=r"split_dict.pt, train: a split must be integer node ids \[n\]; got float64"):
        convert(folder, tmp_path / "out", **QUIET)


def packed_folder(path):
    folder = path / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    np.savez(folder / "raw" / "data.npz", edge_index=EDGES, node_feat=X, num_nodes_list=[NUM_NODES])
    np.savez(folder / "raw" / "node-label.npz", node_label=Y)
    write_split(folder, "time", SPLITS)
    return folder


@pytest.mark.parametrize(
    "write", [ogb_folder, packed_folder, mag_folder, lambda path: whole_folder(path / "source")]
)  # fmt: skip
def test_every_file_that_is_read_tells_of_a_change(tmp_path, write):
    folder = write(tmp_path)
    found = find_inputs(folder, None, None, 1 << 20).files
    assert sorted(map(str, found)) == sorted(str(path) for path in folder.rglob("*") if path.is_file())


def test_errors_of_reading_name_what_is_read(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    edges = np.random.default_rng(0).integers(0, 90, (2, 5000))
    path = tmp_path / "edges.parquet"
    parquet.write_table(pyarrow.table({"source": edges[0], "target": edges[1]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[40 : len(content) // 2] = bytes(len(content) // 2 - 40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"edges.parquet: it cannot be read \(.*Is the file complete"):
        convert(path, tmp_path / "out", **QUIET)


def test_damaged_packed_arrays_are_named(tmp_path):
    path = tmp_path / "g.npz"
    edges = np.random.default_rng(0).integers(0, 90, (2, 50_000))
    np.savez_compressed(path, edge_index=edges)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 400] = b"\xff" * 400
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"g.npz, 'edge_index': it cannot be unpacked"):
        convert(path, tmp_path / "out", **QUIET)


def named_edges(form):
    return lambda path: write_edges(path, form, EDGES)


@pytest.mark.parametrize(
    ("write", "refused"),
    [
        (named_edges("npz"), ("header", "delimiter", "columns")),
        (named_edges("npy"), ("header", "delimiter", "columns")),
        (lambda path: whole_folder(path / "source"), ("header", "columns")),
        (ogb_folder, ("header", "delimiter", "columns")),
        (packed_folder, ("header", "columns")),
        (mag_folder, ("header", "columns")),
        (named_edges("parquet"), ("header", "delimiter")),
        (named_edges("csv"), ()),
    ],
)
def test_arguments_of_text_are_refused_where_they_say_nothing(tmp_path, write, refused):
    source, given = write(tmp_path), {"header": True, "delimiter": ",", "columns": ("source", "target")}
    for name in refused:
        with pytest.raises(ConfigError, match=rf"{name}=.* is for edges in tables of one's own"):
            convert(source, tmp_path / "out", **{name: given[name]}, **QUIET)
    if len(refused) < 2:
        convert(source, tmp_path / "out", **given, **QUIET)


def test_a_file_of_ones_own_that_is_called_as_ogbs_has_the_layout_that_it_has(tmp_path):
    write_edges(tmp_path, "csv.gz", EDGES).rename(tmp_path / "edge.csv.gz")
    for options in ({}, {"header": True}):
        graph = joestar.load(convert(tmp_path / "edge.csv.gz", tmp_path / f"out{len(options)}", **options, **QUIET))
        assert graph.num_edges == EDGES.shape[1]
