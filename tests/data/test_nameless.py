"""The index of a data frame in a file: without a name it is no column, whatever wrote it; named, it is one."""

import pytest

import joestar
from joestar.data import csv_reader, from_tables
from joestar.data.convert import convert
from joestar.errors import DataError

from .converting import QUIET

pd, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
EDGES = pd.DataFrame({"source": [0, 1, 3], "target": [1, 3, 4], "weight": [0.5, 1.5, 2.5]}, index=[7, 8, 9])
NODES = pd.DataFrame({"id": [0, 1, 3, 4], "a": [0.1, 0.2, 0.4, 0.5], "label": list("xyyx")}, index=[5, 6, 8, 9])


def written(frame, path, form, **options):
    """A file or an object of a frame together with its index."""
    if form == "csv":
        frame.to_csv(path.with_suffix(".csv"), **options)
        return path.with_suffix(".csv")
    if form == "tsv":
        frame.to_csv(path.with_suffix(".tsv"), sep="\t")
        return path.with_suffix(".tsv")
    if form == "parquet":
        frame.to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    if form == "arrow":
        return pyarrow.Table.from_pandas(frame)
    frame.to_csv(path.with_suffix(".csv"))
    return pd.read_csv(path.with_suffix(".csv"))


@pytest.mark.parametrize("form", ["csv", "csv by arrow", "tsv", "parquet", "arrow", "read back"])
def test_an_index_without_a_name_is_no_column(tmp_path, monkeypatch, capsys, form):
    """It became a feature and an attribute of edges, or the first line was taken for data."""
    if form == "csv by arrow":
        monkeypatch.setattr(csv_reader, "FAST_FROM", 0)
        form = "csv"
    edges, nodes = (written(frame, tmp_path / name, form) for frame, name in ((EDGES, "edges"), (NODES, "nodes")))
    graph = from_tables(edges, nodes)
    assert graph.ndata["x"].flatten().tolist() == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert graph.mapping.to_raw(range(4)) == [0, 1, 3, 4] and graph.class_names == ["x", "y"]
    assert set(graph.edata) == {"edge_weight"} and sorted(graph.edata["edge_weight"].tolist()) == [0.5, 1.5, 2.5]
    said = capsys.readouterr().err
    name = {"csv": "''", "tsv": "''", "read back": "'Unnamed: 0'"}.get(form, "'__index_level_0__'")
    assert said.count(f"left out: {name}, the index of a data frame without a name") == 2


@pytest.mark.parametrize("form", ["csv", "parquet", "read back"])
def test_it_is_a_column_for_who_asks(tmp_path, form):
    edges, nodes = EDGES[["source", "target"]] + 5, written(NODES[["a", "label"]], tmp_path / "nodes", form)
    name = {"csv": "", "parquet": "__index_level_0__", "read back": "Unnamed: 0"}[form]
    graph = from_tables(edges, nodes, id=name, verbose=False)
    assert graph.mapping.to_raw(range(4)) == [5, 6, 8, 9] and graph.ndata["x"].shape == (4, 1)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_index_with_a_name_is_a_column(tmp_path, form):
    nodes = written(NODES.rename_axis("place"), tmp_path / "nodes", form)
    graph = from_tables(EDGES, nodes, id="id", verbose=False)
    assert graph.ndata["x"].shape == (4, 2) and {5, 6, 8, 9} <= set(graph.ndata["x"].flatten().tolist())
    nodes = written(NODES.drop(columns="id").set_index(NODES["id"]), tmp_path / "more", form)
    assert from_tables(EDGES, nodes, verbose=False).ndata["x"].shape == (4, 1)


def test_first_lines_that_begin_empty_and_are_data(tmp_path):
    (tmp_path / "e.csv").write_text(",5\n1,2\n")
    with pytest.raises(DataError, match="column '0': line 1 has no id"):
        from_tables(tmp_path / "e.csv", verbose=False)


