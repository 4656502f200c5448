"""With ``JOESTAR_REAL_CAPTURES=kinds`` the first program of every kind is captured in the real way, and compared."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kinds
import pytest
import torch
from captures import Real, cheaper, quick, real
from torch import nn
from torch.nn.functional import cross_entropy

import joestar
from joestar import fn
from joestar.runtime import traced as traced_module
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph

pytestmark = pytest.mark.fuzz  # these test what other tests are made with

IDX = torch.arange(0, 9, dtype=torch.int32)
LABELS = ["slice", "sample", "compact"]


@pytest.fixture(scope="module")
def graph():
    return planted_graph(nodes=400, dtype=torch.float64)


@pytest.fixture(autouse=True)
def notes(monkeypatch, tmp_path):
    """Empty ones."""
    monkeypatch.setattr(kinds, "_notes", {})
    monkeypatch.setattr(kinds, "_captured", set())
    monkeypatch.setattr(kinds, "_left_out", set())
    monkeypatch.setattr(kinds, "NOTES", tmp_path)
    monkeypatch.setattr(kinds, "sources", lambda: "these")


def trace(how, graph, **options):
    step = make_step(graph=graph, model_options={"dropout": 0.5, **options})
    with cheaper(how):
        step._runner.executor.program.trace(IDX, torch.zeros(3, dtype=torch.int64))


def both(graph, monkeypatch) -> list:
    """The quick and the real capture of one program, and of no other."""
    return both_of(make_step(graph=graph, fanouts=[3, 3], model_options={"dropout": 0.5}), LABELS * 2, monkeypatch)


def both_of(step, labels, monkeypatch) -> list:
    monkeypatch.delenv("JOESTAR_REAL_CAPTURES", raising=False)
    program = step._runner.executor.program
    program.model.train()
    return [how(program, IDX, labels) for how in (quick, real)]


def _scaled(gm):
    node = next(node for node in gm.graph.nodes if "dropout" in str(node.target))
    node.args = (node.args[0], 0.25, *node.args[2:])


def _crossed(gm):
    first, second = [node for node in gm.graph.nodes if "linear" in str(node.target)][:2]
    first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])


def _written(gm):
    nodes = list(gm.graph.nodes)
    with gm.graph.inserting_before(nodes[-1]):
        gm.graph.call_function(torch.ops.aten.add_.Tensor, (gm.graph.find_nodes(op="placeholder")[-1], 1))


@pytest.mark.parametrize("change", [_scaled, _crossed, _written])
def test_a_quick_trace_that_differs_is_found(change, graph, monkeypatch):
    made = both(graph, monkeypatch)
    kinds.check_same(*made)
    change(made[0].gm)
    with pytest.raises(AssertionError, match=r"(?s)is not what the capture gives.*quick: "):
        kinds.check_same(*made)


def test_the_first_of_a_kind_is_captured_in_the_real_way(graph, monkeypatch):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "kinds")
    calls, capture = [], traced_module.capture
    monkeypatch.setattr(traced_module, "capture", lambda *args, **kw: calls.append(1) or capture(*args, **kw))
    counts = []
    for options in ({}, {"out_channels": 6}, {"dropout": 0.0}, {"dropout": 0.25}, {"norm": "batch_norm"}):
        trace(quick, graph, **options)
        counts.append(len(calls))
    assert counts == [1, 1, 2, 2, 3]


class Looped(nn.Module):
    """Its edges, whose number is a sum, are counted."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)

    def forward(self, blocks, x):
        block, h = blocks[0].add_self_loops(), self.first(x)
        return block.pull(fn.copy_e(block.apply_edges(fn.copy_u(h)).exp()), "sum")


def test_sizes_are_the_same_however_they_are_computed(graph, monkeypatch):
    net, sampler = Looped().double(), joestar.NeighborSampler(graph, [3])
    step = joestar.compile(net, sampler, cross_entropy, torch.optim.SGD(net.parameters()), backend="eager")
    made = both_of(step, LABELS, monkeypatch)
    kinds.check_same(*made)
    assert [len(ways) for ways in map(sums, made)] == [0, 1]
    (edges,) = [node for node in made[1].gm.graph.nodes if "arange" in str(node.target)]
    edges.args = (made[1].gm.graph.find_nodes(op="placeholder")[0], *edges.args[1:])
    with pytest.raises(AssertionError, match="is not what the capture gives"):
        kinds.check_same(*made)


def sums(made):
    return [node for node in made.gm.graph.nodes if node.target is torch.sym_sum]


def test_weights_of_recurrent_modules_are_their_own_behind_a_trace(graph, monkeypatch):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "kinds")
    trace(quick, graph, jk="lstm")  # and then in the real way, which refuses modules that change


def test_tests_that_bring_no_kind_are_left_out(monkeypatch):
    kinds._notes.update({"first": {"a", "b"}, "second": {"b"}, "third": {"c"}, "failed": {"a"}})
    kinds.keep({"first", "second", "third", "without programs"})
    items = [SimpleNamespace(nodeid=name) for name in ("first", "second", "third", "failed", "without programs", "new")]
    assert [item.nodeid for item in kinds.without_twins(items)] == ["first", "third", "failed", "new"]
    monkeypatch.setattr(kinds, "sources", lambda: "others")
    assert kinds.without_twins(items) == items


