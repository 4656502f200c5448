"""Wrong tables: one sentence with the file, the column and the first line that is wrong, and what to do."""

import gzip

import numpy as np
import pytest
import torch

import joestar
from joestar.data import csv_reader, from_tables
from joestar.errors import DataError

EDGES = "source,target,weight\na,b,1\nb,c,2\n"
NODES = "id,f,label\na,1,x\nb,2,y\nc,3,x\n"

CASES = {
    "unknown endpoint": (
        EDGES + "\nzoe,a,1\na,zed,3\n",
        NODES,
        {},
        r"edges.csv: line 5, column 'source': the node 'zoe' is not in nodes.csv. Add it there, remove the edge",
    ),
    "two unknown targets": (EDGES + "a,q,1\nb,q,1\n", NODES, {}, r"line 4, column 'target': .* \(2 edges name unknown"),
    "node twice": (
        EDGES,
        NODES + "b,4,y\n",
        {},
        "nodes.csv: the id 'b' of column 'id' stands in line 3 and again in line 5",
    ),
    "number twice": (
        "1,2\n",
        "id,f\n2,1\n1,1\n2,2\n",
        {},
        "nodes.csv: the id 2 of column 'id' stands in line 2 and again in line 4",
    ),
    "no id in an edge": (EDGES + "a,,1\n", None, {}, "edges.csv, column 'target': line 4 has no id. Remove such lines"),
    "no id in a node": (EDGES, NODES + ",4,y\n", {}, "nodes.csv, column 'id': line 5 has no id"),
    "missing feature": (
        EDGES,
        NODES + "d,,x\ne,NaN,x\n",
        {},
        r"nodes.csv: the column 'f' has 2 missing values, the first in line 5. Give fill=0.0",
    ),
    "infinite feature": (EDGES, NODES + "d,inf,x\n", {}, "the column 'f' must hold finite numbers .*; line 5 has inf"),
    "beyond float32": (EDGES, NODES + "d,1e300,x\n", {}, "finite numbers of float32; line 5 has 1e"),
    "text feature": (
        EDGES,
        NODES + "d,tall,x\n",
        {},
        r"nodes.csv, column 'f': expected numbers, but line 5 has 'tall'. Name the columns to use \(features=\[...\]",
    ),
    "a number that is Python's alone": (EDGES, NODES + "d,1_0,x\n", {}, "expected numbers, but line 5 has '1_0'"),
    "foreign digits": (EDGES, NODES + "d,\u0661,x\n", {}, "expected numbers, but line 5 has '\u0661'"),
    "text on edges": (
        EDGES.replace(",2\n", ",two\n"),
        None,
        {},
        "column 'weight': expected numbers, but line 3 has 'two'",
    ),
    "missing weight": (EDGES + "a,c,\n", None, {}, "column 'weight' has 1 missing values, the first in line 4"),
    "too few fields": (
        EDGES + "a\n",
        None,
        {},
        r"edges.csv: line 4 has 1 fields, the first has 3 \(separated by ','\)",
    ),
    "one column": ("source\na\n", None, {}, "needs two columns, source and target; got source. Give delimiter="),
    "columns of one name": ("a,a\n1,2\n", None, {"header": True}, "two columns are called 'a'. Rename one"),
    "no such column": (
        EDGES,
        None,
        {"source": "from"},
        r"there is no column 'from' \(source\); there is: source, target",
    ),
    "position": (EDGES, None, {"target": 7}, "target=7 is no column; there are 3, from 0"),
    "one column twice": (EDGES, None, {"source": "a", "target": "source", "header": True}, "no column 'a'"),
    "same ends": (EDGES, None, {"source": "target"}, "source and target are both the column 'target'"),
    "empty": ("", None, {}, "expected lines of fields, but the file is empty"),
    "header alone": ("source,target\n", None, {}, "there are neither edges nor nodes"),
    "split words": (
        EDGES,
        "id,split\na,train\nb,later\nc,test\n",
        {},
        "column 'split': a split is 'train', 'val' or 'test', .* got 'later'",
    ),
    "split unlabelled": (
        EDGES,
        "id,label,split\na,x,train\nb,,val\nc,y,test\n",
        {},
        "the val split holds 1 nodes without a label",
    ),
    "split name": (EDGES, NODES, {"split": "fold"}, r"nodes.csv: there is no column 'fold'"),
    "shares": (EDGES, NODES, {"split": (0.8, 0.4)}, r"split: expected shares such as \(0.6, 0.2, 0.2\)"),
    "no labels": (
        EDGES,
        "id,label\na,\nb,NA\nc,\n",
        {"label": "label"},
        "column 'label': not one label; all values are missing",
    ),
    "negative class": (EDGES, "id,y\na,-1\nb,0\nc,1\n", {}, "the label -1 is negative: leave labels .* empty"),
    "number as class": (
        EDGES,
        "id,y\na,0.5\nb,0\nc,1\n",
        {"task": "classes"},
        "task='classes' needs whole numbers or text; got 0.5",
    ),
    "text as target": (EDGES, NODES, {"task": "regression"}, "task='regression' needs numbers; got 'x'"),
    "task": (EDGES, NODES, {"task": "ranking"}, "task must be 'classes', 'regression' or None"),
    "many classes": (
        "source,target\n1,2\n",
        "id,y\n" + "".join(f"{i},{i * 7}\n" for i in range(30)),
        {},
        "30 different whole numbers on 30 nodes: say what they are, task='regression'",
    ),
    "columns of no table": (EDGES, None, {"features": ["f"]}, r"features=\['f'\] names columns .* give nodes="),
    "label of no table": (EDGES, None, {"label": "label"}, "label='label' names columns of the nodes, .* give nodes="),
    "array and text": (
        EDGES,
        None,
        {"features": np.ones((3, 2))},
        "ids are text, such as 'a': which row of the array is whose",
    ),
    "array too short": (
        "1,2\n2,3\n",
        None,
        {"features": np.ones((3, 2))},
        "line 2, column '1': the id 3 is no row of the array, which has 3",
    ),
    "array of other length": (
        EDGES,
        NODES,
        {"features": np.ones((4, 2))},
        r"features must be numbers \[3, F\], .* \[4, 2\]",
    ),
    "array with NaN": (
        EDGES,
        NODES,
        {"features": np.array([[1.0], [np.nan], [1]])},
        "finite, but row 1, column 0 is nan",
    ),
    "no npy": (EDGES, NODES, {"features": "none.npy"}, "features: none.npy cannot be read as an .npy file"),
    "header said wrongly": ("1,2\n3,4\n", "1,5\n", {"header": True}, "neither edges nor nodes|is not in nodes.csv"),
}


