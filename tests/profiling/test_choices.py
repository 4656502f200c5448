"""Choices on disk: pinned files, the tuner's cache, and the facts behind its keys."""

import json
import threading
from pathlib import Path

import pytest
import torch
from captures import cheaper, real
from torch import fx

import joestar
from joestar.errors import ConfigError
from joestar.profile import choices
from joestar.profile.choices import Found, Pinned, cache_key, choices_folder, pinned, recall, remember, save
from joestar.profile.facts import graph_facts, program_hash
from joestar.profile.ledger import CandidateRecord, TuningRecord
from joestar.store import bandwidth

from . import full

pytestmark = pytest.mark.usefixtures("cheapest_captures")

FOUND = Found(
    {"order:a": "update-first"}, 0.01,
    [CandidateRecord({}, 0.03, 2.0, 1.5, False), CandidateRecord({"order:a": "update-first"}, 0.01, 1.0, None, True)],
)  # fmt: skip
FACTS = {"graph": {"nodes": 3}, "torch": "2.13"}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    return tmp_path / "choices"


# --- pinned files ---


def test_round_trip(tmp_path):
    save(tmp_path / "pins.json", {"order:a": "left", "backward:hop0": "scatter"}, 0.1)
    assert pinned(tmp_path / "pins.json") == Pinned({"backward:hop0": "scatter", "order:a": "left"}, 0.1)
    assert pinned(str(tmp_path / "pins.json")).slack == 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["pins.json"], "nothing is left beside the file"


