"""What cannot be converted is named, and leaves nothing behind."""

import warnings

import numpy as np
import pytest

from joestar.data import text_blocks
from joestar.data.convert import convert
from joestar.data.ogb import read_table
from joestar.errors import ConfigError, DataError

from .converting import QUIET, whole_folder, write_edges
from .small import write_csv


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


def add(name, text):
    return lambda source: (source / name).write_text(text)


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
        (edit("features.npy", lambda x: x[:50]), {}, r"labels.npy: labels must be \[50\] or \[50, T\]"),
        (edit("features.npy", lambda x: x[0]), {}, r"features must be \[N, F\] with F > 0; got \[5\]"),
        (edit("labels.npy", lambda y: y - 2), {}, r"class ids must be 0..C-1.*row \d+ is -2"),
        (edit("labels.npy", lambda y: y + 10**18), {}, r"class ids must be 0..C-1; row \d+ is 1e\+18, beyond"),
        (edit("labels.npy", lambda y: y * 1e30 + 1e30), {}, r"class ids must be 0..C-1; row \d+ is .*, beyond"),
        (edit("labels.npy", lambda y: y / 2), {}, r"class ids must be whole numbers; row \d+ is .*--task regression"),
        (edit("labels.npy", lambda y: y * np.nan), {}, "not one of the 90 nodes has a label"),
        (edit("val_idx.npy", lambda ids: ids + 89), {}, "the val split names node"),
        (edit("val_idx.npy", lambda ids: np.repeat(ids, 2)), {}, "nodes twice, for example"),
        (edit("val_idx.npy", np.float64), {}, "a split must be integer node ids"),
        (lambda source: (source / "edges.npy").unlink(), {}, "none of its files is known"),
        (add("nodes.csv", "id,f\n1,2\n"), {}, r"nodes.csv: joestar convert reads no table of nodes.*joestar.data.save"),
        (add("nodes.tsv.gz", ""), {}, r"nodes.tsv.gz: joestar convert reads no table of nodes"),
        (add("edges.csv", "0,1\n"), {}, r"expected one file of edges; found edges.npy, edges.csv. Keep one"),
        (csv("source,target\n0,1\n1,two\n"), {}, r"edges.csv: line 3, field 2: expected whole numbers; got 'two'"),
        (csv("source,target\n0,1\n1,\n"), {}, r"edges.csv: line 3, field 2: expected whole numbers; got ''"),
        (csv("source,target\n0,1\n1,2,3\n"), {}, r"edges.csv: line 3 has 3 fields, expected 2"),
        (csv("source,target\n0,1\n1,99\n"), {}, r"row 1 of the table \(about line 3\): the destination 99 is no node"),
        (csv("0,1\n1,1.5\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '1.5'"),
        (csv("0,1\n1,0x10\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '0x10'"),
        (csv("0 1\n1 0X2\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '0X2'"),
        (csv("0,1\n1,1_0\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '1_0'"),
        (csv("0,1\n1,\u0661\n"), {}, r"edges.csv: line 2, field 2: expected whole numbers; got '\u0661'"),
        (csv("0 1\n1 2 3\n"), {}, r"edges.csv: line 2 has 3 fields, expected 2"),
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


WHOLE = r"line 2, field 2: expected whole numbers; got "


@pytest.mark.parametrize("field", ["1.5", "1e0", "99999999999999999999", "nan", '"1.5"'])
@pytest.mark.parametrize("mark", [",", " ", "\t"])
def test_numbers_that_an_older_numpy_cuts_are_told(tmp_path, monkeypatch, mark, field):
    """NumPy 1.26 reads 1.5 as 1 where integers are wanted, and warns, which may be heard or not."""

    def cutting(*given, **options):
        return np.array([[0, 1], [1, 1]])

    (tmp_path / "edges.csv").write_text(f"0{mark}1\n1{mark}{field}\n")
    monkeypatch.setattr(np, "loadtxt", cutting)
    with pytest.raises(DataError, match=WHOLE):
        convert(tmp_path / "edges.csv", tmp_path / "out", **QUIET)


def test_ids_of_ogb_are_not_cut_either(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "loadtxt", lambda *given, **options: np.array([[0, 1], [1, 1]]))
    write_csv(tmp_path / "edge.csv.gz", ["0,1", "1,1.5"])
    with pytest.raises(DataError, match=WHOLE):
        read_table(tmp_path / "edge.csv.gz", np.int64)


def test_whole_numbers_of_any_form_are_read_in_one_go(tmp_path):
    block = text_blocks.Block(b"0 -1 +2\r\n\n  3\t4 000000000000000000005 \n6 7 9223372036854775807", 0, 0)
    found = text_blocks.columns_of(block, tmp_path, 3, [0, 2], " ", np.int64)
    assert [column.tolist() for column in found] == [[0, 3, 6], [2, 5, 2**63 - 1]]


@pytest.mark.parametrize("large", [10**18, 2**63 - 1, 9 * 10**18, -(2**63) + 1])
def test_long_ids_are_not_read_line_by_line(tmp_path, monkeypatch, large):
    """Ids of 19 digits were: 18 times slower."""
    monkeypatch.setattr(text_blocks, "_by_arrow", lambda *given: None)
    monkeypatch.setattr(text_blocks, "_line_by_line", lambda *given: pytest.fail("line by line"))
    block = text_blocks.Block(f"{large},1\n2,{large}\n".encode(), 0, 0)
    found = text_blocks.columns_of(block, tmp_path, 2, [0, 1], ",", np.int64)
    assert [column.tolist() for column in found] == [[large, 2], [1, large]]


@pytest.mark.parametrize("beyond", [2**63, 9_999_999_999_999_999_999, 10**19, -(2**63) - 1])
def test_ids_beyond_64_bits_are_refused(tmp_path, monkeypatch, beyond):
    monkeypatch.setattr(text_blocks, "_by_arrow", lambda *given: None)
    monkeypatch.setattr(np, "loadtxt", lambda *given, **options: pytest.fail("NumPy 1.26 rounds them"))
    block = text_blocks.Block(f"{2**63 - 1},1\n2,{beyond}\n".encode(), 0, 0)
    with pytest.raises(DataError, match=f"line 2, field 2: expected whole numbers; got '{beyond}'"):
        text_blocks.columns_of(block, tmp_path, 2, [0, 1], ",", np.int64)


def test_no_filter_of_warnings_is_touched(tmp_path, monkeypatch):
    """They are the process's: threads that each put them back left one that made errors of others' warnings."""

    def touched(*given, **options):
        raise AssertionError("filters of warnings are not for threads")

    write_csv(tmp_path / "node-label.csv.gz", ["1.5", "2"])
    block = text_blocks.Block(b"0 1\n2 3\n", 0, 0)
    with monkeypatch.context() as patched:
        for name in ("catch_warnings", "simplefilter", "filterwarnings"):
            patched.setattr(warnings, name, touched)
        pairs = text_blocks.columns_of(block, tmp_path, 2, [0, 1], " ", np.int64)
        labels = read_table(tmp_path / "node-label.csv.gz", np.float64)
    assert [side.tolist() for side in pairs] == [[0, 2], [1, 3]] and labels.tolist() == [[1.5], [2.0]]
