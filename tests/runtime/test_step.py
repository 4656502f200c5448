"""The step as a user meets it: batches, breaks, schedules, scores, reports."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real
from torch.testing import assert_close

import joestar
from joestar.errors import ConfigError, LabelError
from tests.runtime.common import CLASSES, FEATURES, NODES, make_step, planted_graph, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 730)


def test_training_learns():
    step = make_step(model_options={"dropout": 0.0})
    losses = train(step, IDX, epochs=8)
    assert losses[-1] < losses[0] / 2
    assert step.evaluate(torch.arange(730, NODES))["accuracy"] > 0.8


def test_losses_are_device_scalars_of_their_own():
    losses = list(make_step().epoch(IDX, 100))
    assert len(losses) == 8 and all(loss.dim() == 0 for loss in losses)
    assert len({loss.item() for loss in losses}) == 8


def test_break_leaves_a_consistent_state():
    broken, whole = make_step(), make_step()
    kept = []
    for position, loss in enumerate(broken.epoch(IDX, 100)):
        kept.append(loss.item())
        if position == 2:
            break
    reference = []
    for position, loss in enumerate(whole.epoch(IDX, 100)):
        reference.append(loss.item())
        if position == 2:
            for ours, theirs in zip(broken.model.parameters(), whole.model.parameters(), strict=True):
                assert torch.equal(ours, theirs)
    assert kept == reference[:3]
    assert len(train(broken, IDX, epochs=1)) == 8  # the next epoch starts afresh
    assert broken.counters.steps == 11


def test_single_steps_count_their_own_draws():
    step = make_step()
    seeds = torch.arange(50)
    first, second = step(seeds), step(seeds)
    assert first.dim() == 0 and first.item() != second.item()
    assert make_step()(seeds).item() == first.item()


def test_any_batch_size_runs_in_the_widest_program():
    step = make_step()
    train(step, IDX, batch=200, epochs=1)
    train(step, IDX, batch=64, epochs=1)
    assert step.counters.recompiles == 0
    train(step, IDX, batch=300, epochs=1)
    assert step.counters.recompiles == 1


def test_duplicate_and_isolated_seeds_are_rows_like_others():
    padded, exact = make_step(), make_step("exact")
    seeds = torch.tensor([3, 3, 0, 1, 3, 0])
    for one, other in zip(padded.epoch(seeds, 4), exact.epoch(seeds, 4), strict=True):
        assert torch.isfinite(one) and one.item() == pytest.approx(other.item(), rel=1e-12)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, mode="max"),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=24),
}


@pytest.mark.parametrize("kind", ["step", "plateau", "onecycle"])
def test_learning_rate_schedulers(kind):
    step, reference = make_step(), make_step("exact")
    for candidate in (step, reference):
        candidate.scheduler = SCHEDULERS[kind](candidate._runner.optimizer.optimizer)
        candidate.history = candidate.fit(IDX, torch.arange(730, 900), 3, 100, scheduler=candidate.scheduler)
    ours, theirs = ([r.loss for r in s.history.records] for s in (step, reference))
    assert ours == pytest.approx(theirs, rel=1e-9)
    group = step._runner.optimizer.optimizer.param_groups[0]
    assert group["lr"] != 1e-2 or kind == "plateau"


@pytest.mark.parametrize("limit", [{"clip_grad_norm": 0.05}, {"clip_grad_value": 0.01}])
def test_clipping(limit):
    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)

    clipped, exact, free = (
        make_step(optimizer=sgd, **limit),
        make_step("exact", optimizer=sgd, **limit),
        make_step(optimizer=sgd),
    )
    start = {n: p.detach().clone() for n, p in clipped.model.named_parameters()}
    ours, theirs, unclipped = (train(s, IDX, epochs=1) for s in (clipped, exact, free))
    assert ours == pytest.approx(theirs, rel=1e-10) and ours != pytest.approx(unclipped, rel=1e-3)
    moved = torch.cat([(p.detach() - start[n]).flatten() for n, p in clipped.model.named_parameters()])
    if "clip_grad_norm" in limit:
        assert moved.norm() <= 8 * 0.1 * 0.05 + 1e-9
    else:
        assert moved.abs().max() <= 8 * 0.1 * 0.01 + 1e-9


def test_both_clips_are_entries_first_then_the_norm():
    seeds, limits = torch.arange(100), {"clip_grad_value": 0.01, "clip_grad_norm": 0.05}
    clipped, free = (make_step(optimizer=lambda p: torch.optim.SGD(p, 1.0), **given) for given in (limits, {}))
    plain = copy.deepcopy(free.model)
    clipped(seeds), free(seeds)
    for start, moved in zip(plain.parameters(), free.model.parameters(), strict=True):
        start.grad = (start - moved).detach()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05) > 0.05
    torch.optim.SGD(plain.parameters(), 1.0).step()
    for ours, theirs in zip(clipped.model.parameters(), plain.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_fit_stops_early_and_restores_the_best():
    step = make_step(optimizer=lambda p: torch.optim.SGD(p, 0.0))
    seen = []
    history = step.fit(IDX, torch.arange(730, 900), epochs=20, batch_size=200, patience=2, on_epoch=seen.append)
    assert history.stopped_early and history.best_epoch == 0 and len(seen) == len(history.records) == 3
    step = make_step()
    history = step.fit(IDX, torch.arange(730, 900), epochs=4, batch_size=200)
    best = max(record.val for record in history.records)
    assert history.best_val == best == history.records[history.best_epoch].val
    assert step.evaluate(torch.arange(730, 900), 200)["accuracy"] == pytest.approx(best)


def test_class_weights():
    weight = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=torch.float64)
    for loss in (torch.nn.CrossEntropyLoss(weight=weight), lambda z, y: F.cross_entropy(z, y, weight=weight)):
        padded, exact = make_step(loss=loss), make_step("exact", loss=loss)
        assert train(padded, IDX) == pytest.approx(train(exact, IDX), rel=1e-10)
    assert train(make_step(loss=loss), IDX) != pytest.approx(train(make_step(), IDX), rel=1e-3)


def test_ignored_labels():
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["y"][torch.arange(0, NODES, 3)] = -100
    padded, exact = make_step(graph=graph), make_step("exact", graph=graph)
    assert train(padded, IDX) == pytest.approx(train(exact, IDX), rel=1e-10)


def _multilabel(missing: bool) -> joestar.Graph:
    graph = planted_graph(dtype=torch.float64)
    targets = F.one_hot(graph.ndata["y"], CLASSES).double()
    if missing:
        targets[::2, 1] = torch.nan
        targets[5] = torch.nan
    graph.ndata["y"] = targets
    return graph


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        pytest.param(F.binary_cross_entropy_with_logits, False, id="entropy"),
        pytest.param(F.binary_cross_entropy_with_logits, True, id="entropy, nan", marks=pytest.mark.fuzz),
        pytest.param(torch.nn.BCEWithLogitsLoss(), False, id="module", marks=pytest.mark.fuzz),
        pytest.param(torch.nn.BCEWithLogitsLoss(), True, id="module, nan"),
        pytest.param(F.mse_loss, False, id="squares", marks=pytest.mark.fuzz),
        pytest.param(F.mse_loss, True, id="squares, nan"),
    ],
)
def test_multilabel_targets(missing, loss):
    graph = _multilabel(missing)
    padded, exact = make_step(graph=graph, loss=loss), make_step("exact", graph=graph, loss=loss)
    losses = train(padded, IDX, epochs=4)
    assert losses == pytest.approx(train(exact, IDX, epochs=4), rel=1e-9)
    assert losses[-1] < losses[0] and all(loss == loss for loss in losses)
    scores = padded.evaluate(torch.arange(730, NODES))
    assert scores["rmse"] < 0.5 if loss is F.mse_loss else scores["f1_micro"] > 0.3


def test_nan_targets_need_an_unreduced_loss():
    with pytest.raises(LabelError, match=r"NaN .*the value of <lambda> is NaN.*`reduction` argument"):
        make_step(graph=_multilabel(True), loss=lambda z, y: ((z - y) ** 2).mean())


def test_reports_hold_what_happened(texts):
    step = make_step()
    with cheaper(real):
        train(step, IDX, epochs=1)
    report = step.report()
    text, tree = str(report), json.loads(report.to_json())
    (program,) = tree["programs"]
    assert tree["counters"]["steps"] == 8 and program["kind"] == "train" and program["batch"] == 100
    for needed in ("slice_cols", "compact", "spmm", "cross_entropy_loss"):
        assert needed in program["graph_before"]
    assert "sample_aggregate" in program["graph_after"] and "slice_cols" not in program["graph_after"]
    bounded = [entry for entry in program["sets"] if entry["bound"]]
    assert bounded and all(e["minimum"] <= e["mean"] <= e["maximum"] <= e["bound"] for e in bounded)
    assert all(0 <= entry["waste"] < 0.5 for entry in bounded)
    for needed in ("hop 0 sampled edges", "sample-gather-aggregate", "backward", "fallbacks 0"):
        assert needed in text
    assert "fired" in step.explain() and "neighbor.py" in step.explain()


def test_refusals_are_explained():
    step = make_step(model="GCN")
    train(step, IDX, epochs=1)
    refusal = (
        "refused sample-gather-aggregate: the gathered rows are also read by aten.mul.Tensor before the aggregation"
    )
    assert refusal in step.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tensorrt"}, "backend must be one of inductor, eager; got 'tensorrt'"),
        ({"execution": "fast"}, "execution must be one of padded, exact; got 'fast'"),
        ({"slack": -0.1}, "slack must not be negative; got -0.1"),
        ({"warm_up": 0}, "warm_up must be an integer of at least 1; got 0"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive; got 0.0"),
        ({"deterministic": True, "tune": True}, "deterministic=True cannot make choices by timing"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        make_step(**options)


def test_unknown_pass():
    step = make_step(disable_passes=("fuse-everything",))
    with pytest.raises(
        ConfigError, match="there is no pass 'fuse-everything' to disable; passes are: dce, simplify, cse"
    ):
        next(step.epoch(IDX, 100))


def test_half_a_training_step_is_refused():
    net = joestar.nn.GraphSAGE(FEATURES, 8, 2, out_channels=CLASSES)
    sampler = joestar.NeighborSampler(planted_graph(), [3, 3])
    with pytest.raises(ConfigError, match="loss_fn was given without optimizer"):
        joestar.compile(net, sampler, F.cross_entropy)
    step = joestar.compile(net, sampler, backend="eager")
    with pytest.raises(ConfigError, match="epoch needs a loss and an optimizer"):
        step.epoch(IDX, 100)
