"""Tables of edges and nodes: what comes out is what went in, whatever the ids, the file format and the frame."""

import csv
import gzip
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import joestar
from joestar.data import csv_reader, from_tables, save
from joestar.data.columns import Coded, Ids
from joestar.data.convert import convert
from joestar.errors import DataError

SETTINGS = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EDGES = "src,dst,w,kind\nalice,bob,0.5,1\nbob,carol,1.5,2\ncarol,alice,2,1\ndave,dave,1,1\n"
NODES = (
    "id,a,b,label,split\ncarol,1,2,cat,train\nalice,3,4.5,dog,val\nbob,0,1,,\ndave,2,2,dog,test\nerin,2,2,dog,train\n"
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(
    lambda text: text.strip() == text
)
awkward = st.sampled_from(
    ["007", "7", "+7", "-0", "0", "nan", "NA", "null", "1e3", "a,b", 'q"', "\u0661", "9" * 30, "#x", "-5"]
)
whole = st.integers(-(2**63), 2**63 - 1)
ids = st.one_of(st.lists(st.tuples(whole, whole), min_size=1, max_size=12),
                st.lists(st.tuples(names | awkward, names | awkward), min_size=1, max_size=12))  # fmt: skip
weights = st.floats(-1e6, 1e6, width=32)


def edges_of(graph):
    """Counter of (raw source, raw target, weight)."""
    src, dst, eid = graph.coo()
    ends = (graph.mapping.to_raw(end) for end in (src, dst))
    weight = graph.edata["edge_weight"][eid].tolist() if "edge_weight" in graph.edata else [None] * len(eid)
    return Counter(zip(*ends, weight, strict=True))


def write(path, rows, header=("source", "target", "weight"), delimiter=","):
    make = gzip.open if path.suffix == ".gz" else open
    with make(path, "wt", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([header, *rows] if header else rows)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges.csv").write_text(EDGES)
    (tmp_path / "nodes.csv").write_text(NODES)
    return tmp_path


@SETTINGS
@given(ids, st.data())
def test_every_edge_comes_back_under_its_own_ids(tmp_path, pairs, data):
    values = data.draw(st.lists(weights, min_size=len(pairs), max_size=len(pairs)))
    rows = [(u, v, repr(w)) for (u, v), w in zip(pairs, values, strict=True)]
    name = data.draw(st.sampled_from(["e.csv", "e.tsv", "e.csv.gz"]))
    path = write(tmp_path / name, rows, delimiter="\t" if "tsv" in name else ",")
    graph = from_tables(path, header=True, verbose=False)
    typed = all(isinstance(u, int) for pair in pairs for u in pair) or all(
        text == str(int(text)) and abs(int(text)) < 2**63 if _is_integer(text) else False for p in pairs for text in p
    )
    raw = [(int(u), int(v)) if typed else (str(u), str(v)) for u, v in pairs]
    expected = Counter((u, v, float(np.float32(w))) for (u, v), w in zip(raw, values, strict=True))
    assert edges_of(graph) == expected
    distinct = sorted({u for pair in raw for u in pair})
    assert graph.mapping.to_raw(range(graph.num_nodes)) == distinct
    assert graph.mapping.to_ids(distinct).tolist() == list(range(len(distinct)))
    frame = {"source": [u for u, _ in raw], "target": [v for _, v in raw], "weight": values}
    again = from_tables(frame, nodes={"id": distinct[::-1]}, verbose=False)
    assert edges_of(again) == expected
    assert again.mapping.to_raw(range(len(distinct))) == distinct[::-1]


def _is_integer(text) -> bool:
    try:
        return str(int(text)) == text
    except ValueError:
        return False


@SETTINGS
@given(ids, st.data())
def test_a_saved_graph_comes_back_with_mapping_and_classes(tmp_path, pairs, data):
    graph = from_tables({"u": [u for u, _ in pairs], "v": [v for _, v in pairs]}, verbose=False)
    graph.class_names = data.draw(st.none() | st.lists(names, max_size=3))
    loaded = joestar.load(save(graph, tmp_path / "saved", overwrite=True))
    assert loaded.mapping == graph.mapping and loaded.class_names == graph.class_names
    assert edges_of(loaded) == edges_of(graph)


def test_nodes_have_features_classes_and_splits(folder, capsys):
    graph = from_tables("edges.csv", "nodes.csv")
    assert graph.mapping.to_raw(range(5)) == ["carol", "alice", "bob", "dave", "erin"]
    assert graph.ndata["x"].tolist() == [[1, 2], [3, 4.5], [0, 1], [2, 2], [2, 2]]
    assert graph.ndata["y"].tolist() == [0, 1, -100, 1, 1]
    assert graph.class_names == ["cat", "dog"] and graph.num_classes == 2 and not graph.multilabel
    assert [graph.train_idx.tolist(), graph.val_idx.tolist(), graph.test_idx.tolist()] == [[0, 4], [1], [3]]
    assert edges_of(graph) == Counter(
        {("alice", "bob", 0.5): 1, ("bob", "carol", 1.5): 1, ("carol", "alice", 2.0): 1, ("dave", "dave", 1.0): 1}
    )
    kinds = {("alice", "bob"): 1, ("bob", "carol"): 2, ("carol", "alice"): 1, ("dave", "dave"): 1}
    src, dst, eid = graph.coo()
    ends = zip(graph.mapping.to_raw(src), graph.mapping.to_raw(dst), strict=True)
    assert graph.edata["edge_attr"][eid].flatten().tolist() == [kinds[pair] for pair in ends]
    said = capsys.readouterr().err
    for text in (
        "src -> dst; 5 nodes, 4 edges given; 1 self-loop kept (drop_self_loops=True otherwise)", "3 have no reverse",
        "nodes.csv: the first line is taken for a header (id, a, b, label; header=False otherwise)",
        "features: 2 columns (a, b)", "2 classes (cat, dog)", "2 train, 1 val, 1 test (from the table)",
    ):  # fmt: skip
        assert text in said
    both = from_tables("edges.csv", "nodes.csv", undirected=True, drop_self_loops=True, verbose=False)
    assert capsys.readouterr().err == ""
    assert edges_of(both) == Counter(
        (u, v, w) for a, b, w in [("alice", "bob", 0.5), ("bob", "carol", 1.5), ("carol", "alice", 2.0)]
        for u, v in ((a, b), (b, a))
    )  # fmt: skip


def test_load_takes_tables_folders_and_frames(folder):
    graph = from_tables("edges.csv", "nodes.csv", verbose=False)
    by_name = joestar.load("edges.csv", nodes="nodes.csv", verbose=False)
    by_folder = joestar.load(folder, verbose=False)
    assert by_folder.name == folder.name
    rows = [line.split(",") for line in EDGES.splitlines()]
    frame = {key: list(values) for key, *values in zip(*rows, strict=True)}
    by_frame = joestar.load(frame, nodes="nodes.csv", verbose=False)
    for other in (by_name, by_folder, by_frame):
        assert edges_of(other) == edges_of(graph) and torch.equal(other.ndata["x"], graph.ndata["x"])
    np.save("x.npy", np.arange(8.0).reshape(4, 2))
    np.save("y.npy", np.array([[0], [1], [1], [0]]))
    write(folder / "numbers.csv", [(0, 3), (3, 1)], header=None)
    graph = joestar.load("numbers.csv", features="x.npy", label="y.npy", split=(0.5, 0.25, 0.25), verbose=False)
    assert graph.ndata["x"].dtype == torch.float32 and graph.ndata["x"][3].tolist() == [6, 7]
    assert graph.ndata["y"].tolist() == [0, 1, 1, 0] and graph.mapping.is_identity
    assert [len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)] == [2, 1, 1]
    reversed_ = joestar.load("numbers.csv", nodes={"key": [3, 2, 1, 0]}, features="x.npy", verbose=False)
    assert reversed_.mapping.to_ids(3) == 0 and reversed_.ndata["x"][0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "names", "rows"),
    [
        ("a,b\n1,2\n", ["a", "b"], 1),
        ("1,2\n3,4\n", ["0", "1"], 2),
        ("x,y\nz,w\n", ["0", "1"], 2),  # words above words: no header, unless a name is known
        ("Source,other\nz,w\n", ["Source", "other"], 1),
        ("# from to\n% more\n1 2\n3 4\n", ["0", "1"], 2),
        ("a;b\n1;2\n\n3;4\n", ["a", "b"], 2),
        ("\ufeffsource\ttarget\n1\t2\n", ["source", "target"], 1),
        ("a,b,note\n1,2,hello there\n", ["a", "b", "note"], 1),
        ("1,\n2,3\n", ["0", "1"], 2),
        ("id,size,\n1,2,\n", ["id", "size"], 1),  # every line ends in a delimiter
        ("a,b,,\n1,2,,\n", ["a", "b"], 1),
        ("id,size,\n1,2,\n3,4,5\n", ["id", "size", ""], 2),
        ("1,2,\n3,4,\n", ["0", "1", "2"], 2),
    ],
)
def test_headers_and_delimiters_are_seen(tmp_path, text, names, rows):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    layout = csv_reader.look(path, None, None, [])
    assert layout.names == names
    assert len(list(csv_reader._rows(path, layout))) == rows