class Counted(nn.Module):
    """Python's ``len`` gives a number, which a quick trace cannot follow."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)

    def forward(self, blocks, x):
        return blocks[0].pull(fn.copy_u(self.first(x) / len(x)), "mean")


def test_what_was_captured_in_the_real_way_anyway_is_of_no_kind(graph, monkeypatch):
    net, sampler = Counted().double(), joestar.NeighborSampler(graph, [3])
    step = joestar.compile(net, sampler, cross_entropy, torch.optim.SGD(net.parameters()), backend="eager")
    program = step._runner.executor.program
    assert isinstance(quick(program, IDX, LABELS), Real)
    calls, capture = [], traced_module.capture
    monkeypatch.setattr(traced_module, "capture", lambda *args, **kw: calls.append(1) or capture(*args, **kw))
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "kinds")
    with cheaper(quick):
        program.trace(IDX, torch.zeros(3, dtype=torch.int64))
    assert len(calls) == 1 and kinds.found() == ([], [])


def test_kinds_that_nobody_captured_are_missing(graph, monkeypatch):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "kinds")
    trace(quick, graph)
    (kind,), captured = kinds.found()
    assert captured == [kind] and not kinds.missing([kinds.found(), kinds.found()])
    kinds._notes.update({"first": {kind, "a"}, "second": {"a"}})
    kinds.keep({"first", "second"})
    kinds._notes.clear()
    kinds.without_twins([SimpleNamespace(nodeid=name) for name in ("first", "second")])
    assert kinds.found() == (["a"], [kind])
    assert kinds.missing([kinds.found(), ([], [])]) == {"a"} and not kinds.missing([kinds.found(), (["a"], ["a"])])
    assert kinds.tests_of({"a"}) == ["first", "second"]


def test_a_difference_that_a_test_does_not_see_leaves_the_kind_missing(graph, monkeypatch):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "kinds")
    plant(monkeypatch)
    for _ in range(2):  # each of them is compared
        with pytest.raises(AssertionError, match="is not what the capture gives"):
            trace(quick, graph)
    assert len(kinds.missing([kinds.found()])) == 1


def plant(monkeypatch):
    """Real captures of another dropout."""
    capture = traced_module.capture

    def other(*args, **options):
        made = capture(*args, **options)
        _scaled(made.gm)
        return made

    monkeypatch.setattr(traced_module, "capture", other)


SETTING = """
import contextlib, os, pathlib, kinds, pytest, test_kinds

kinds.NOTES, kinds.sources = pathlib.Path(__file__).parent / "notes", lambda: "these"

@pytest.fixture(autouse=True)
def planted(monkeypatch):
    if "PLANTED" not in os.environ:
        yield
        return
    test_kinds.plant(monkeypatch)
    compared = kinds.compared
    def silent(names, made, really):  # as if the test expected whatever is raised
        with contextlib.suppress(AssertionError):
            return compared(names, made, really)
        return made
    monkeypatch.setattr(kinds, "compared", silent)
    yield
"""
TESTS = """
import pytest, test_kinds
from test_kinds import make_step, planted_graph, IDX

@pytest.mark.parametrize("again", range(4))
def test_same(quick_captures, again):
    make_step(graph=planted_graph(nodes=400))._runner.executor.program.trace(IDX, test_kinds.torch.zeros(3).long())
"""


@pytest.mark.fuzz
def test_whole_runs_find_a_difference_that_no_test_sees(tmp_path):
    tests = Path(__file__).parent
    for name, text in {"conftest.py": SETTING, "test_some.py": TESTS, "pytest.ini": "[pytest]\n"}.items():
        (tmp_path / name).write_text(text)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "JOESTAR_"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])

    def run(*options, **variables):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=clean | variables, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, told = run()
    assert code == 0 and "4 passed" in told, told
    code, told = run(JOESTAR_REAL_CAPTURES="kinds")
    assert code == 0 and "1 passed" in told, told
    code, told = run(JOESTAR_REAL_CAPTURES="fuzz")
    assert code == 0 and "4 passed" in told, told
    code, told = run("-n", "2", JOESTAR_REAL_CAPTURES="kinds", PLANTED="1")
    assert code == 1 and "1 passed" in told and "Nobody captured in the real way" in told, told
    assert "test_some.py::test_same[3]" in told


def test_a_word_chooses_a_part_of_the_tests():
    """Another one otherwise: of twenty words in a row hardly any test is left out by all."""
    from tests.conftest import in_part

    names = [f"tests/some/test_some.py::test_some[{n}]" for n in range(2000)]
    parts = [{name for name in names if in_part(name, f"4:{word}")} for word in "abcdefghijklmnopqrst"]
    assert all(430 < len(part) < 570 for part in parts)
    assert all(80 < len(one & other) < 170 for one, other in itertools.pairwise(parts))
    assert len(set().union(*parts)) > 1980
    assert {name for name in names if in_part(name, "1:a")} == set(names)
