"""``fit`` as people use it: schedules, callbacks, loggers, interrupts."""

import csv
import functools
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import joestar
from joestar.bench.planted import planted
from joestar.errors import ConfigError, JoestarWarning, SeedError
from joestar.runtime import features
from joestar.runtime.fit import Fit, Settings
from joestar.runtime.fit_asked import asked
from tests.runtime.common import make_step, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)
LR = torch.optim.lr_scheduler


def rates(schedule=None, make=None, epochs=2, **options) -> tuple[list[float], str]:
    """Learning rates of the steps of a fit, and when the scheduler stepped."""
    step, seen = make_step(model_options={"dropout": 0.0}, **options), []
    history = step.fit(
        IDX, epochs=epochs, batch_size=100, scheduler=make(step.optimizer), schedule=schedule,
        on_step=lambda record: seen.append(step.optimizer.param_groups[0]["lr"]),
    )  # fmt: skip
    return seen, history.schedule


def plain_rates(make, moments) -> list[float]:
    """Rates behind every step, where the scheduler steps at the given ones."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], 1e-2)
    scheduler, found = make(optimizer), []
    for due in moments:
        optimizer.step()
        if due:
            scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_schedulers_step_when_they_should():
    def once(optimizer):
        return LR.OneCycleLR(optimizer, 0.1, total_steps=16)

    found, schedule = rates(make=once)
    assert schedule == "step" and found == pytest.approx(plain_rates(once, [True] * 16))

    def decay(optimizer):
        return LR.StepLR(optimizer, 1, 0.5)

    found, schedule = rates(make=decay)
    assert schedule == "epoch" and found == [1e-2] * 8 + [5e-3] * 8
    found, schedule = rates("step", decay)
    assert schedule == "step" and found == pytest.approx(plain_rates(decay, [True] * 16))
    found, _ = rates("step", decay, epochs=1, accumulate=3)  # per step of the optimizer
    assert found == pytest.approx(plain_rates(decay, [i in (2, 5, 7) for i in range(8)]))
    _, schedule = rates(make=lambda o: LR.OneCycleLR(o, 0.1, total_steps=2))  # as many as epochs
    assert schedule == "epoch"


def test_schedules_that_cannot_be():
    for make, schedule, message in (
        (
            lambda o: LR.OneCycleLR(o, 0.1, total_steps=10),
            None,
            r"made for 10 steps, and is to take 16 .*total_steps=16",
        ),
        (lambda o: LR.ReduceLROnPlateau(o), "step", "once per epoch"),
        (lambda o: LR.StepLR(o, 1), "daily", "schedule must be 'step', 'epoch' or None"),
        (lambda o: LR.ReduceLROnPlateau(o, mode="max"), None, "watches train_loss, of which less is better"),
    ):
        with pytest.raises(ConfigError, match=message):
            rates(schedule, make)


class Board:
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, number):
        self.seen.append((name, value, number))


class WandbRun:
    def __init__(self):
        self.seen = []

    def log(self, values, step=None):
        self.seen.append((values, step))


def test_callbacks_and_loggers(tmp_path, capsys):
    """What stops, what is called with what, and what is written."""
    step, board, run, rows, steps = make_step(), Board(), WandbRun(), [], []
    path = tmp_path / "log.csv"
    history = step.fit(
        IDX, VAL, epochs=5, batch_size=100, metric=["accuracy", "f1_macro"], on_step=steps.append, log_every=4,
        on_epoch=lambda record: record.epoch == 1, loggers=[board, run, path, lambda *row: rows.append(row)],
        verbose=True,
    )  # fmt: skip
    assert history.stopped_early and len(history.records) == 2 and len(steps) == 16
    assert [(s.epoch, s.step, s.steps) for s in steps[7:9]] == [(0, 7, 8), (1, 0, 8)]
    losses = [s.loss.item() for s in steps]
    assert history.records[1].loss == pytest.approx(sum(losses[8:]) / 8)
    assert [number for _, number in rows] == [4, 8, 8, 12, 16, 16] and run.seen == [(dict(v), n) for v, n in rows]
    assert rows[0][0] == {"step/loss": losses[3]}
    last = rows[-1][0]
    record = history.records[1]
    assert last == {
        "epoch": 1, "train/loss": record.loss, "lr": 0.01, "train/seconds": record.seconds,
        "val/accuracy": record.scores["accuracy"], "val/f1_macro": record.scores["f1_macro"],
    }  # fmt: skip
    assert ("val/accuracy", record.val, 16) in board.seen
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["number"] for row in table] == ["4", "8", "12", "16"]
    assert float(table[3]["val/f1_macro"]) == record.scores["f1_macro"] and float(table[3]["step/loss"]) == losses[15]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("epoch 2/5  loss ") and "accuracy" in lines[1]
    again = step.fit(IDX, epochs=3, batch_size=300, on_step=lambda record: record.step == 1)
    assert again.stopped_early and len(again.records) == 1 and again.best_val is None
    assert len(step.epoch(IDX, 300)) == 3, "the epoch that was left is over"
    for options, message in (
        ({"on_epoch": lambda record: "stop"}, r"on_epoch returned 'stop' \(str\): expected True to stop"),
        ({"loggers": 3}, "a logger must have add_scalar"),
        ({"loggers": "log.txt"}, "path that ends in .csv"),
        ({"log_every": 2}, "log_every needs loggers"),
    ):
        with pytest.raises(ConfigError, match=message):
            step.fit(IDX, epochs=1, batch_size=300, **options)


def test_a_csv_goes_on_where_a_run_does(tmp_path):
    path, saved = tmp_path / "log.csv", joestar.Checkpoints(tmp_path / "saved")
    for epochs in (2, 3):
        make_step().fit(IDX, VAL, epochs, 200, loggers=path, checkpoints=saved, resume=True)
    with path.open(newline="") as file:
        assert [int(row["epoch"]) for row in csv.DictReader(file)] == [0, 1, 2]


@functools.cache
def undisturbed():
    return make_step().fit(IDX, VAL, 2, 100)


@pytest.mark.parametrize(("number", "written"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_interrupts_keep_best_and_last_and_say_where(tmp_path, capsys, number, written):
    saved = joestar.Checkpoints(tmp_path) if written else None

    def stop(record):
        if (record.epoch, record.step) == (1, 2):
            os.kill(os.getpid(), number)

    handler = signal.getsignal(signal.SIGTERM)
    step, expected = make_step(), undisturbed()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        step.fit(IDX, VAL, 2, 100, checkpoints=saved, on_step=stop)
    (note,) = caught.value.__notes__
    assert signal.getsignal(signal.SIGTERM) is handler
    assert f"after {3 + (number == 0)} steps of epoch 1" in note and "accuracy" in note
    if number == signal.SIGTERM:
        assert caught.value.code == 143 and note in capsys.readouterr().err
    if written:
        assert str(saved.paths()[-1]) in note
        kept = saved.latest()["fit"]
        assert kept["history"]["best_epoch"] == 0 and kept["best"].keys() == step.model.state_dict().keys()
        again = make_step()
        resumed = again.fit(IDX, VAL, 2, 100, checkpoints=saved, resume=True)
        assert [record.loss for record in resumed.records] == [record.loss for record in expected.records]
    else:
        assert "step.history.best" in note and step.history.best_epoch == 0
        step.model.load_state_dict(step.history.best)
        assert step.evaluate(VAL, 100)["accuracy"] == expected.records[0].val


def test_a_checkpoint_is_read_in_the_memory_of_the_host(tmp_path):
    """Tables over partitions are as large as that; losses and the best parameters go to the device of the step, for
    which the one without memory stands here."""
    saved, loaded, device = joestar.Checkpoints(tmp_path), [], torch.device("meta")

    def stop(record):
        if (record.epoch, record.step) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_step().fit(IDX, VAL, 2, 100, checkpoints=saved, on_step=stop)
    whole = SimpleNamespace(device=device)
    step = SimpleNamespace(graph=whole, group=None, load_state_dict=loaded.append, _resumed=[])
    fit = SimpleNamespace(
        step=step,
        settings=Settings(checkpoints=saved, resume=True),
        history=None,
        metrics=None,
        asked=asked(Settings(), None, True, "epoch"),
    )
    Fit.resume(fit, Fit.newest(fit))
    (state,) = loaded
    assert {value.device.type for value in state["model"].values()} == {"cpu"}
    assert {value.device for value in fit.history.best.values()} == {device}
    assert [value.device for value in fit.losses] == [device] * 2


def test_calls_count_in_the_report():
    graph = make_step().graph
    net = joestar.nn.GraphSAGE(12, 8, 2, out_channels=4).double()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3, 3]), backend="eager")
    for seeds in IDX.split(100):
        step(seeds).sum().backward()
    step.predict(VAL)
    assert step.counters.steps == 8 and "steps 8: 8 padded, 0 exact" in str(step.report())


def test_ids_in_any_form():
    found = []
    for form in (torch.as_tensor, list, lambda ids: np.array(ids, dtype=np.int16)):
        step = make_step(model_options={"dropout": 0.0})
        history = step.fit(form(range(200)), form(range(200, 250)), 1, 100)
        found.append((history.records[0].scores, step.evaluate(form(range(200, 250)))))
    assert found[0] == found[1] == found[2]


def test_a_fit_goes_on_with_its_own_epoch(tmp_path):
    """Not with one of a loop's that was broken off, and is still held."""

    class EndsError(Exception):
        pass

    def end(record):
        steps.append((record.epoch, record.step))
        if record.step == 3 and len(steps) == 4:
            raise EndsError

    found = []
    for held in (False, True):
        step, steps, places = make_step(), [], joestar.Checkpoints(tmp_path / str(held))
        epoch = step.epoch(IDX, 150)
        next(epoch)
        if not held:
            epoch.close()
        with pytest.raises(EndsError):
            step.fit(IDX, epochs=2, batch_size=150, checkpoints=places, checkpoint_every=1, on_step=end)
        other = make_step()
        other.fit(IDX, epochs=2, batch_size=150, checkpoints=places, resume=True, on_step=end)
        found.append((steps, {name: value.clone() for name, value in other.model.state_dict().items()}))
    assert (
        found[0][0] == found[1][0] == [(0, n) for n in range(4)] + [(0, n) for n in (3, 4)] + [(1, n) for n in range(5)]
    )
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_a_fit_that_a_callback_stopped_goes_on(tmp_path):
    """As one that was interrupted; patience is over for good."""
    places = joestar.Checkpoints(tmp_path)
    history = make_step().fit(
        IDX, VAL, 4, 150, checkpoints=places, on_step=lambda record: record.epoch == 1 and record.step == 1
    )
    assert history.stopped_early and len(history.records) == 2
    history = make_step().fit(IDX, VAL, 4, 150, checkpoints=places, resume=True)
    assert not history.stopped_early and len(history.records) == 4


