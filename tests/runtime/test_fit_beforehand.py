"""What a ``fit`` can know beforehand is said before its first step, or right behind it; logs of one fit are its own."""

import csv
import logging
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ConfigError
from joestar.runtime.loggers import logger
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 400), torch.arange(500, 700)
LR = torch.optim.lr_scheduler


def made(**options):
    return make_step(model_options={"dropout": 0.0, "num_layers": 1}, fanouts=[3], **options)


def rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(path: Path) -> list[int]:
    return [int(row["number"]) for row in rows(path)]


# --- logs ---


@pytest.mark.parametrize("every", [None, 1])
def test_a_fit_that_begins_begins_its_log(tmp_path, every):
    """Rows of an earlier one with smaller numbers stayed among its own."""
    path = tmp_path / "log.csv"
    made().fit(IDX, epochs=2, batch_size=100, loggers=path, log_every=1)
    assert numbers(path) == list(range(1, 9))
    made().fit(IDX, epochs=2, batch_size=200, loggers=path, log_every=every)
    assert numbers(path) == ([1, 2, 3, 4] if every else [2, 4]) and ("step/loss" in rows(path)[0]) == bool(every)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]


def test_a_fit_that_goes_on_goes_on_with_its_log(tmp_path):
    """From wherever it was left, as if it had not been; what was logged behind the checkpoint is logged again."""

    def fitted(name, stop=None, **options):
        taken, path = [], tmp_path / f"{name}.csv"

        def on_step(record):
            taken.append(record)
            if len(taken) == stop:
                raise RuntimeError("left")

        given = {"log_every": 1, "loggers": path, "checkpoints": joestar.Checkpoints(tmp_path / name)}
        try:
            made().fit(IDX, VAL, 2, 100, checkpoint_every=3, on_step=on_step, **given, **options)
        except RuntimeError:
            assert stop
        return [{name: value for name, value in row.items() if name != "train/seconds"} for row in rows(path)]

    whole = fitted("whole")
    for stop in (2, 5, 6):
        begun = fitted(f"left-{stop}", stop)
        assert begun == [{key: row[key] for key in begun[0]} for row in whole[:stop]]
        assert fitted(f"left-{stop}", resume=True) == whole, stop