@pytest.mark.parametrize("end", [",", ",,", ", ,"])
@pytest.mark.parametrize("header", [None, True])
@pytest.mark.parametrize("fast", [True, False])
def test_lines_may_end_in_delimiters(tmp_path, monkeypatch, capsys, end, header, fast):
    """What is behind them was a column of missing values, or two columns of one name."""
    monkeypatch.setattr(csv_reader, "FAST_FROM", 0 if fast else 1 << 30)
    edges, nodes = tmp_path / "edges.csv", tmp_path / "nodes.csv"
    edges.write_text("source,target,w\n0,1,2\n1,2,3\n".replace("\n", f"{end}\n"))
    nodes.write_text("id,f\n0,1.5\n1,2.5\n2,3.5\n".replace("\n", f"{end}\n"))
    graph = from_tables(edges, nodes, header=header)
    assert graph.num_edges == 2 and set(graph.edata) == {"edge_weight"}
    assert graph.feature_names == ["f"] and graph.ndata["x"].flatten().tolist() == [1.5, 2.5, 3.5]
    assert capsys.readouterr().err.count("left out: what is behind the last name, as it is empty") == 2
    converted = joestar.load(convert(edges, tmp_path / "graph", header=header))
    assert converted.num_edges == 2
    assert "not converted: w, one without a name" in capsys.readouterr().err
    edges.write_text(f"source,target{end}\n" + f"0,1{end}\n" * 60 + f"0,1{end}7\n")
    with pytest.raises(DataError, match=r"line 62 has a value behind the last column that has a name. Give that"):
        from_tables(edges, header=header)


