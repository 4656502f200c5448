"""With ``prefetch=True`` a loop sees the same bits as without, whatever happens between two steps."""

import numpy as np
import pytest
import torch

import joestar
from joestar.errors import ConfigError, JoestarWarning
from joestar.runtime import prefetch
from joestar.staged import Planner
from tests.runtime.common import make_step, planted_graph, tight_bounds, train
from tests.runtime.prefetch_loops import IDX, LOOPS, both, evaluating, graph_of, other_steps, plainly

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("store", [False, True], ids=["resident", "store"])
@pytest.mark.each("loop")
def test_a_loop_sees_the_same_bits(loop, store, monkeypatch):
    ours = both(loop, monkeypatch, store=store, early=store)
    if loop is plainly:
        assert ours.prefetched == ours.steps - 2  # all but the first of every epoch


OPTIONS = {
    "groups": {"accumulate": 3, "clip_grad_norm": 0.05}, "average": {"ema": 0.9, "clip_grad_value": 0.01},
    "scale": {"loss_scale": {"initial": 8.0, "interval": 2}}, "norm": {"model_options": {"norm": "batch_norm"}},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)}, "gat": {"model": "GAT"},
    "gcn": {"model": "GCN"}, "plain passes": {"disable_passes": ("sample-gather-aggregate", "extract-select")},
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name, monkeypatch):
    both(other_steps, monkeypatch, early=name in ("groups", "norm"), **OPTIONS[name])


@pytest.mark.every(2)
@pytest.mark.parametrize("patience", [1000, 2])
@pytest.mark.parametrize("early", [False, True])
def test_overflows_are_redone_and_widen_the_bounds(monkeypatch, patience, early):
    tight_bounds(monkeypatch, 1.0)
    ours = both(evaluating, monkeypatch, early=early, patience=patience, model_options={"norm": "batch_norm"})
    assert ours.fallbacks > 1


@pytest.mark.fuzz
def test_compiled_by_inductor(monkeypatch):
    both(plainly, monkeypatch, backend="inductor", store=True)


def test_an_error_while_the_next_batch_is_made_is_that_of_its_own_step(monkeypatch):
    step, real, calls = make_step(prefetch=True), prefetch.read, []

    def read(program, state, key):
        calls.append(int(key[2]))
        if int(key[2]) == 3:
            raise IndexError("no such row")
        return real(program, state, key)

    monkeypatch.setattr(prefetch, "read", read)
    epoch = step.epoch(IDX, 100)
    assert [next(epoch).item() > 0 for _ in range(3)] == [True] * 3 and calls == [0, 1, 2, 3]
    with pytest.raises(IndexError, match="no such row"):
        next(epoch)
    assert epoch.position == 3 and calls == [0, 1, 2, 3, 3]


def test_writes_that_are_not_counted_come_a_step_late_and_no_later():
    """What the docstring says of NumPy; and that a new epoch has them."""
    found = {}
    for ahead in (False, True):
        step = make_step(prefetch=ahead)
        epoch = step.epoch(IDX, 365)
        next(epoch)
        np.asarray(step.graph.ndata["x"])[:] *= 2
        found[ahead] = [next(epoch).item()]
        step = make_step(prefetch=ahead)
        list(step.epoch(IDX, 365))
        np.asarray(step.graph.ndata["x"])[:] *= 2
        found[ahead] += [loss.item() for loss in step.epoch(IDX, 365)]
    assert found[True][0] != found[False][0] and found[True][1:] == found[False][1:]


def test_a_sampler_that_follows_the_model_is_told_once():
    graph = planted_graph(dtype=torch.float64)
    model = joestar.nn.GraphSAGE(12, 16, 1, out_channels=4).double()
    model.register_buffer("seen", torch.ones(graph.num_edges))
    sampler = joestar.NeighborSampler(graph, [3], probs=model.seen)
    step = joestar.compile(model, sampler, torch.nn.functional.cross_entropy,
                           torch.optim.Adam(model.parameters()), backend="eager", prefetch=True)  # fmt: skip
    with pytest.warns(JoestarWarning, match="no effect on this step.*depends on model.seen"):
        losses = train(step, IDX)
    assert len(losses) == 16 and step.counters.prefetched == 0


def test_the_report_says_what_was_made_a_step_early():
    step = make_step(prefetch=True, graph=graph_of(store=True))
    train(step, IDX)
    text = str(step.report())
    assert "prefetch: 14 steps found their samples and rows made a step early" in text
    assert "gather_rows" in next(line for line in step.explain().splitlines() if "fired   prefetch" in line)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 1}, "True or False"),
        ({"execution": "exact"}, "'padded'"),
        ({"memory": "100KiB"}, r"into memory=100.0 KiB as a whole.*a step ahead.*leave prefetch out"),
        ({"memory": "1GiB", "first_stage": joestar.LargeBatch(100)}, "leave it out"),
    ],
)
def test_what_it_does_not_go_with(options, words):
    with pytest.raises(ConfigError, match=words):
        make_step(**{"prefetch": True, **options})


def test_under_a_budget_that_holds_everything(monkeypatch):
    both(evaluating, monkeypatch, memory="1GiB", batch_size=100)


@pytest.mark.parametrize("columns", [12, 300])
@pytest.mark.parametrize("kind", ["GraphSAGE", "GAT"])
@pytest.mark.each("kind")
def test_the_plan_counts_what_is_there_twice(kind, columns):
    """At least one more batch as the front leaves it, and no more than a few; of everything, no other part changes."""
    graph = planted_graph()
    graph.ndata["x"] = torch.rand(graph.num_nodes, columns)
    model = getattr(joestar.nn, kind)(columns, 16, 2, out_channels=4)
    sampler = joestar.NeighborSampler(graph, [5, 3])
    step = joestar.compile(
        model, sampler, torch.nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), backend="eager",
        memory="1GiB", batch_size=100, prefetch=True,
    )  # fmt: skip
    epoch = step.epoch(IDX, 100)
    next(epoch)
    made = sum(tensor.nbytes for tensor in step._runner.ahead._made.made)
    parts = dict(step.plan.parts)
    assert made <= parts.pop("a step ahead") <= 8 * made
    assert parts == Planner(model, sampler, 1 << 30, batch=100).plan().parts
