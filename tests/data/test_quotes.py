"""Fields in quotes: they may hold delimiters and ends of lines, wherever blocks of text end, and must be closed."""

import csv
import gzip
import io
import random

import numpy as np
import pytest

import joestar
from joestar.data import csv_reader, edge_sources, from_tables, text_blocks
from joestar.data.convert import convert
from joestar.data.structure import EdgeRules
from joestar.errors import DataError

from .converting import QUIET, assert_structure

EDGES = np.array([[0, 1, 2, 3] * 30, [1, 2, 3, 0] * 30])
NOTES = ['"one, 0x10"', '"over\n7,8,lines"', "none", '"said ""so""\nand\n\nmore"']
"""Of which a line by itself is an edge, one is empty, and one has a number that pyarrow is not asked to read."""


def table(first):
    """Text with a column of notes before or behind the ends of the edges."""
    rows = [(s, d, NOTES[i % len(NOTES)]) for i, (s, d) in enumerate(EDGES.T.tolist())]
    rows = [(note, s, d) if first else (s, d, note) for s, d, note in rows]
    names = "note,source,target\n" if first else "source,target,note\n"
    return names + "".join(f"{a},{b},{c}\n" for a, b, c in rows)


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("size", [60, 100, 4096])
@pytest.mark.parametrize("first", [True, False])
def test_blocks_end_between_rows(tmp_path, monkeypatch, arrow, size, first):
    if not arrow:
        monkeypatch.setattr(text_blocks, "_by_arrow", lambda *arguments: None)
    blocks = text_blocks.blocks
    monkeypatch.setattr(edge_sources, "blocks", lambda path, step, *at: blocks(path, size, *at))
    (tmp_path / "edges.csv").write_text(table(first))
    graph = joestar.load(convert(tmp_path / "edges.csv", tmp_path / "graph", **QUIET))
    assert_structure(graph, EDGES, 4, EdgeRules(False, False, False))


def test_quotes_that_are_no_brackets_hold_up_nothing(tmp_path):
    """A single one, as for inches: the lines behind it are read in blocks that do not grow without end."""
    text = b"".join(b'%d,%d,5" pipe\n' % (i, i + 1) if i == 3 else b"%d,%d,none\n" % (i, i + 1) for i in range(1000))
    (tmp_path / "edges.csv").write_bytes(text)
    found = list(text_blocks.blocks(tmp_path / "edges.csv", 500))
    assert b"".join(block.content for block in found) == text
    assert all(block.content.endswith(b"\n") and len(block.content) <= 3 * 500 for block in found)
    ends = [text_blocks.columns_of(block, tmp_path / "edges.csv", 3, [0, 1], ",", np.int64) for block in found]
    assert np.concatenate([sources for sources, _ in ends]).tolist() == list(range(1000))


def test_wrong_fields_are_named_in_their_own_line(tmp_path):
    (tmp_path / "edges.csv").write_text('source,target,note\n0,1,"a, b"\n1,2,"two\nlines"\nx,2,c\n')
    with pytest.raises(DataError, match=r"edges.csv: line 5, field 1: expected whole numbers; got 'x'"):
        convert(tmp_path / "edges.csv", tmp_path / "graph", **QUIET)


OPEN = ['0,1,"oops\n1,2,fine\n2,3,fine\n', '0,1,"oops\n1,2,fine\n2,3,"oops\n3,0,fine\n', '0,1,"oops']
"""To the end of the file; to where another one is opened; in the last line."""
NEVER = r"a quote that is opened in line 3 is never closed. Close it, or remove it."


@pytest.mark.parametrize("text", OPEN)
@pytest.mark.parametrize("read", ["slow", "pyarrow", "convert", "nodes"])
@pytest.mark.parametrize("end", ["csv", "csv.gz"])
def test_a_quote_that_is_left_open_does_not_swallow_rows(tmp_path, monkeypatch, text, read, end):
    path = tmp_path / f"edges.{end}"
    text = ("id,f,note\n" if read == "nodes" else "source,target,note\n") + f"3,0,fine\n{text}"
    path.write_bytes(gzip.compress(text.encode()) if end == "csv.gz" else text.encode())
    monkeypatch.setattr(csv_reader, "FAST_FROM", 1 << 30 if read == "slow" else 0)
    edges, options = ({"source": [0], "target": [0]}, {"nodes": path}) if read == "nodes" else (path, {"edge_attr": []})
    with pytest.raises(DataError, match=NEVER):
        convert(path, tmp_path / "graph", **QUIET) if read == "convert" else from_tables(edges, **options)