def test_what_compile_is_given():
    assert pinned(None) == Pinned()
    assert pinned({"order:a": "left"}) == Pinned({"order:a": "left"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a file of format 1; got 'list'"),
        ('{"format": 7}', "must be a file of format 1; got 7"),
        ('{"format": 1}', "must map 'kind:name' to an option"),
        ('{"format": 1, "choices": {"order:a": 3}}', "both strings"),
        ('{"format": 1, "choices": {}, "slack": -1}', "must be a number of at least 0; got -1"),
        ('{"format": 1, "choices": {}, "slack": true}', "must be a number of at least 0; got True"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    (tmp_path / "pins.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        pinned(tmp_path / "pins.json")


def test_unusable_paths_and_types(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read \(No such file.*save_choices"):
        pinned(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "missing" / "pins.json", {}, 0.0)
    with pytest.raises(ConfigError, match=r"choices must be a mapping .* or the path of a file; got int"):
        pinned(3)
    with pytest.raises(ConfigError, match="both strings"):
        pinned({"order:a": None})


# --- the cache ---


def test_what_is_remembered_is_recalled(cache):
    key = cache_key(FACTS)
    assert recall(key) is None
    remember(key, FOUND, FACTS)
    assert recall(key) == FOUND
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["facts"] == FACTS, "people can read what a file is about"


def test_every_fact_changes_the_key():
    keys = {cache_key(f) for f in (FACTS, {**FACTS, "torch": "2.14"}, {"graph": {"nodes": 4}, "torch": "2.13"})}
    assert len(keys) == 3
    assert cache_key(dict(reversed(FACTS.items()))) == cache_key(FACTS)


def test_other_sources_are_another_key(monkeypatch):
    """Times of other kernels and passes say nothing, whatever the version is called."""
    before = cache_key(FACTS)
    monkeypatch.setattr(choices, "source_digest", lambda: "of the changed sources")
    assert cache_key(FACTS) != before


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"format": 0}', '{"format": 1}',
             '{"format": 1, "choices": [], "slack": 0.1, "candidates": []}',
             '{"format": 1, "choices": {}, "slack": "a", "candidates": []}',
             '{"format": 1, "choices": {}, "slack": 0.1, "candidates": [{"slack": 1}]}'],
)  # fmt: skip
def test_a_damaged_file_is_no_result(cache, text):
    cache.mkdir()
    (cache / f"{cache_key(FACTS)}.json").write_text(text)
    assert recall(cache_key(FACTS)) is None
    remember(cache_key(FACTS), FOUND, FACTS)
    assert recall(cache_key(FACTS)) == FOUND


def _others(value):
    """What may stand there in a damaged file."""
    kinds = [None, True, -1, float("nan"), "x", [], [1], {}, {"order:a": 1}, 1e300, 10**400]
    return [each for each in kinds if each != value and not (isinstance(value, dict) and each == {})]


@pytest.mark.parametrize("where", ["found", "first", "winner"])
def test_a_damaged_value_is_no_result_or_breaks_nothing(cache, where):
    """It broke the step, or its report, later."""
    remember(cache_key(FACTS), FOUND, FACTS)
    path, report = cache / f"{cache_key(FACTS)}.json", full.report()
    text, refused = path.read_text(), 0
    for name in ("choices", "slack", "candidates", "eager_ms", "compiled_ms", "taken"):
        for other in (None, True, -1, float("nan"), "x", [], [1], {"order:a": 1}, {"order:b": "x"}, 1e300, 10**400):
            content = json.loads(text)
            part = content if where == "found" else content["candidates"][where == "winner"]
            if name not in part or part[name] == other:
                continue
            part[name] = other
            path.write_text(json.dumps(content))
            found = recall(cache_key(FACTS))
            refused += found is None
            if found is not None:
                assert (found.choices, found.slack) == (FOUND.choices, FOUND.slack)
                report.tuning = TuningRecord(found.candidates, 1.0, True, "key")
                assert str(report) and report.to_html()
    assert refused > 20


def test_a_file_that_nests_too_deeply_is_no_result(cache, tmp_path):
    cache.mkdir()
    (cache / f"{cache_key(FACTS)}.json").write_text("[" * 100_000)
    assert recall(cache_key(FACTS)) is None
    with pytest.raises(ConfigError, match="is no JSON"):
        pinned(cache / f"{cache_key(FACTS)}.json")


def test_a_folder_that_cannot_be_written_is_no_error(cache):
    cache.write_text("a file where the folder should be")
    remember("key", FOUND, FACTS)
    assert recall("key") is None


def test_writers_at_the_same_time_leave_one_whole_file(cache):
    def write(number: int) -> None:
        for _ in range(20):
            won = CandidateRecord({"order:a": str(number)}, 0.0, 1.0, 1.0, True)
            remember("key", Found(won.choices, won.slack, [won]), FACTS)
            assert recall("key") is not None

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recall("key").choices["order:a"] in "0123"
    assert [path.name for path in cache.iterdir()] == ["key.json"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("JOESTAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert choices_folder() == tmp_path / "xdg" / "joestar" / "choices"
    monkeypatch.setenv("JOESTAR_CACHE", "")
    assert choices_folder() == tmp_path / "xdg" / "joestar" / "choices"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert bandwidth.file() == tmp_path / ".cache" / "joestar" / "bandwidth.json"
    assert choices_folder() == tmp_path / ".cache" / "joestar" / "choices"


# --- facts ---


def test_facts_of_a_graph():
    edges = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 1, 1, 1, 2, 0]])
    graph = joestar.Graph.from_edge_index(edges, 4, {"x": torch.zeros(4, 3), "y": torch.zeros(4, dtype=torch.int64)})
    facts = graph_facts(graph)
    assert (facts["nodes"], facts["edges"]) == (4, 6)
    assert facts["degrees"] == [0, 1, 1, 1, 4, 4, 4] or facts["degrees"][0::6] == [0, 4]
    assert facts["data"] == {"ndata.x": ["torch.float32", 4, 3], "ndata.y": ["torch.int64", 4]}
    json.dumps(facts)
    other = joestar.Graph.from_edge_index(edges.flip(0), 4, dict(graph.ndata))
    assert graph_facts(other) != facts


def program(prefix: str, size: str, slope: float = 0.1, width: int = 3) -> fx.Graph:
    """A graph whose values have the symbolic size ``size``."""

    class Size:
        def __repr__(self):
            return size

    graph = fx.Graph()
    x = graph.placeholder(f"{prefix}_x")
    y = graph.create_node("call_function", torch.ops.aten.leaky_relu.default, (x, slope), name=f"{prefix}_y")
    x.meta["val"], y.meta["val"] = torch.empty(2, width), Size()
    graph.output((y,))
    return graph


def test_the_hash_of_a_program_ignores_names():
    base = program_hash(program("a", "s43"))
    assert program_hash(program("b", "s7")) == base
    assert program_hash(program("a", "s43 + 1")) != base
    assert program_hash(program("a", "s43", slope=0.2)) != base
    assert program_hash(program("a", "s43", width=4)) != base


@pytest.mark.fuzz
def test_captured_programs_of_other_widths_differ():
    from lowering.harness import NUM_FEATURES, Case

    hashes = []
    for width in (8, 8, 9):
        case = Case(joestar.nn.GraphSAGE(NUM_FEATURES, width, 2, 4), fanouts=(3, 2))
        with cheaper(real):  # a quick graph has its inputs in another order
            case.trace()
        hashes.append(program_hash(case.program.lowered))
    assert hashes[0] == hashes[1] != hashes[2]