def test_a_guessed_header_can_be_overruled(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("anna,otto\nbob,anna\n")
    assert from_tables(path).num_edges == 2
    assert "no header: the first line is data (anna, otto; header=True otherwise)" in capsys.readouterr().err
    graph = from_tables(path, header=True)
    assert graph.num_edges == 1 and graph.mapping.to_raw([0, 1]) == ["anna", "bob"]
    assert from_tables(path, source="otto", target="anna").mapping.to_raw([0]) == ["anna"]
    assert from_tables(path, header=False, source=1, target=0).coo()[0].tolist() == [2, 0]


def test_pieces_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_reader, "ROWS", 2)
    path = write(tmp_path / "e.csv", [(1, 2, 1), (3, 4, 2), ("x", 1, 3), (1, 2, 4), (7, "y", 5)])
    expected = {("1", "2", 1): 1, ("3", "4", 2): 1, ("x", "1", 3): 1, ("1", "2", 4): 1, ("7", "y", 5): 1}
    assert edges_of(from_tables(path, verbose=False)) == expected


# --- frames and pyarrow -----------------------------------------------------------------------------------------------


class Series:
    """What pandas and polars columns have in common."""

    def __init__(self, values, dtype=None):
        self.values = np.array(values, dtype=dtype)

    def to_numpy(self):
        return self.values

    def __len__(self):
        return len(self.values)


class Frame:
    """What pandas and polars frames have in common."""

    def __init__(self, **columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]


