"""The cheaper captures of tests are captures: the same ops and numbers, and no other program is taken for a twin."""

import os
from pathlib import Path
from types import SimpleNamespace

import captures
import pytest
import torch
import torch.nn.functional as F
from captures import UnknownError, cheaper, cheapest, described, quick, shared
from torch import nn

from joestar import fn
from joestar.errors import CaptureError
from joestar.runtime import traced as traced_module
from joestar.runtime.traced import TracedProgram
from joestar.store import FeatureStore
from tests.runtime.common import FEATURES, make_step, planted_graph, train

pytestmark = pytest.mark.fuzz  # these test what other tests are made with

IDX = torch.arange(0, 130)


@pytest.fixture
def captured(monkeypatch):
    """Origins of everything that TorchDynamo captures."""
    monkeypatch.delenv("JOESTAR_REAL_CAPTURES", raising=False)
    made, capture = [], traced_module.capture

    def noted(*args, **options):
        made.append(options["origin"])
        return capture(*args, **options)

    monkeypatch.setattr(traced_module, "capture", noted)
    return made


@pytest.fixture(scope="module")
def graph():
    return planted_graph(nodes=400, dtype=torch.float64)


def test_a_twin_takes_the_capture_and_its_own_tensors(captured, graph):
    options = {"model_options": {"norm": "batch_norm"}, "fanouts": [4, 3]}
    expected = train(make_step(graph=graph, seed=5, **options), IDX, 60)
    with cheaper(shared):
        make_step(graph=planted_graph(1, 400, dtype=torch.float64), seed=1, **options)(IDX[:9])
        before = len(captured)
        assert train(make_step(graph=graph, seed=5, **options), IDX, 60) == expected
        assert len(captured) == before


def scaled(z, y, factor):
    return F.cross_entropy(z * factor, y)


def by(factor):
    return lambda z, y: scaled(z, y, factor)


OTHERS = {
    "width": {"model_options": {"out_channels": 5}}, "dropout": {"model_options": {"dropout": 0.1}},
    "fanouts": {"fanouts": [3, 3]}, "model": {"model": "GIN"}, "loss": {"loss": by(2.0)}, "factor": {"loss": by(3.0)},
    "dtype": {"graph": planted_graph(nodes=400)},
}  # fmt: skip


def key_of(step) -> tuple:
    return described(step._runner.executor.program, IDX.int(), ["slice", "compact"])[1]


def test_what_differs_is_no_twin(graph):
    options = [{}, *OTHERS.values()]
    keys = [[key_of(make_step(**{"graph": graph, "fanouts": [2, 3], **other})) for other in options] for _ in range(2)]
    assert keys[0] == keys[1] and len(set(keys[0])) == len(options)
    frozen = make_step(graph=graph, fanouts=[2, 3])
    frozen.model.convs[0].eval()
    fixed = make_step(graph=graph, fanouts=[2, 3])
    fixed.model.convs[0].lin_l.weight.requires_grad_(False)
    assert len({*keys[0], key_of(frozen), key_of(fixed)}) == len(options) + 2


def test_what_cannot_be_described_has_no_twin(graph):
    unknown, hooked = make_step(graph=graph), make_step(graph=graph)
    unknown.model.other = object()
    hooked.model.register_forward_hook(lambda *args: None)
    for step in (unknown, hooked):
        with pytest.raises(UnknownError):
            key_of(step)


