"""Regression, binary and multi-label tasks in ``fit`` and ``evaluate``: what is scored, and which epoch is the best."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import CheckpointError, ConfigError, LabelError
from joestar.lowering.loss import prepare_loss
from tests.runtime.common import NODES, make_step, planted_graph
from tests.runtime.plain import plain_epoch

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 600), torch.arange(700, 1000)


def values_graph(columns: int | None = 1) -> joestar.Graph:
    """Labels are numbers that the features tell, ``[N]`` or ``[N, columns]``; some are unknown."""
    graph = planted_graph(dtype=torch.float64)
    y = graph.ndata["x"][:, :columns] * 3 + 10 if columns else graph.ndata["x"][:, 0] * 3 + 10
    y[750] = torch.nan
    graph.ndata["y"] = y
    return graph


def make(columns=1, loss=F.mse_loss, out=None, **options):
    return make_step(
        graph=values_graph(columns),
        loss=loss,
        model_options={"out_channels": out or columns or 1, "dropout": 0.0},
        **options,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["module", "partial"])
def test_unknown_values_leave_sums_sums(kind, reduction):
    """Also where the only unknown one is of a node that is never trained on, which must not change a loss."""
    module, partial = torch.nn.MSELoss(reduction=reduction), functools.partial(F.mse_loss, reduction=reduction)
    step = make(loss=module if kind == "module" else partial)
    assert step.graph.ndata["y"].isnan().sum() == 1
    model = copy.deepcopy(step.model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    expected = plain_epoch(model, step.sampler, partial, optimizer, IDX[:90], 90)
    assert [loss.item() for loss in step.epoch(IDX[:90], 90, shuffle=False)] == pytest.approx(expected)
    known = step.graph.ndata["y"][742:751]
    prepared = prepare_loss(module if kind == "module" else partial, step.graph.ndata["y"])
    wanted = float(partial(torch.zeros_like(known[:-1]), known[:-1]))
    assert float(prepared.call(torch.zeros_like(known), known)) == pytest.approx(wanted)
    assert float(prepared.call(torch.zeros_like(known[-1:]), known[-1:])) == 0


def masked(out, y):
    """As OGB's examples, without an index: what is unknown is left out before anything is computed with it."""
    known = ~torch.isnan(y)
    return ((out - torch.where(known, y, 0)).square() * known).sum() / known.sum()


class Masked(torch.nn.Module):
    """The same, weighted, with rows of the graph besides."""

    def forward(self, out, y, degree):
        known = ~y.isnan() * degree[:, None]
        return torch.where(known > 0, out - y.nan_to_num(0), 0).abs().mul(known).sum() / known.sum()


@pytest.mark.parametrize("loss", [masked, Masked()])
def test_a_loss_that_leaves_unknown_values_out_itself_is_the_one_of_plain_pytorch(loss):
    graph, degree = values_graph(2), torch.arange(1200, dtype=torch.float64) % 5
    graph.ndata["y"][::3, 0], graph.ndata["degree"] = torch.nan, degree
    options = {"graph": graph, "loss": loss, "model_options": {"out_channels": 2, "dropout": 0.0}}
    padded, exact, plain = (make_step(how, **options) for how in ("padded", "exact", "padded"))
    optimizer, names = torch.optim.Adam(plain.model.parameters(), 1e-2), iter(IDX.split(250))
    further = (lambda: (degree[next(names)],)) if isinstance(loss, Masked) else tuple
    expected = plain_epoch(plain.model, plain.sampler, lambda out, y: loss(out, y, *further()), optimizer, IDX, 250)
    assert not any(map(math.isnan, expected))
    for step in (padded, exact):
        assert [each.item() for each in list(step.epoch(IDX, 250, shuffle=False))] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "what"),
    [(lambda out, y: (out - y).square().mean(), "value"), (lambda out, y: (out - y).square().nanmean(), "gradient")],
)
def test_a_loss_that_unknown_values_spoil_is_told_before_work_starts(loss, what):
    """Where only the gradient is NaN the parameters would be after the first step."""
    with pytest.raises(LabelError, match=f"the {what} of <lambda> is NaN with them.*or leave them out yourself"):
        make_step(graph=values_graph(2), loss=loss, model_options={"out_channels": 2})


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_regression_is_scored_by_its_errors_and_keeps_the_epoch_with_the_least(columns):
    """``[N]`` with outputs ``[n, 1]``, too: PyTorch's losses would compare all pairs."""
    step = make(columns, optimizer=lambda p: torch.optim.SGD(p, 0.02))
    rates = iter([1.0, 0.5, -0.2, -0.2])  # the last epochs climb

    def worse(record):
        for group in step.optimizer.param_groups:
            group["lr"] = 0.02 * abs(next(rates))
            group["maximize"] = record.epoch >= 1

    history = step.fit(IDX, VAL, epochs=4, batch_size=200, on_epoch=worse)
    record = history.records[history.best_epoch]
    errors = [r.scores["rmse"] for r in history.records]
    assert (history.metric, history.mode) == ("rmse", "min") and history.best_epoch == errors.index(min(errors)) == 1
    assert errors[3] > errors[1] and history.best_val == record.val == min(errors)
    scores = step.evaluate(VAL, 200)
    assert scores == pytest.approx(record.scores), "the best epoch's parameters are in the model"
    output, y = step.predict(VAL, 200), step.graph.ndata["y"][VAL]
    known = ~torch.isnan(y.reshape(len(VAL), -1))
    wrong = (output - y.reshape(len(VAL), -1))[known]
    assert scores["rmse"] == pytest.approx(wrong.square().mean().sqrt().item())
    assert scores["mae"] == pytest.approx(wrong.abs().mean().item()) and scores["r2"] < 1