def test_a_log_is_not_lost_to_a_fit_that_logs_nothing(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    made().fit(IDX, epochs=1, batch_size=100, loggers=path)
    before = path.read_text()

    def stop(record):
        raise RuntimeError("left")

    with pytest.raises(RuntimeError, match="left"):
        made().fit(IDX, epochs=1, batch_size=100, loggers=path, on_step=stop)
    assert path.read_text() == before

    def fails(*given):
        raise OSError("disk full")

    monkeypatch.setattr(csv.DictWriter, "writerows", fails)
    with pytest.raises(ConfigError, match="cannot be written"):
        logger(path)({"a": 1.0}, 1)
    assert path.read_text() == before and [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]


def test_a_log_behind_a_link_stays_there(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "log.csv").symlink_to(tmp_path / "there" / "real.csv")
    logger(tmp_path / "log.csv")({"a": 1.0}, 1)
    assert (tmp_path / "log.csv").is_symlink() and numbers(tmp_path / "there" / "real.csv") == [1]


def test_a_log_keeps_its_mode_and_a_device_stays_one(tmp_path):
    path, device = tmp_path / "log.csv", tmp_path / "device.csv"
    path.touch(0o640)
    os.chmod(path, 0o640)
    os.mkfifo(tmp_path / "pipe")
    device.symlink_to(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for number in (1, 2):
        logger(path)({"a": 1.0}, number)
        logger(device)({"a": 1.0}, number)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and numbers(path) == [2]
    written = os.read(reader, 99).decode().split()
    assert stat.S_ISFIFO(device.stat().st_mode) and written == ["number,a", "1,1.0", "number,a", "2,1.0"]
    os.close(reader)


def test_a_log_is_written_in_place_where_no_file_can_be_put_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    for number in (1, 2):
        logger(path)({"a": 1.0}, number)
        assert numbers(path) == [number]
        monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "replace", lambda *paths: os.rename(tmp_path, tmp_path / "into itself"))  # an OSError
    logger(path)({"a": 1.0}, 3)
    assert numbers(path) == [3] and os.listdir(tmp_path) == ["log.csv"]


FILES = {
    "other columns": (b"id,posts\n1,2\n", "is no log of fit.*its columns are id, posts"),
    "other rows": (b"number,name\none,2\n", "is no log of fit.*begin with a number of steps"),
    "longer rows": (b"number,a\n1,2,3\n", "is no log of fit"),
    "no text": (b"\xff\xfe\x00\x01", "is no log of fit: it cannot be read as a CSV file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_something_else_is_left_alone(tmp_path, name):
    path, (content, words) = tmp_path / "nodes.csv", FILES[name]
    path.write_bytes(content)
    step = made()
    with pytest.raises(ConfigError, match=words):
        step.fit(IDX, VAL, 1, 200, loggers=path)
    assert step.counters.steps == 0 and path.read_bytes() == content


def test_an_empty_file_is_begun(tmp_path):
    path = tmp_path / "log.csv"
    path.touch()
    logger(path)({"a": 1.0}, 3)
    assert numbers(path) == [3]


def test_places_that_cannot_be_written_to(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"there is no folder .*none"):
        logger(tmp_path / "none" / "log.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match="cannot be read as a CSV file"):
        logger(tmp_path / "folder.csv")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(ConfigError, match="no permission to write to"):
        logger(tmp_path / "log.csv")


@pytest.mark.parametrize(
    "target",
    [logging.getLogger("a"), logging.LoggerAdapter(logging.getLogger("a"), {}), lambda values: None],
    ids=["logging", "adapter", "one argument"],
)
def test_what_logs_in_another_way_is_refused(target):
    assert logger(print) is print
    with pytest.raises(ConfigError, match=r"a logger must have.*logger.info\("):
        logger(target)


# --- scores, schedules, checkpoints ---


class Collection:
    """As torchmetrics' collections."""

    def update(self, output, target):
        pass

    def reset(self):
        pass

    def compute(self):
        return {"f1": torch.tensor(1.0), "auc": torch.tensor(0.5)}


BEHIND_ONE_STEP = {
    "monitor": (lambda s: {"monitor": "val_accuracy"}, "monitor='val_accuracy' is not computed: expected accuracy, tr"),
    "plateau": (
        lambda s: {"scheduler": LR.ReduceLROnPlateau(s.optimizer)}, "watches accuracy, of which more is better"
    ),
}  # fmt: skip
BEFORE = {
    "ema": (lambda s: {"ema": True}, r"ema=True needs averages of the weights: joestar.compile\(..., ema=0.999\)"),
    "on_step": (lambda s: {"on_step": 3}, "on_step must be a function of one argument, the record; got 3"),
    "on_epoch": (lambda s: {"on_epoch": lambda: None}, "on_epoch must be a function of one argument"),
    "checkpoints": (lambda s: {"checkpoints": "folder"}, r"must be a joestar.Checkpoints\(folder\); got 'folder'"),
    "batch": (lambda s: {"batch_size": 0, "scheduler": LR.StepLR(s.optimizer, 1)}, "batch_size must be a positive"),
}


@pytest.mark.parametrize("name", [*BEHIND_ONE_STEP, *BEFORE])
def test_no_epoch_is_spent_on_what_cannot_be(name):
    step, (given, words) = made(), (BEHIND_ONE_STEP | BEFORE)[name]
    with pytest.raises(ConfigError, match=words):
        step.fit(IDX, VAL, 2, **{"batch_size": 100} | given(step))
    assert step.counters.steps == (name in BEHIND_ONE_STEP)


def test_what_cannot_be_saved_is_said_before_a_step(tmp_path):
    def refused(step, words, **options):
        with pytest.raises(ConfigError, match=words):
            step.fit(IDX, VAL, 1, 200, checkpoints=joestar.Checkpoints(tmp_path, **options))
        assert step.counters.steps == 0

    step = made()
    refused(step, r"Checkpoints.extra\['config'\] is a set", extra={"config": {1, 2}})
    step.optimizer.param_groups[0]["layers"] = {1}
    refused(step, r"a group of the optimizer: param_groups\['layers'\] is a set")
    step = made()
    type(step.model).get_extra_state = lambda self: {"seen": {1}}
    try:
        refused(step, r"the model's state_dict\(\)\['_extra_state'\]\['seen'\] is a set")
    finally:
        del type(step.model).get_extra_state


def test_what_is_watched_by_default_is_known_in_the_first_epoch():
    seen, step = [], made()
    scheduler = LR.ReduceLROnPlateau(step.optimizer, "max")
    history = step.fit(
        IDX, VAL, 1, 100, scheduler=scheduler, on_step=lambda record: seen.append((step.history.metric, record.step))
    )
    assert seen == [("accuracy", number) for number in range(4)] and history.best_val is not None


def test_several_scores_of_one_metric_are_refused_with_their_names():
    with pytest.raises(ConfigError, match="'Collection' gave a dict of 'f1', 'auc': expected one number"):
        made().evaluate(VAL, metric=Collection())


# --- the best epoch ---


class Counted(torch.nn.Module):
    """A loss with a buffer, which its values depend on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, out, y):
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.steps.add_(1)
        return F.cross_entropy(out, y) + 0.001 * self.steps


@pytest.mark.filterwarnings("ignore:.*asks whether gradients are computed")
def test_a_loss_is_that_of_the_best_epoch_as_well(tmp_path):
    """``evaluate`` gives the score of the best epoch, also behind a fit that went on from its checkpoint."""

    def fitted(epochs, **options):
        loss = Counted()
        step = made(loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05))

        def climb(record):
            for group in step.optimizer.param_groups:
                group["maximize"] = True

        saved = joestar.Checkpoints(tmp_path)
        return step, loss, step.fit(IDX, VAL, epochs, 100, metric="loss", on_epoch=climb, checkpoints=saved, **options)

    for epochs in (2, 3):
        step, loss, history = fitted(epochs, resume=epochs == 3)
        assert len(history.records) == epochs and history.best_epoch == 0
        assert step.evaluate(VAL, 100, metric="loss")["loss"] == history.best_val
        assert loss.steps == history.best_loss["steps"] == 4


class Holds(nn.Module):
    """A loss that holds the model, to keep its weights small."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(p.square().sum() for p in self.model.parameters())


def test_averages_of_the_best_epoch_are_in_the_model_whatever_the_loss_holds():
    torch.manual_seed(0)
    model = joestar.nn.GraphSAGE(FEATURES, 8, 1, CLASSES).double()
    sampler = joestar.NeighborSampler(planted_graph(nodes=800, dtype=torch.float64), [3], seed=1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = joestar.compile(model, sampler, Holds(model), sgd, backend="eager", ema=0.9)
    history = step.fit(IDX, VAL, 3, 100, ema=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, history.best[name]), name