def test_header_is_asked_for(tmp_path):
    edges = written(EDGES[["source", "target"]], tmp_path / "edges", "csv", header=["0", "1"])
    graph = from_tables(edges, header=True, verbose=False)
    assert graph.mapping.to_raw(range(4)) == [0, 1, 3, 4] and not graph.edata


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("columns", [None, "positions", ("source", "target")])
def test_convert_leaves_it_out(tmp_path, capsys, form, columns):
    if columns == "positions":
        columns = (0, 1) if form == "parquet" else (1, 2)  # pandas writes the index behind the others
    source = written(EDGES, tmp_path / "edges", form)
    graph = joestar.load(convert(source, tmp_path / "graph", columns=columns, **(QUIET | {"verbose": True})))
    src, dst, _ = graph.coo()
    assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == [(0, 1), (1, 3), (3, 4)]
    said = capsys.readouterr().err
    name = "__index_level_0__" if form == "parquet" else "one without a name"
    assert "not converted" in said and name in said and "weight" in said


FORMS = ["csv", "csv by arrow", "tsv", "parquet", "arrow", "read back", "dict"]


def laid_out(frame, path, form, monkeypatch):
    """(a table whose first column is the index, in most forms; where the others begin)."""
    if form == "csv by arrow":
        monkeypatch.setattr(csv_reader, "FAST_FROM", 0)
        form = "csv"
    if form == "dict":
        return {"__index_level_0__": frame.index.to_numpy(), **{name: frame[name] for name in frame}}, 1
    return written(frame, path, form), 0 if form in ("parquet", "arrow") else 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loaded", [True, False])