class Ranked(nn.Module):
    """Its Python reads the number of rows as a number."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)

    def forward(self, blocks, x):
        (block,) = blocks
        h = self.first(block.pull(fn.copy_u(x), "mean"))
        return h * 2 if int(block.num_src) > 10 else h


@pytest.mark.parametrize("model", ["GraphSAGE", "GAT"])
def test_a_quick_trace_is_a_capture(model, captured, graph):
    def ops(step):
        program = step._runner.executor.program
        program.trace(IDX[:9].int(), torch.zeros(3, dtype=torch.int64))
        return sorted(str(node.target) for node in program.captured.gm.graph.nodes if node.op == "call_function")

    options = {"model": model, "graph": graph, "model_options": {"norm": "batch_norm"}}
    real, traced = make_step(**options), make_step(**options)
    expected = ops(real)
    with cheaper(quick):
        assert ops(traced) == expected and len(captured) == 1
    assert train(traced, IDX, 60, 1) == pytest.approx(train(real, IDX, 60, 1), rel=1e-9)


def test_what_cannot_be_traced_quickly_is_captured(captured, graph):
    import joestar

    net = Ranked().double()
    with cheaper(quick):
        step = joestar.compile(net, joestar.NeighborSampler(graph, [3]), backend="eager")
        with pytest.raises(CaptureError, match=r"holds only for some sizes|test_captures"):
            step(IDX[:9])
    assert captured == ["Ranked with NeighborSampler"]


def test_every_capture_can_be_real(monkeypatch):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "1")
    capture = TracedProgram._capture
    for how in (shared, quick):
        with cheaper(how):
            assert TracedProgram._capture is capture


@pytest.mark.parametrize("how", [quick, cheapest, shared])
def test_every_capture_can_be_real_but_for_twins(how, monkeypatch, captured):
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "shared")
    monkeypatch.setattr(captures, "_MADE", {})
    with cheaper(how):
        for seed in range(2):
            make_step(graph=planted_graph(seed, 400))(IDX[:9])
        assert len(captured) == 1
        with cheaper(captures.real):
            make_step(graph=planted_graph(nodes=400))(IDX[:9])
    assert len(captured) == 2


def test_rows_that_come_from_a_store_are_traced_as_such(captured):
    graph, stored = planted_graph(nodes=400), planted_graph(nodes=400)
    stored.ndata["x"] = FeatureStore(stored.ndata["x"], "cpu", hot=torch.tensor([5, 3]))
    with cheaper(cheapest):
        make_step(graph=graph)(IDX[:9])  # no twin
        step = make_step(graph=stored)
        step(IDX[:9])
    assert not captured
    assert "gather_rows" in step.report().programs[0].graph_before


@pytest.fixture
def conftest(request):
    """Of all tests; folders have others, of the same name."""
    return next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "longest_first"))


def test_marked_tests_have_real_captures_in_make_fuzz(conftest, monkeypatch):
    """``conftest.pytest_runtest_protocol``: only while they run."""
    monkeypatch.setenv("JOESTAR_REAL_CAPTURES", "fuzz")
    for marks, expected in (["quick"], "kinds"), (["quick", "fuzz"], "shared"), (["fuzz"], "fuzz"):
        item = SimpleNamespace(get_closest_marker=marks.__contains__)
        protocol = conftest.pytest_runtest_protocol(item)
        next(protocol)
        assert os.environ["JOESTAR_REAL_CAPTURES"] == expected
        assert next(protocol, None) is None and os.environ["JOESTAR_REAL_CAPTURES"] == "fuzz"


def test_every_worker_begins_with_what_takes_long(conftest):
    """Shards of the fuzzer, and tests that are marked."""

    def item(name, fixtures=(), marks=()):
        found = {mark: mark for mark in marks}
        return SimpleNamespace(path=Path(name), fixturenames=fixtures, get_closest_marker=found.get)

    shards = [
        item("test_fuzz.py", ["shard"]),
        item("test_gpu.py", (), ["gpu", "long"]),
        item("test_fuzz.py", ["shard"]),
    ]
    others = [item("test_other.py", (), ["gpu"]) for _ in range(10)]
    ordered = conftest.longest_first([*others[:4], *shards, *others[4:]], 2)
    first, second = ordered[:7], ordered[7:]
    assert [each for each in first if each in shards] == first[:2] and second[0] is shards[1]
    assert sorted(map(id, ordered)) == sorted(map(id, shards + others))
    assert [each for each in ordered if each in others] == others