@pytest.mark.parametrize(("edges", "nodes", "options", "message"), CASES.values(), ids=CASES.keys())
def test_one_sentence(tmp_path, monkeypatch, edges, nodes, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges.csv").write_text(edges)
    if nodes is not None:
        (tmp_path / "nodes.csv").write_text(nodes)
    with pytest.raises(DataError, match=message) as caught:
        from_tables("edges.csv", None if nodes is None else "nodes.csv", verbose=False, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        ("missing.csv", None, "edges: there is no file missing.csv"),
        ("notes.doc", None, r"a table's name must end in .csv, .tsv, .* or .gz behind it"),
        (
            7,
            None,
            "edges must be the path of a CSV, TSV or Parquet file, a pandas or polars frame, or a dict .* got int",
        ),
        ({}, None, "edges: expected columns; there are none"),
        ({"a": [1], "b": [1, 2]}, None, "columns must be equally long; 'a' has 1 rows, 'b' has 2"),
        (
            {"a": [1, "x"], "b": [1, 2]},
            None,
            r"column 'a': ids must be all integers or all text; row 1 has 'x'|row 0 has 1",
        ),
        ({"a": [1.5], "b": [2]}, None, "ids must be integers or text; row 0 has 1.5"),
        ({"a": [2**70], "b": [2]}, None, "beyond int64; convert the column to text"),
        ({"a": [None], "b": [2]}, None, "row 0 has no id"),
        ({"a": np.zeros(1, "M8[s]"), "b": [1]}, None, r"a column of dtype datetime64\[s\] is neither numbers nor text"),
        ({"a": np.zeros((1, 2)), "b": [1]}, None, r"'a' must have one value per row; got \[1, 2\]"),
        (
            {"a": [1], "b": [2]},
            {"id": [1, 2], "f": [1, None]},
            "nodes: the column 'f' has 1 missing values, the first in row 1",
        ),
        ({"a": [1], "b": [3]}, {"id": [1, 2]}, "edges: row 0, column 'b': the node 3 is not in nodes"),
    ],
)
def test_wrong_things(tmp_path, monkeypatch, edges, nodes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.doc").write_text("x")
    with pytest.raises(DataError, match=message):
        from_tables(edges, nodes)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("damage", ["cut early", "cut late", "changed early", "changed late", "none packed", "all cut"])
def test_packed_files_that_are_damaged(tmp_path, monkeypatch, fast, damage):
    """An ``EOFError`` of Python's came up from a download that was cut."""
    if fast:
        monkeypatch.setattr(csv_reader, "FAST_FROM", 0)
    text = "source,target\n" + "".join(f"{i},{i * 7919 % 20000}\n" for i in range(20_000))
    whole = gzip.compress(text.encode())
    at = {"early": 60, "late": len(whole) - 2000}.get(damage.split()[-1], 0)
    changed = whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 40]) + whole[at + 40 :]
    content = text.encode() if damage == "none packed" else whole[: at or 5] if "cut" in damage else changed
    path = tmp_path / "e.csv.gz"
    path.write_bytes(content)
    for read in (lambda: from_tables(path), lambda: from_tables({"a": [1], "b": [2]}, path)):
        with pytest.raises(DataError, match=r"e.csv.gz: (expected a table, but it cannot|expected UTF-8|line \d+ has)"):
            read()