def test_one_number_per_node_trains_as_in_plain_pytorch():
    """Labels ``[N]``, outputs ``[n, 1]``: the loss of the pairs (output, label), not of all combinations."""
    graph = values_graph(None)
    graph.ndata["y"] = graph.ndata["y"].nan_to_num(0)
    padded, exact, plain = (
        make_step(how, graph=graph, loss=F.mse_loss, model_options={"out_channels": 1, "dropout": 0.0})
        for how in ("padded", "exact", "padded")
    )
    adam = torch.optim.Adam(plain.model.parameters(), 1e-2)
    expected = plain_epoch(plain.model, plain.sampler, lambda out, y: F.mse_loss(out[:, 0], y), adam, IDX, 250)
    for step in (padded, exact):
        assert [loss.item() for loss in list(step.epoch(IDX, 250, shuffle=False))] == pytest.approx(expected, rel=1e-9)


def test_shapes_that_do_not_fit_are_an_error_before_anything_is_trained():
    step = make(3, out=2)
    with pytest.raises(LabelError, match=r"output \[.*\] and graph.ndata\['y'\] \[.*\] differ in shape"):
        next(step.epoch(IDX, 100))


def test_what_cannot_be_scored_is_said_behind_the_first_step():
    """Not behind an epoch of hours."""
    graph = values_graph(3)
    graph.ndata["y"] = graph.ndata["y"].nan_to_num(0)
    step = make_step(graph=graph, loss=lambda out, y: out.square().mean(), model_options={"out_channels": 2})
    with pytest.raises(LabelError, match=r"cannot score outputs \[300, 2\] against labels \[300, 3\] \(regression\)"):
        step.fit(IDX, VAL, 1, 100)
    with pytest.raises(ConfigError, match="'accuracy' is none of a regression task"):
        make().fit(IDX, VAL, 1, 100, metric=["r2", "accuracy"])
    assert step.counters.steps == 1


