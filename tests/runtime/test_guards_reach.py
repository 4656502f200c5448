"""What code reads of modules, classes and closures is watched; what only a trainer's methods touch is not."""

import collections
import functools
import sys
import types
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.settings import Settings
from tests.runtime.common import CLASSES, FEATURES, planted_graph

config = types.ModuleType("config_of_the_users")
"""Stands for a file of settings that a script imports."""


class Config:
    """Settings as constants of a class."""

    class Loss:
        """Further in."""

        smoothing = 0.1

    scale = 1.0
    table: ClassVar = {"a": 1.0}
    unread = 0


def doubled(x):
    return 2 * x


def shifted(x, by=1.0, *, times=1.0):
    return x * times + by


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setitem(sys.modules, config.__name__, config)
    for name, value in {"scale": 1.0, "weight": torch.ones(()), "inner": types.SimpleNamespace(rate=0.5)}.items():
        monkeypatch.setattr(config, name, value, raising=False)
    monkeypatch.setattr(config, "unread", 0, raising=False)
    for owner, name in ((Config, "scale"), (Config, "unread"), (Config.Loss, "smoothing")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(Config, "table", dict(Config.table))
    monkeypatch.setattr(doubled, "__code__", doubled.__code__)
    monkeypatch.setattr(shifted, "__defaults__", shifted.__defaults__)
    monkeypatch.setitem(shifted.__kwdefaults__, "times", 1.0)


class Reader(nn.Module):
    """Reads settings of every kind of owner."""

    def __init__(self):
        super().__init__()
        self.lin = joestar.nn.SAGEConv(FEATURES, CLASSES)
        self.config, self.constants = config, Config
        self.recent = collections.deque([1.0])
        self.history, self.best, self.epoch = [], 9.0, 0

    def forward(self, blocks, x):
        from config_of_the_users import scale

        h = shifted(doubled(self.lin(blocks[0], x))) * config.scale * config.inner.rate * config.weight * scale
        return h * Config.scale * self.config.scale * self.constants.table["a"] * self.recent[0] * self.gain

    @property
    def gain(self):
        """Through a property."""
        return Config.Loss.smoothing

    def record(self, loss):
        """What a trainer does: no part of the program."""
        self.history.append(loss)
        self.best, self.epoch = min(self.best, loss), self.epoch + 1
        config.unread += 1


def _guard(loss=F.cross_entropy):
    graph, model = planted_graph(nodes=400), Reader()
    return ChangeGuard(model, joestar.NeighborSampler(graph, [2]), graph, loss), model


def _module(model):
    config.scale = 2.0


def _in_a_module(model):
    config.inner.rate = 0.1


def _tensor_of_a_module(model):
    config.weight = torch.ones(())


def _class(model):
    Config.scale = 2.0


def _dict_of_a_class(model):
    Config.table["a"] = 2.0


def _class_in_a_class(model):
    Config.Loss.smoothing = 0.2


def _deque(model):
    model.recent[0] = 2.0


def _code(model):
    doubled.__code__ = (lambda x: 3 * x).__code__


def _defaults(model):
    shifted.__defaults__ = (2.0,)


def _keyword_default(model):
    shifted.__kwdefaults__["times"] = 2.0


CHANGES = {
    _keyword_default: r"shifted's default of times was changed from 1.0 to 2.0",
    _module: r"config.scale was changed from 1.0 to 2.0",
    _in_a_module: r"config.inner.rate was changed from 0.5 to 0.1",
    _tensor_of_a_module: r"config.weight was replaced by another tensor",
    _class: r"Config.scale was changed from 1.0 to 2.0",
    _dict_of_a_class: r"\.table\['a'\] was changed from 1.0 to 2.0",
    _class_in_a_class: r"Config.Loss.smoothing was changed from 0.1 to 0.2",
    _deque: r"model.recent was changed from \(1.0,\) to \(2.0,\)",
    _code: r"doubled was given other code \(edited and reloaded\) after compile",
    _defaults: r"shifted's default 0 was changed from 1.0 to 2.0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_code_reads_may_not_change(change):
    guard, model = _guard()
    guard.check()
    change(model)
    with pytest.raises(ChangedAfterCompileError, match=CHANGES[change]) as raised:
        guard.check()
    assert str(raised.value).endswith("Call joestar.compile again.")


def test_what_closures_hold():
    weight, settings, tensor = 1.0, Config, torch.ones(())

    def loss(logits, y):
        return F.cross_entropy(logits, y) * weight * settings.scale * tensor

    for number, message in enumerate((r"loss's weight was", r"Config.scale was", r"loss's tensor was replaced")):
        guard, _ = _guard(loss)
        guard.check()
        tensor.add_(1)  # in place: every step reads it
        guard.check()
        if number == 0:
            weight = 2.0
        elif number == 1:
            Config.scale = 3.0
        else:
            tensor = tensor * 2
        with pytest.raises(ChangedAfterCompileError, match=message):
            guard.check()


def test_keywords_of_partial():
    loss = functools.partial(F.cross_entropy, label_smoothing=0.1)
    guard, _ = _guard(loss)
    loss.keywords["label_smoothing"] = 0.2
    with pytest.raises(ChangedAfterCompileError, match=r"loss\['label_smoothing'\] was changed from 0.1 to 0.2"):
        guard.check()


class Trainer:
    """A loop with its loss as a method; counts and a history change in every step."""

    epoch: int = 0

    def __init__(self, graph, model):
        self.scale, self.history, self.best = 1.0, [], 9.0
        self.model, self.make = model, planted_graph
        self.step = joestar.compile(
            model, joestar.NeighborSampler(graph, [2]), self.loss, torch.optim.SGD(model.parameters(), 0.1),
            backend="eager",
        )  # fmt: skip

    def loss(self, logits, y):
        """The loss."""
        return F.cross_entropy(logits, y) * self.scale

    def fit(self):
        """An epoch."""
        for loss in self.step.epoch(torch.arange(60), 20):
            self.history.append(loss.item())
            self.model.record(loss.item())
            self.best, self.made = min(self.best, loss.item()), planted_graph
        self.epoch += 1
        Config.unread += 1


def test_what_only_a_trainer_touches_may_change():
    """Also where the loss is a method of the trainer, which holds all of it."""
    trainer = Trainer(planted_graph(nodes=400), Reader())
    for _ in range(2):
        trainer.fit()
    assert len(trainer.history) == len(trainer.model.history) == 6
    trainer.scale = 2.0
    with pytest.raises(ChangedAfterCompileError, match=r"\.scale was changed from 1.0 to 2.0"):
        trainer.fit()


def test_ranks_compare_what_code_reads_of_modules_and_classes():
    texts = Settings(Reader(), {}).texts()
    Config.scale, config.inner.rate = 2.0, 0.1
    other = Settings(Reader(), {}).texts()
    differing = {path for path in texts if texts[path] != other[path]}
    assert {f"{__name__}.Config.scale", f"{__name__}.config.inner.rate"} <= differing