def test_ids_that_numpy_writes_to_are_looked_at_again():
    array = np.arange(100, 160)
    ids, step = torch.from_numpy(array), make_step(model_options={"dropout": 0.0})
    step.fit(ids, ids, 1, 30)
    array[:] = np.arange(200, 260)
    seen = torch.cat([seeds for _, seeds in step.epoch(ids, 30, shuffle=False, with_seeds=True)])
    assert torch.equal(seen, ids)
    assert torch.equal(step.predict(ids), step.predict(ids.clone()))
    assert step.evaluate(ids) == step.evaluate(ids.clone())
    array[3] = 10**6
    with pytest.raises(SeedError, match="1000000"):
        next(step.epoch(ids, 30))


class Versioned(torch.nn.Linear):
    """Its weight had another sign once."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_shapes_are_checked_where_the_labels_are():
    """A step over a graph that was moved to a GPU has ids there, and scores on the graph as it was given."""

    class Elsewhere:
        """Ids on another device."""

        device = torch.device("meta")

        def numel(self):
            return VAL.numel()

        def to(self, device):
            return VAL.to(device)

    step = make_step(model_options={"dropout": 0.0})
    step.fit(IDX, VAL, 1, 400)
    fit = Fit(step, IDX, VAL, 400, Settings())
    fit.val_idx, given = Elsewhere(), []
    step.scorer.check = lambda outputs, idx, metrics: given.append((outputs.device, idx.device, len(outputs)))
    fit._check_scores()
    assert given == [(torch.device("cpu"), torch.device("cpu"), VAL.numel())]


class Signed(torch.nn.Module):
    """A model whose last layer has a version."""

    def __init__(self):
        super().__init__()
        self.layers = joestar.nn.GraphSAGE(12, 8, 2, out_channels=4)
        self.last = Versioned(4, 4)

    def forward(self, blocks, x):
        return self.last(self.layers(blocks, x))


class OfRows(torch.nn.Module):
    """A loss with such a layer."""

    def __init__(self):
        super().__init__()
        self.last = Versioned(4, 4)

    def forward(self, z, y):
        return torch.nn.functional.cross_entropy(self.last(z), y)


def test_states_have_the_versions_of_modules(tmp_path):
    """The best parameters, and those of checkpoints, were taken for old ones."""
    graph, places = planted_graph(dtype=torch.float64), joestar.Checkpoints(tmp_path)
    for epochs in (1, 2):
        torch.manual_seed(0)
        net, loss = Signed().double(), OfRows().double()
        weight, optimizer = net.last.weight.detach().clone(), torch.optim.SGD(net.parameters(), 0.0)
        sampler = joestar.NeighborSampler(graph, [3, 3])
        of_loss = loss.last.weight.detach().clone()
        step = joestar.compile(net, sampler, loss, optimizer, backend="eager")
        step.fit(IDX, VAL, epochs, 400, checkpoints=places, resume=epochs == 2)
        assert torch.equal(net.last.weight, weight) and torch.equal(loss.last.weight, of_loss)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"patience": "3"}, "patience must be a positive"), ({"patience": True}, "patience must be a positive"),
     ({"scheduler": "cosine"}, "torch.optim.lr_scheduler"), ({"epochs": 1.5}, "epochs must be a positive integer")],
)  # fmt: skip
def test_unusable_arguments_are_refused_before_training(given, words):
    step = make_step()
    with pytest.raises(ConfigError, match=words):
        step.fit(IDX, VAL, **{"epochs": 1, "batch_size": 100} | given)
    assert step.counters.steps == 0


def test_a_loss_that_is_no_number_is_said_once_with_the_feature_that_is_none():
    torch.manual_seed(0)
    graph = planted("tiny")
    graph.ndata["x"][1234, 5] = float("nan")
    for options, cause in (({}, "row 1234 holds nan"), ({"memory": "900KiB", "batch_size": 50}, "row 1234 holds nan")):
        net = joestar.nn.GraphSAGE(16, 8, 2, graph.num_classes)
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [3, 3]), torch.nn.functional.cross_entropy,
            torch.optim.SGD(net.parameters(), 0.01), backend="eager", warm_up=2, **options,
        )  # fmt: skip
        with pytest.warns(JoestarWarning, match=f"loss of epoch 1 is nan.*{cause}") as seen:
            step.fit(torch.tensor([1234, 7, 8]), epochs=2, batch_size=50)
        assert len([one for one in seen if "loss of epoch" in str(one.message)]) == 1


def test_where_features_are_not_finite(monkeypatch):
    monkeypatch.setattr(features, "LOOK_AT", 8)
    x = torch.zeros(7, 4)
    assert features.not_finite(x) is None
    x[5, 3], x[6, 0] = float("inf"), float("nan")
    assert features.not_finite(x) == (5, 3) and features.not_finite(x[:, 3]) == (5,)