def test_frames_by_what_they_have():
    edges = Frame(u=Series(["a", "b", "a"], object), v=Series(["b", "c", "c"], object), t=Series([1, 2, 3]))
    nodes = Frame(id=Series(["c", "b", "a"], object), f=Series([1.0, 2.0, 3.0]), label=Series([0.0, np.nan, 1.0]))
    graph = from_tables(edges, nodes, verbose=False)
    assert graph.mapping.to_raw([0, 1, 2]) == ["c", "b", "a"]
    assert graph.ndata["y"].tolist() == [0, -100, 1] and graph.num_classes == 2
    assert graph.edata["edge_attr"].flatten().tolist() == [2, 3, 1]
    gap = Frame(u=Series([1.0, np.nan]), v=Series([2, 3]))
    with pytest.raises(DataError, match="edges, column 'u': row 1 has no id"):
        from_tables(gap)
    assert from_tables(Frame(u=Series([1.0, 5.0]), v=Series([2, 3])), verbose=False).mapping.to_raw([3]) == [5]
    for dtype, most in (("float16", 2**11), ("float32", 2**24), ("float64", 2**53)):
        with pytest.raises(DataError, match=rf"row 1 has .*{dtype} holds not every integer from {most} on"):
            from_tables(Frame(u=Series([1, most + 1], dtype), v=Series([2, 3])), verbose=False)
        assert from_tables(Frame(u=Series([1, most - 1], dtype), v=Series([2, 3]))).mapping.to_ids(most - 1) == 3


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_real_frames(library):
    module = pytest.importorskip(library)
    make = {"pandas": lambda m: m.DataFrame, "polars": lambda m: m.DataFrame, "pyarrow": lambda m: m.table}[library]
    make = make(module)
    edges = make({"source": ["a", "b", "a"], "target": ["b", "c", "c"], "weight": [1, 2, 3]})
    nodes = make({"id": ["c", "b", "a"], "f": [1.0, 2.0, 3.0], "label": ["x", None, "y"], "g": [True, False, True]})
    graph = joestar.load(edges, nodes=nodes, verbose=False)
    assert edges_of(graph) == {("a", "b", 1): 1, ("b", "c", 2): 1, ("a", "c", 3): 1}
    assert graph.ndata["x"].tolist() == [[1, 1], [2, 0], [3, 1]]
    assert graph.ndata["y"].tolist() == [0, -100, 1] and graph.class_names == ["x", "y"]
    numbers = make({"source": [10**12, 5], "target": [5, 7]})
    assert from_tables(numbers, verbose=False).mapping.to_raw([0, 1, 2]) == [5, 7, 10**12]


