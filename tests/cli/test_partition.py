"""``joestar partition``: a table, JSON, and a file that training reads."""

import json

import pytest
from typer.testing import CliRunner

import joestar
from joestar.cli import partition
from joestar.cli.main import app
from joestar.cli.partition import _others


def invoke(*arguments, width=80):
    return CliRunner().invoke(
        app, ["partition", *map(str, arguments)], env={"COLUMNS": str(width), "TERM": "dumb", "NO_COLOR": "1"}
    )


def test_table_and_file(tmp_path):
    file = tmp_path / "p.npz"
    shown = invoke("cora", "--parts", 16, "--passes", 3, "--out", file, "--compare", "random")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert "2,708 nodes, 10,556 edges, 16 parts" in lines[0]
    assert lines[1].split()[:3] == ["method", "edges", "cut"]
    assert [line.split()[0] for line in lines[2:4]] == ["gap", "random"]
    assert max(len(line) for line in lines[:4]) <= 80
    found = joestar.Partitioning.load(file, joestar.load("cora", verbose=False))
    assert found.parts == 16 and found.settings["passes"] == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_parts_are_kept_whatever_becomes_of_comparisons(tmp_path, monkeypatch, error):
    measured = partition._measured

    def fails(graph, parts, method, settings):
        if method == "random":
            raise error("while METIS or another divides")
        return measured(graph, parts, method, settings)

    monkeypatch.setattr(partition, "_measured", fails)
    file = tmp_path / "p.npz"
    assert invoke("cora", "--parts", 4, "--passes", 1, "--out", file, "--compare", "random").exit_code
    assert joestar.Partitioning.load(file).parts == 4


def test_json(tmp_path):
    shown = invoke("cora", "--parts", 8, "--passes", 2, "--method", "random", "--compare", "gap", "--json")
    facts = json.loads(shown.output)
    chance, gap = facts["methods"]
    assert (facts["parts"], facts["file"], chance["method"], gap["method"]) == (8, None, "random", "gap")
    assert gap["least_skew"] <= gap["skew"] < chance["skew"] and gap["excess"] < chance["excess"]
    assert gap["cut"] < chance["cut"] and gap["halo_mean"] < chance["halo_mean"]


def test_metis_is_shown_unasked_where_it_is_cheap(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert _others(None, "gap", 10**6) == ["random", "metis"]
    assert _others(None, "gap", 10**9) == ["random"]
    assert _others("metis,gap", "gap", 10**9) == ["metis"]
    assert _others("none", "gap", 5) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cora", "--parts", "2709"), "parts: expected a whole number from 1 to the 2,708 nodes"),
        (("cora", "--method", "spectral"), "expected one of gap, random, metis"),
        (("cora", "--compare", "all"), "--compare: expected some of"),
        (("cora", "--out", "/nowhere/p.npz"), "--out"),
        (("nothing.npz",), "nothing.npz"),
        (("cora", "--seed", "-1"), "--seed"),
        (("cora", "--seed", "99999999999999999999"), "--seed"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, says):
    shown = invoke(*arguments, width=300)
    assert shown.exit_code == 2
    assert says in " ".join(shown.output.split())