@pytest.mark.parametrize("delimiter", [",", "\t", " ", ";"])
def test_the_last_row_may_end_the_file(tmp_path, delimiter):
    path = tmp_path / "edges.txt"
    path.write_text(f'"source"{delimiter}"target"\n"a b"{delimiter}"c"\n"c"{delimiter}"a b"')
    graph = from_tables(path, delimiter=delimiter, verbose=False)
    assert graph.mapping.raw.tolist() == ["a b", "c"] and graph.num_edges == 2


@pytest.mark.parametrize("delimiter", ["-", "e", "\x1e"])
def test_any_character_may_be_the_delimiter(tmp_path, delimiter):
    """One that the row behind the last holds split it into fields: an edge from ``end`` to ``of``."""
    path = tmp_path / "edges.csv"
    path.write_text("a-b-1\nb-c-2\n".replace("-", delimiter))
    graph = from_tables(path, delimiter=delimiter, header=False, edge_attr=[], verbose=False)
    assert graph.mapping.raw.tolist() == ["a", "b", "c"] and graph.num_edges == 2


def ends_of_rows(text, delimiter):
    """Where lines end that are a row's last to the ``csv`` module, and no quote is open."""
    lines, ends, at = io.StringIO(text, newline="").readlines(), [0], 0
    reader = csv.reader([*lines, "the end"], delimiter=delimiter, skipinitialspace=delimiter != "\t")
    for _ in reader:
        if reader.line_num <= len(lines):
            at = len("".join(lines[: reader.line_num]))
            ends += [at] * (text[at - 1] == "\n")
    return ends


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|", "]", " "])
def test_rows_end_where_the_csv_module_says(delimiter):
    """Quotes within fields without quotes are text, doubled ones within fields in quotes, too."""
    draw, marks = random.Random(0), ['"', '"', '""', "\n", "\n", "\r\n", " ", "a", delimiter, delimiter]
    for _ in range(3000):
        text = "".join(draw.choices(marks, k=draw.randrange(1, 30)))
        found = text_blocks._Quotes(delimiter).last_end(text.encode(), 100)
        assert found == ends_of_rows(text, delimiter)[-1], text


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("size", [40, 55, 70, 4096])
def test_inches_do_not_turn_quotes_around(tmp_path, monkeypatch, arrow, size):
    """Behind one of them, what is outside of quotes was taken for what is within: blocks ended in fields."""
    if not arrow:
        monkeypatch.setattr(text_blocks, "_by_arrow", lambda *arguments: None)
    blocks = text_blocks.blocks
    monkeypatch.setattr(edge_sources, "blocks", lambda path, step, *at: blocks(path, size, *at))
    notes = ['5" pipe' if i == 3 else '"a\n7,8,b"' if i % 2 else 'a 3" by 4" box' for i in range(60)]
    text = "".join(f"{i};{i + 1};{note}\n" for i, note in enumerate(notes))
    (tmp_path / "edges.csv").write_text(f"source;target;note\n{text}")
    sources, targets, _ = joestar.load(convert(tmp_path / "edges.csv", tmp_path / "graph", **QUIET)).coo()
    assert sorted(sources.tolist()) == list(range(60)) and (targets - sources).unique().tolist() == [1]


@pytest.mark.parametrize("read", ["slow", "pyarrow", "convert"])
def test_a_quote_that_is_left_open_is_named_in_long_files(tmp_path, monkeypatch, read):
    """What is behind it is more than a field may hold: a line far behind was named, and no quote."""
    path = tmp_path / "edges.csv"
    path.write_text('source,target,note\n3,0,fine\n0,1,"oops\n' + "1,2,fine\n" * 20_000)
    monkeypatch.setattr(csv_reader, "FAST_FROM", 1 << 30 if read == "slow" else 0)
    with pytest.raises(
        DataError, match=r"a quote that is opened in line 3 is never closed, or too late \(field larger"
    ):
        convert(path, tmp_path / "graph", verbose=False) if read == "convert" else from_tables(path, edge_attr=[])


@pytest.mark.parametrize("mark", [", ", ",  ", " ", ";", "; "])
@pytest.mark.parametrize("read", ["slow", "pyarrow", "convert"])
def test_quotes_may_open_fields_behind_blanks(tmp_path, monkeypatch, mark, read):
    """To pyarrow they are text, and where blanks are the delimiter they were: lines within became edges."""
    path = tmp_path / "edges.csv"
    path.write_text('source,target,note\n0,1,"a\n7,8,b"\n1,2,c\n'.replace(",", mark))
    monkeypatch.setattr(csv_reader, "FAST_FROM", 1 << 30 if read == "slow" else 0)
    if read == "convert":
        graph = joestar.load(convert(path, tmp_path / "graph", **QUIET))
    else:
        graph = from_tables(path, edge_attr=[], verbose=False)
    assert graph.num_nodes == 3 and graph.num_edges == 2
