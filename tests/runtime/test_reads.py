"""What a program reads of objects that are not the user's own is watched, too: it is part of the program."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

IDX = torch.arange(100)
NAME = "JOESTAR_TEST_NAMED"


class Reading(nn.Module):
    """Settings that are kept where no attribute of the model shows them."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, CLASSES).double()
        self.held = []

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x) * float(os.environ["JOESTAR_TEST_SCALE"])
        h = h * float(os.getenv("JOESTAR_TEST_OTHER", "1.0")) + float(os.environ.get(NAME, "1.0"))
        if "JOESTAR_TEST_FLAG" in os.environ:
            h = h * 2
        optimizer, scheduler = self.held
        return h * optimizer.param_groups[0]["lr"] / scheduler._last_lr[0] + scheduler.last_epoch


@pytest.fixture(scope="module")
def step():
    """Trained for a step: a capture takes a second."""
    os.environ["JOESTAR_TEST_SCALE"] = "2.0"
    graph, model = planted_graph(dtype=torch.float64), Reading()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model.held += [optimizer, scheduler]
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [3], seed=1), F.cross_entropy, optimizer, backend="eager"
    )
    next(step.epoch(IDX, 50))
    yield step
    del os.environ["JOESTAR_TEST_SCALE"]


VARIABLES = {
    "another value": (
        "JOESTAR_TEST_SCALE",
        "3.0",
        r"os.environ\['JOESTAR_TEST_SCALE'\] was changed from '2.0' to '3.0'",
    ),
    "gone": ("JOESTAR_TEST_SCALE", None, r"os.environ\['JOESTAR_TEST_SCALE'\] was changed from '2.0' to None"),
    "not there when read": ("JOESTAR_TEST_OTHER", "5", r"os.environ\['JOESTAR_TEST_OTHER'\] was changed from None to"),
    "asked for": ("JOESTAR_TEST_FLAG", "1", r"os.environ\['JOESTAR_TEST_FLAG'\] was changed from None to '1'"),
    "named elsewhere": (NAME, "1", rf"os.environ\['{NAME}'\] was changed from None to '1'"),
}


@pytest.mark.parametrize("what", VARIABLES)
def test_variables_of_the_environment(step, monkeypatch, what):
    name, value, message = VARIABLES[what]
    with monkeypatch.context() as patch:
        patch.setenv("JOESTAR_TEST_UNREAD", "1")
        step.epoch(IDX, 50)
        if value is None:
            patch.delenv(name)
        else:
            patch.setenv(name, value)
        for use in (lambda: next(step.epoch(IDX, 50)), lambda: step(IDX), lambda: step.predict(IDX)):
            with pytest.raises(ChangedAfterCompileError, match=message):
                use()
    next(step.epoch(IDX, 50))


def test_between_two_steps_of_an_epoch(step, monkeypatch):
    epoch = step.epoch(IDX, 50)
    next(epoch)
    with monkeypatch.context() as patch:
        patch.setenv("JOESTAR_TEST_SCALE", "3.0")
        with pytest.raises(ChangedAfterCompileError, match="JOESTAR_TEST_SCALE"):
            next(epoch)


def test_learning_rates_and_counters_of_others(step):
    optimizer, scheduler = step.model.held
    before = step.weights()
    optimizer.param_groups[0]["lr"] = 0.05
    message = (
        r"model.held\[0\].param_groups\[0\]\['lr'\] was 0.1 when it was read, at .*test_reads.py:\d+ in forward: "
        r"return h \* .*, and is 0.05 now; .* belongs into a buffer, .* Call joestar.compile again"
    )
    with pytest.raises(ChangedAfterCompileError, match=message):
        next(step.epoch(IDX, 50))
    optimizer.param_groups[0]["lr"] = 0.1
    next(step.epoch(IDX, 50))
    known = scheduler.last_epoch, scheduler._last_lr
    for name, value, message in (("last_epoch", 1, "last_epoch was 0 when"), ("_last_lr", [0.5], r"_last_lr\[0\] was")):
        setattr(scheduler, name, value)
        with pytest.raises(ChangedAfterCompileError, match=message):
            next(step.epoch(IDX, 50))
        scheduler.last_epoch, scheduler._last_lr = known
    del scheduler._last_lr
    with pytest.raises(ChangedAfterCompileError, match="and is gone now"):
        next(step.epoch(IDX, 50))
    scheduler._last_lr = known[1]
    assert any(not torch.equal(value, before[name]) for name, value in step.weights().items())


def test_exact_predictions(step):
    optimizer, _ = step.model.held
    before = step.predict(IDX, full=True)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(ChangedAfterCompileError, match=r"was 0\.1 when it was read"):
        step.predict(IDX, full=True)
    optimizer.param_groups[0]["lr"] = 0.1
    assert torch.equal(step.predict(IDX, full=True), before)


def test_what_is_watched_anyway_is_not_read_twice(step):
    names = [read.name for read in step._executors["train"].program.captured.reads.others]
    assert not [name for name in names if "held" not in name and "environ" not in name and "__closure__" not in name]