def test_positions_count_all_columns(tmp_path, monkeypatch, form, loaded):
    """They counted those without the index: source=1 was the third column."""
    read = joestar.load if loaded else from_tables
    swapped = EDGES[["weight", "source", "target"]].rename(columns={"weight": "a", "source": "b", "target": "c"})
    edges, first = laid_out(swapped, tmp_path / "edges", form, monkeypatch)
    nodes, _ = laid_out(
        NODES[["a", "id", "label"]].set_axis(list("pqr"), axis=1), tmp_path / "nodes", form, monkeypatch
    )
    graph = read(
        edges, nodes=nodes, source=first + 1, target=first + 2, edge_attr=[first], id=first + 1, label=first + 2,
        features=[first], header=None if form in ("parquet", "arrow", "read back", "dict") else True, verbose=False,
    )  # fmt: skip
    src, dst, _ = graph.coo()
    raw = [graph.mapping.to_raw(side.tolist()) for side in (src, dst)]
    assert sorted(zip(*raw, strict=True)) == [(0, 1), (1, 3), (3, 4)]
    assert sorted(graph.edata["edge_attr"].flatten().tolist()) == [0.5, 1.5, 2.5]
    assert graph.ndata["x"].flatten().tolist() == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert graph.class_names == ["x", "y"] and graph.ndata["y"].tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match="source=4 is no column; there are 4, from 0"):
        read(edges, source=4, verbose=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_position_asks_for_it(tmp_path, monkeypatch, form):
    nodes, first = laid_out(NODES[["a", "label"]], tmp_path / "nodes", form, monkeypatch)
    edges = EDGES[["source", "target"]] + 5
    graph = from_tables(edges, nodes, id=0 if first else 2, verbose=False)
    assert graph.mapping.to_raw(range(4)) == [5, 6, 8, 9] and graph.ndata["x"].shape == (4, 1)
    edges, first = laid_out(pd.DataFrame({"to": [1, 2]}, index=[5, 6]), tmp_path / "edges", form, monkeypatch)
    graph = from_tables(edges, source=0 if first else 1, verbose=False)
    assert graph.mapping.to_raw(range(4)) == [1, 2, 5, 6] and not graph.edata


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet"])
def test_convert_is_asked_for_it_by_position(tmp_path, form):
    source = written(pd.DataFrame({"to": [1, 2]}, index=[3, 0]), tmp_path / "edges", form)
    columns = (1, 0) if form == "parquet" else (0, 1)
    graph = joestar.load(convert(source, tmp_path / "graph", columns=columns, **QUIET))
    src, dst, _ = graph.coo()
    assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == [(0, 2), (3, 1)]


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_the_first_column_unless_one_is_called_so(tmp_path, monkeypatch, capsys, form):
    """Where the index was left out, the first feature became the ids."""
    nodes, first = laid_out(NODES[["a", "label"]], tmp_path / "nodes", form, monkeypatch)
    if not first:
        nodes, first = laid_out(NODES[["id", "a"]].rename(columns={"id": "k"}), tmp_path / "k", form, monkeypatch)
        graph = from_tables(EDGES, nodes)
        assert graph.mapping.to_raw(range(4)) == [0, 1, 3, 4] and graph.ndata["x"].shape == (4, 1)
        assert "left out: '__index_level_0__'" in capsys.readouterr().err
        return
    graph = from_tables(EDGES[["source", "target"]] + 5, nodes)
    assert graph.mapping.to_raw(range(4)) == [5, 6, 8, 9] and graph.ndata["x"].shape == (4, 1)
    said = capsys.readouterr().err
    assert "the ids are '" in said and "the index of a data frame without a name" in said
    assert "nodes" in said and not [line for line in said.splitlines() if "nodes" in line and "left out" in line]


def test_names_in_lists_ask_for_it(tmp_path):
    nodes = pd.read_csv(written(NODES.set_axis([1, 0, 0, 1], axis=0), tmp_path / "nodes", "csv"))
    graph = from_tables(EDGES, nodes, label=["Unnamed: 0"], features="a", verbose=False)
    assert graph.ndata["y"].tolist() == [1, 0, 0, 1]
    edges = pd.read_csv(written(EDGES, tmp_path / "edges", "csv"))
    graph = from_tables(edges, edge_attr="Unnamed: 0", verbose=False)
    assert sorted(graph.edata["edge_attr"].flatten().tolist()) == [7, 8, 9]


def test_names_of_an_index_are_columns_of_a_frame_as_of_its_file(tmp_path):
    """They vanished: the first feature became the ids, and other columns the ends of edges."""
    nodes = pd.DataFrame({"id": [2, 0, 1], "rank": [0, 1, 2], "f": [20.0, 0.0, 10.0], "label": [2, 0, 1]})
    edges = pd.DataFrame({"source": [0, 1, 2, 0], "target": [1, 2, 0, 2], "weight": [1.0, 2.0, 3.0, 4.0]})
    whole = from_tables(edges, nodes, verbose=False)
    nodes.set_index("id").to_parquet(tmp_path / "n.parquet")
    paper = nodes.rename(columns={"id": "paper"}).set_index("paper")  # named unlike ids: nobody else can be them
    for table in (nodes.set_index("id"), tmp_path / "n.parquet", paper):
        found = from_tables(edges, table, verbose=False)
        assert list(found.mapping.to_raw(range(3))) == list(whole.mapping.to_raw(range(3)))
        assert found.ndata["x"].tolist() == whole.ndata["x"].tolist()
        assert found.ndata["y"].tolist() == whole.ndata["y"].tolist()
    assert from_tables(edges, paper, id=0, verbose=False).mapping.to_raw([0]) == [0]  # positions are of columns
    for table in (edges.groupby(["source", "target"]).sum(), edges.set_index("source"), edges.set_index("target")):
        found, order = from_tables(table, nodes, verbose=False), from_tables(edges, nodes, verbose=False)
        pairs = [sorted(zip(*(end.tolist() for end in g.coo()[:2]), g.edata["edge_weight"].tolist(), strict=True))
                 for g in (found, order)]  # fmt: skip
        assert pairs[0] == pairs[1]
