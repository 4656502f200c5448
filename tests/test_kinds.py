"""With ``JOESTAR_REAL_CAPTURES=kinds`` the first program of every kind is captured in the real way, and compared."""

from types import SimpleNamespace

import kinds
import pytest
import torch
from captures import cheaper, quick, real

from joestar.runtime import program as program_module
from tests.runtime.common import make_step, planted_graph

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
    monkeypatch.setattr(kinds, "NOTES", tmp_path)
    monkeypatch.setattr(kinds, "sources", lambda: "these")


def trace(how, graph, **options):
    step = make_step(graph=graph, model_options={"dropout": 0.5, **options})
    with cheaper(how):
        step._runner.executor.program.trace(IDX, torch.zeros(3, dtype=torch.int64))


def both(graph, monkeypatch) -> list:
    """The quick and the real capture of one program, and of no other."""
    monkeypatch.delenv("JOESTAR_REAL_CAPTURES", raising=False)
    program = make_step(graph=graph, fanouts=[3, 3], model_options={"dropout": 0.5})._runner.executor.program
    program.model.train()
    return [how(program, IDX, LABELS * 2) for how in (quick, real)]


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
    calls, capture = [], program_module.capture
    monkeypatch.setattr(program_module, "capture", lambda *args, **kw: calls.append(1) or capture(*args, **kw))
    counts = []
    for options in ({}, {"out_channels": 6}, {"dropout": 0.0}, {"dropout": 0.25}, {"norm": "batch_norm"}):
        trace(quick, graph, **options)
        counts.append(len(calls))
    assert counts == [1, 1, 2, 2, 3]


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
