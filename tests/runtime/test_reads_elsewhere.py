"""What functions read of a model that no code of its class names: attributes that are functions, a registry."""

import functools
import types
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

IDX = torch.arange(100)
REGISTRY = {}
"""Of functions, by name: code names the registry alone."""


class Settings:
    """A table of its class, which an instance's property reads."""

    table: ClassVar = {"a": 1.0}
    rates: ClassVar = (1.0, [2.0])

    @property
    def scale(self) -> float:
        """Of the table."""
        return self.table["a"]

    @property
    def rate(self) -> float:
        """Of what a constant holds."""
        return self.rates[1][0]


class Held(nn.Module):
    """A layer, and what functions read of it."""

    def __init__(self, way: str, function):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, CLASSES).double()
        self.lists, self.pair, self.settings, self.unread = ([1.0],), (1.0, 2.0), Settings(), 0
        self.one, self.some, self.partly = None, [], None
        REGISTRY["it"] = function
        if way == "attribute":
            self.one = function
        elif way == "list":
            self.some = [function]
        elif way == "partial":
            self.partly = functools.partial(lambda f, module: f(module), function)
        elif way == "method":
            self.one = types.MethodType(function, self)
        self.way = way

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        if self.way == "attribute":
            return h * self.one(self)
        if self.way == "method":
            return h * self.one()
        if self.way == "list":
            return h * self.some[0](self)
        if self.way == "partial":
            return h * self.partly(self)
        return h * REGISTRY["it"](self)


READS = {
    "a list in a tuple": (lambda m: m.lists[0][0], lambda m: m.lists[0].__setitem__(0, 3.0)),
    "another tuple": (lambda m: m.pair[1], lambda m: setattr(m, "pair", (1.0, 3.0))),
    "a class's table": (lambda m: m.settings.scale, lambda m: m.settings.table.__setitem__("a", 3.0)),
    "a list in a class's constant": (lambda m: m.settings.rate, lambda m: m.settings.rates[1].__setitem__(0, 3.0)),
    "what is not there": (lambda m: m.__dict__.get("late", 1.0), lambda m: setattr(m, "late", 3.0)),
    "whether it is there": (lambda m: 1.0 + ("late" in vars(m)), lambda m: setattr(m, "late", 3.0)),
    "what its class lacks": (lambda m: type(m).__dict__.get("late", 1.0), lambda m: setattr(type(m), "late", 3.0)),
}
WAYS = ("attribute", "method", "list", "partial", "registry")


def epoch_of(model: Held):
    """Four steps."""
    sampler = joestar.NeighborSampler(planted_graph(dtype=torch.float64), [3], seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager").epoch(IDX, 25)


class Slotted:
    """Has no ``__dict__`` to ask for."""

    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


class Lazy:
    """Keeps what it has computed once."""

    def __init__(self):
        self.scale = 2.0

    @functools.cached_property
    def big(self) -> float:
        """From its first read on in ``__dict__``."""
        return 100.0


@pytest.mark.parametrize(
    "read",
    [
        lambda m: 2.0 if getattr(m.settings, "__dict__", None) is None else 1.0,
        lambda m: 1.0 if hasattr(m.settings, "__dict__") else 2.0,
        lambda m: vars(m.lazy)["scale"],
    ],
)
def test_attributes_that_are_asked_for_as_a_whole(read):
    """Objects without any, and those that keep what they compute, are no change."""
    model = Held("registry", read)
    model.settings, model.lazy = Slotted(), Lazy()
    assert read(model) == 2.0
    epoch = epoch_of(model)
    next(epoch)
    assert model.lazy.big == 100.0
    assert len(list(epoch)) == 3


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    Settings.table["a"], Settings.rates[1][0] = 1.0, 2.0
    REGISTRY.clear()
    if "late" in vars(Held):
        del Held.late


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.every(8)
def test_what_functions_read_is_watched(way, read):
    function, change = READS[read]
    model = Held(way, function)
    epoch = epoch_of(model)
    next(epoch)
    model.unread += 1  # nobody reads it
    next(epoch)
    change(model)
    with pytest.raises(ChangedAfterCompileError):
        list(epoch)