def test_fields_that_are_too_long(tmp_path):
    (tmp_path / "e.csv").write_text('a,b\n1,"' + "x" * 200_000 + '"\n')
    with pytest.raises(DataError, match=r"e.csv: expected a table, .*field larger than field limit"):
        from_tables(tmp_path / "e.csv")


def test_no_text(tmp_path):
    path = tmp_path / "e.csv"
    path.write_bytes(b"a,b\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="expected UTF-8 text"):
        from_tables(path)
    path.write_text("a,b\n" * 40_000, encoding="utf-8")
    with open(path, "ab") as file:
        file.write(b"\xff,1\n")
    with pytest.raises(DataError, match=r"expected UTF-8 text .* Save the file as UTF-8"):
        from_tables(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "x.npy",
            r"it is one array, and a graph has edges and features: joestar.load\('edges.csv', features='x.npy'\)",
        ),
        ("g.pt", r"data = torch.load\('g.pt', weights_only=False\) if you trust it"),
        ("g.pkl", r"torch.load\('g.pkl'"),
        ("g.graphml", r"joestar.Graph.from_networkx\(networkx.read_graphml\('g.graphml'\)\)"),
        ("g.mtx", r"joestar.Graph.from_scipy\(scipy.io.mmread\('g.mtx'\)\)"),
        ("g.xlsx", "save the sheets as CSV"),
        ("g.dat", "Joestar reads .npz archives and tables .* Rename it"),
    ],
)
def test_files_of_other_kinds_name_the_way(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=message):
        joestar.load(name)