def test_what_is_monitored():
    step = make()
    history = step.fit(IDX, VAL, 1, 300, metric=["r2", "mae", "loss"], monitor="mae")
    assert (history.metric, history.mode) == ("mae", "min") and set(history.records[0].scores) == {"r2", "mae", "loss"}
    assert history.best_val == history.records[0].scores["mae"] == history.records[0].val
    expected = step.predict(VAL, 300)[:, 0] - step.graph.ndata["y"][VAL, 0]
    assert history.records[0].scores["loss"] == pytest.approx(expected[~expected.isnan()].square().mean().item())

    def largest(output, target):
        return (output - target).abs().nan_to_num(0).max()

    assert step.fit(IDX, VAL, 1, 300, metric=largest, mode="min").best_val == pytest.approx(
        step.evaluate(VAL, 300, metric=largest)["largest"]
    )
    seen = step.fit(IDX, VAL, 1, 300, monitor="train_loss")
    assert (seen.metric, seen.best_val) == ("train_loss", seen.records[0].loss)
    for options, message in (
        ({"metric": largest}, "is more or less of largest better"),
        ({"metric": "accuracy"}, "'accuracy' is none of a regression task"),
        ({"metric": "mae", "monitor": "r2"}, "monitor='r2' is not computed: expected mae, train_loss"),
        ({"metric": "mae", "mode": "max"}, "contradicts"),
        ({"mode": "max"}, "without metric="),
        ({"metric": "mae", "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(step.optimizer, mode="max")},
         r"watches mae, of which less is better: make it with mode='min'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            step.fit(IDX, VAL, 1, 300, **options)
    with pytest.raises(ConfigError, match="of validation nodes"):
        step.fit(IDX, None, 1, 300, metric="mae")


class Squared(torch.nn.Module):
    """A metric object that is a module, and can be called, as those of torchmetrics."""

    higher_is_better = False

    def reset(self):
        self.errors = []

    def update(self, output, target):
        self.errors.append((output - target).square().nanmean())

    def compute(self):
        return torch.stack(self.errors).mean()

    def forward(self, output, target):
        raise AssertionError("updated, not called")


def test_metric_modules_are_scored_as_the_task_that_it_is():
    """They were taken for functions, and values for classes."""
    graph = values_graph(1)
    graph.ndata["y"] = graph.ndata["y"].nan_to_num(0)
    step = make_step(graph=graph, loss=F.mse_loss, model_options={"out_channels": 1})
    found = step.evaluate(VAL, 300, metric={"ours": Squared(), "theirs": "mse"})
    assert found["ours"] == pytest.approx(found["theirs"])
    history = step.fit(IDX, VAL, 1, 300, metric=[Squared(), "mse"])
    assert (history.metric, history.mode) == ("Squared", "min")
    assert history.best_val == pytest.approx(history.records[0].scores["mse"])


def test_an_epoch_whose_score_is_no_number_is_never_the_best():
    step = make()
    scores = iter([math.nan, 0.3, math.nan, 0.1])
    history = step.fit(IDX, VAL, 4, 300, metric=lambda output, target: next(scores), mode="max")
    assert history.best_epoch == 1 and history.best_val == 0.3


def test_binary_labels_in_every_form():
    graph = planted_graph(dtype=torch.float64)
    whole = graph.ndata["y"] % 2
    for y, loss in (
        (whole, F.binary_cross_entropy_with_logits), (whole.double(), torch.nn.BCEWithLogitsLoss()),
        (whole.double()[:, None], lambda out, y: F.binary_cross_entropy_with_logits(out, y)),
    ):  # fmt: skip
        graph.ndata["y"] = y
        step = make_step(graph=graph, loss=loss, model_options={"out_channels": 1, "dropout": 0.0})
        history = step.fit(IDX, VAL, 3, 100, metric=["roc_auc", "accuracy", "f1"])
        right = ((step.predict(VAL, 100)[:, 0] > 0) == whole[VAL].bool()).double().mean().item()
        assert step.evaluate(VAL, 100) == {"accuracy": pytest.approx(right)} and right > 0.6
        assert history.metric == "roc_auc" and history.best_val > 0.65
    graph.ndata["y"] = whole * 3
    with pytest.raises(LabelError, match="integers beside 0 and 1"):
        make_step(graph=graph, loss=F.binary_cross_entropy_with_logits)


def test_the_same_call_gives_the_same_result():
    """Whatever batch size a call before had."""
    step = make_step()
    first, score = step.predict(VAL), step.evaluate(VAL)
    step.evaluate(VAL, 500)
    next(step.epoch(IDX[:1], 1))
    step.predict(torch.arange(NODES), 1200)
    step.model.load_state_dict({name: value.clone() for name, value in step.model.state_dict().items()})
    again = make_step()
    again.model.load_state_dict(step.model.state_dict())
    assert torch.equal(step.predict(VAL), step.predict(VAL)) and score.keys() == {"accuracy"}
    torch.testing.assert_close(step.predict(VAL), again.predict(VAL), rtol=1e-12, atol=1e-12)
    assert first.shape == (len(VAL), 4)


def test_a_resumed_fit_monitors_what_it_did(tmp_path):
    saved = joestar.Checkpoints(tmp_path)
    make().fit(IDX, VAL, 1, 300, checkpoints=saved, metric="mae")
    with pytest.raises(CheckpointError, match=r"another metric: \['mae'\], this one has \['r2'\]"):
        make().fit(IDX, VAL, 2, 300, checkpoints=saved, resume=True, metric="r2")
    step = make()
    history = step.fit(IDX, VAL, 2, 300, checkpoints=saved, resume=True, metric="mae")
    assert [record.epoch for record in history.records] == [0, 1] and history.mode == "min"
