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
@pytest.mark.parametrize("columns", [None, (0, 1), ("source", "target")])
def test_convert_leaves_it_out(tmp_path, capsys, form, columns):
    source = written(EDGES, tmp_path / "edges", form)
    graph = joestar.load(convert(source, tmp_path / "graph", columns=columns, **(QUIET | {"verbose": True})))
    src, dst, _ = graph.coo()
    assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == [(0, 1), (1, 3), (3, 4)]
    said = capsys.readouterr().err
    name = "__index_level_0__" if form == "parquet" else "one without a name"
    assert "not converted" in said and name in said and "weight" in said