def test_arguments_for_tables_belong_to_tables(tmp_path):
    with pytest.raises(
        DataError, match=r"joestar.load\('cora'\) has no use for features: those are arguments for tables"
    ):
        joestar.load("cora", features="x.npy")
    (tmp_path / "e.csv").write_text("1,2\n")
    with pytest.raises(DataError, match=r"unexpected keyword argument 'feature'; see joestar.data.from_tables"):
        joestar.load(tmp_path / "e.csv", feature="x.npy")
    with pytest.raises(DataError, match="undirected must be True, False or None; got 'no'"):
        joestar.load("cora", undirected="no")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("edges.csv", "edges.npy"), "expected one file of edges; found edges.npy, edges.csv"),
        (("edges.csv", "edges.tsv.gz"), "expected one file of edges; found edges.csv, edges.tsv.gz"),
        (("edges.csv", "nodes.csv", "nodes.parquet"), "expected one file of nodes; found nodes.csv, nodes.parquet"),
        (("edges.csv", "train_idx.npy", "val_idx.npy"), "does not read train_idx.npy, val_idx.npy beside tables"),
        (("edges.npy", "features.npy"), "a folder with edges.npy is read once it is converted: joestar convert .* OUT"),
        (
            ("processed/paper___cites___paper/edge_index.npy",),
            "a dataset folder of MAG240M is read once it is converted: joestar convert",
        ),
    ],
)
def test_no_file_of_a_folder_is_passed_over_in_silence(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("id,other\n0,1\n1,0\n")
    with pytest.raises(DataError, match=message):
        joestar.load(tmp_path)


def test_a_split_of_ones_own_is_taken_beside_files_of_another(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,2\n2,0\n")
    (tmp_path / "train_idx.npy").write_text("of joestar convert")
    np.save(tmp_path / "labels.npy", np.arange(3) % 2)
    graph = joestar.load(tmp_path, split=(0.4, 0.3, 0.3), verbose=False)
    assert sorted(torch.cat([graph.train_idx, graph.val_idx, graph.test_idx]).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"label": "id"}, "nodes: the column 'id' is asked for as id and as label"),
        ({"features": ["id", "f"]}, "the column 'id' is asked for as id and as features"),
        ({"features": ["f", "label"]}, "the column 'label' is asked for as label and as features"),
        ({"label": "f", "features": ["f"]}, "the column 'f' is asked for as label and as features"),
        ({"label": ["f", "f"]}, "the column 'f' is asked for twice as label"),
        ({"features": ["f", 1]}, "the column 'f' is asked for twice as features"),
        ({"split": "label"}, "the column 'label' is asked for as label and as split"),
        ({"features": ["split"]}, "the column 'split' is asked for as split and as features"),
        ({"edge_attr": ["source"]}, "edges: the column 'source' is asked for as source and as weight or edge_attr"),
        ({"weight": "target"}, "the column 'target' is asked for as target and as weight or edge_attr"),
        ({"edge_attr": ["weight", "weight"]}, "the column 'weight' is asked for twice as weight or edge_attr"),
        ({"label": [0, 1, 0]}, r"'id' is asked for as id and as label.*a list names columns; values, .* numpy.array"),
        ({"label": ["x", "y", "x"]}, r"there is no column 'x' \(label\).*values, one per node, are an array"),
    ],
)
def test_a_column_has_one_role(asked, message):
    edges = {"source": [0, 1], "target": [1, 2], "weight": [0.5, 1.5]}
    nodes = {"id": [0, 1, 2], "f": [0.1, 0.2, 0.3], "label": [0, 1, 0], "split": ["train", "val", "test"]}
    with pytest.raises(DataError, match=message):
        from_tables(edges, nodes, **asked)


def test_lists_of_names_need_a_table_and_lists_of_rows_do_not():
    edges = {"source": [0, 1], "target": [1, 2]}
    with pytest.raises(DataError, match=r"names columns of the nodes.*values, one per node, are an array"):
        from_tables(edges, label=[0, 1, 0])
    assert from_tables(edges, features=[[0.5, 1], [1, 2], [0, 3]], verbose=False).ndata["x"].tolist()[0] == [0.5, 1]