@pytest.mark.parametrize("form", ["table", "parquet", "arrays"])
def test_missing_values_of_coded_columns_stay_missing(tmp_path, form):
    """To NumPy pyarrow gives the last value of the code for them, and of arrays by themselves nothing."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def made(path, **columns):
        columns = {name: pyarrow.array(values).dictionary_encode() for name, values in columns.items()}
        if form == "arrays":
            return columns
        parquet.write_table(pyarrow.table(columns), tmp_path / path)
        return tmp_path / path if form == "parquet" else pyarrow.table(columns)

    edges = made("e.parquet", source=["a", "b"], target=["b", "c"], weight=[2.0, None])
    nodes = made("n.parquet", id=["a", "b", "c"], label=["x", None, "y"], split=["train", None, "test"])
    graph = from_tables(edges, nodes, fill=7, verbose=False)
    assert edges_of(graph) == {("a", "b", 2): 1, ("b", "c", 7): 1}
    assert graph.ndata["y"].tolist() == [0, -100, 1]
    assert graph.train_idx.tolist() == [0] and graph.test_idx.tolist() == [2]
    with pytest.raises(DataError, match="column 'target': row 1 has no id"):
        from_tables(made("e.parquet", source=["a", "b"], target=["b", None]), verbose=False)


def test_parquet_and_what_is_said_without_pyarrow(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "e.parquet").write_bytes(b"PAR1")
        with pytest.raises(DataError, match="needs pyarrow, which is not installed: pip install pyarrow, or save"):
            joestar.load(tmp_path / "e.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with pytest.raises(DataError, match="expected a Parquet file"):
        joestar.load(tmp_path / "e.parquet")
    parquet.write_table(pyarrow.table({"source": ["a"], "target": ["b"], "w": [2]}), tmp_path / "e.parquet")
    assert edges_of(joestar.load(tmp_path / "e.parquet", verbose=False)) == {("a", "b", 2): 1}


@SETTINGS
@given(
    st.lists(st.tuples(names | awkward, names | awkward | whole.map(str), weights.map(repr) | awkward), max_size=8),
    st.sampled_from(["", "#c\n", "\n# c\n\n"]),
)
def test_pyarrow_reads_as_the_slow_reader_does(tmp_path, rows, comments):
    pytest.importorskip("pyarrow")
    path = write(tmp_path / "e.csv", rows)
    path.write_text(comments + path.read_text(encoding="utf-8"), encoding="utf-8")
    layout = csv_reader.look(path, True, None, [])
    roles = {"source": "id", "target": "id", "weight": "number"}
    for asked in (roles, {"target": "coded", "source": "id"}):
        from joestar.data.arrow import read_csv_fast

        fast = read_csv_fast(path, layout, asked)
        if fast is None:
            continue
        slow = csv_reader._read_slowly(path, layout, asked)
        for name in asked:
            assert plain(fast[name]) == plain(slow[name])


def test_large_files_go_through_pyarrow(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(csv_reader, "FAST_FROM", 0)
    monkeypatch.setattr(csv_reader, "_read_slowly", None)
    path = write(tmp_path / "e.csv", [(1, "x", 1.5), (7, "y", ""), ("z", 1, 2)])
    assert edges_of(from_tables(path, fill=9, verbose=False)) == {
        ("1", "x", 1.5): 1,
        ("7", "y", 9): 1,
        ("z", "1", 2): 1,
    }


def plain(column):
    """A column as a list of values, text for NaN."""
    if isinstance(column, Ids):
        return [column.raw(row) for row in range(len(column.values))]
    if isinstance(column, Coded):
        return [column.values[place] for place in column.places]
    return [str(value) for value in column.tolist()]


def test_without_pyarrow_large_files_are_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_reader, "FAST_FROM", 0)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(tmp_path / "e.csv", [(1, 2, 1.5)])
    assert edges_of(from_tables(path, verbose=False)) == {(1, 2, 1.5): 1}


def test_a_header_that_was_taken_for_an_edge_is_named(tmp_path):
    (tmp_path / "edges.csv").write_text("a,b\np,q\nq,p\n")
    (tmp_path / "nodes.csv").write_text("name,class\np,x\nq,y\n")
    with pytest.raises(DataError, match=r"the node 'a' is not in .* names the columns, .* header=True"):
        joestar.load(tmp_path / "edges.csv", nodes=tmp_path / "nodes.csv")
    assert joestar.load(tmp_path / "edges.csv", nodes=tmp_path / "nodes.csv", header=True).num_nodes == 2


@pytest.mark.parametrize("with_nodes", [True, False])
def test_tensors_of_16_bits_are_taken(with_nodes):
    x = torch.tensor([[0.5, 1], [2, 3], [4, 5]])
    nodes = {"id": [0, 1, 2], "f": x[:, 0].bfloat16()} if with_nodes else None
    edges = {"source": torch.tensor([0, 1]), "target": [1, 2], "weight": torch.tensor([0.5, 1.5]).bfloat16()}
    for dtype in (torch.bfloat16, torch.float16):
        graph = from_tables(edges, nodes, features=x.to(dtype), label=x[:, 1].to(dtype), task="regression")
        assert graph.ndata["x"].float().tolist() == x.tolist() and graph.ndata["y"].tolist() == [1.0, 3.0, 5.0]
        assert graph.edata["edge_weight"].tolist() == [0.5, 1.5]
    if with_nodes:
        assert from_tables(edges, nodes, verbose=False).ndata["x"].tolist() == [[0.5], [2.0], [4.0]]


def test_an_empty_column_of_labels_that_nobody_asked_for_is_none(tmp_path, capsys):
    for nodes in ({"id": [0, 1, 2], "f": [1, 2, 3], "y": [np.nan] * 3}, tmp_path / "nodes.csv"):
        (tmp_path / "nodes.csv").write_text("id,f,y\n0,1,\n1,2,NA\n2,3,\n")
        graph = from_tables({"source": [0, 1], "target": [1, 2]}, nodes)
        assert set(graph.ndata) == {"x"} and graph.ndata["x"].shape == (3, 1) and graph.train_idx is None
        assert "y: empty, the graph has no labels" in capsys.readouterr().err


def test_numbers_are_no_names_of_features():
    """A data frame of an array has columns 0, 1, ...: of a table with names they may be any."""
    pandas = pytest.importorskip("pandas")
    nodes = pandas.DataFrame(np.array([[0, 1.5, 2.5], [1, 3.5, 4.5]]))
    edges = {"source": [0], "target": [1]}
    assert from_tables(edges, nodes, id=0, verbose=False).feature_names is None
    named = nodes.set_axis(["id", "age", "size"], axis=1)
    assert from_tables(edges, named, verbose=False).feature_names == ["age", "size"]
