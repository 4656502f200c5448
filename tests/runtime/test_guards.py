"""What was traced is watched: every kind of setting that a program can have read, and nothing that it cannot."""

import argparse
import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import joestar
from joestar.errors import ChangedAfterCompileError
from joestar.runtime.facts import Entries
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.watch import Watched
from tests.runtime.common import CLASSES, FEATURES, planted_graph

SCALE = 2.0
OPTIONS = {"shift": 1.0}


@dataclasses.dataclass
class Settings:
    """A setting with settings."""

    depth: int = 2
    inner: types.SimpleNamespace = dataclasses.field(default_factory=lambda: types.SimpleNamespace(rate=0.5))


class Slotted:
    """An object without a dict."""

    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 3.0


class Double(nn.Module):
    """A parametrization."""

    def forward(self, w):
        return 2 * w


def helper(model, x):
    return x * model.known_to_helper


class Rich(nn.Module):
    """One of each kind of setting."""

    bias = 0.0

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(FEATURES, CLASSES)
        self.stack = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.ReLU())
        self.act = nn.ReLU()
        self.cfg = {"scale": 1.0, "deep": [{"p": [1, 2]}], "names": {"a", "b"}}
        self.settings = Settings()
        self.slotted = Slotted()
        self.args = argparse.Namespace(rate=0.1)
        self.function = torch.relu
        self.closure = (lambda factor: lambda x: x * factor)(2.0)
        self._hidden = 1
        self.fill = float("nan")
        self.limits = [float("nan"), 1]
        self.table = [torch.ones(2), torch.zeros(2)]
        self.optional = None
        self.known_to_helper = 1.0
        self.best = 0.0
        self.log = []
        self.register_buffer("mask", torch.ones(2))

    def forward(self, blocks, x):
        h = helper(self, self.act(self.stack(self.lin(x)))) * SCALE + OPTIONS["shift"] + self._hidden + self.bias
        if self.fill is None or self.optional or self.extra:
            return h
        h = h * self.cfg["scale"] * self.settings.depth * self.settings.inner.rate * self.slotted.factor
        return self.closure(self.function(h * self.args.rate)) + self.table[0] + self.limits[1] + self.mask


class Sampler(joestar.NeighborSampler):
    """A sampler with a setting in a dict."""

    def __init__(self, graph):
        super().__init__(graph, [2], seed=1)
        self.plan = {"hops": [2]}

    def sample(self, graph, seeds):
        return super().sample(graph, seeds) if self.plan["hops"] else []


def weighted(logits, y):
    return F.cross_entropy(logits, y) * SCALE


def _parts():
    graph = planted_graph(nodes=400)
    model, sampler = Rich(), Sampler(graph)
    return ChangeGuard(model, sampler, graph, weighted), model, sampler, graph


def _set(owner: str, name, value):
    """A change of ``model.<owner>``'s attribute or entry."""

    def change(model, sampler, graph):
        found = model
        for part in filter(None, owner.split(".")):
            found = getattr(found, part)
        if isinstance(found, (dict, list)):
            found[name] = value
        else:
            setattr(found, name, value)

    return change


def _hook(model, sampler, graph):
    model.act.register_forward_hook(lambda module, given, out: out)


def _parametrized(model, sampler, graph):
    parametrize.register_parametrization(model.lin, "weight", Double())


def _class(model, sampler, graph):
    model.act.__class__ = nn.ELU


def _nested(model, sampler, graph):
    model.cfg["deep"][0]["p"].append(3)


def _set_of_names(model, sampler, graph):
    model.cfg["names"].add("c")


def _trained_feature(model, sampler, graph):
    graph.ndata["x"].requires_grad_(True)


def _moved_data(model, sampler, graph):
    model.lin.weight.data = model.lin.weight.data.clone()


def _plan(model, sampler, graph):
    sampler.plan["hops"] = []


def _method(model, sampler, graph):
    model.forward = types.MethodType(lambda self, blocks, x: x, model)


def _removed(model, sampler, graph):
    del model.cfg["scale"]


def _closed_over(model, sampler, graph):
    model.closure.__closure__[0].cell_contents = 5.0


def _reordered(model, sampler, graph):
    model.stack._modules["0"] = model.stack._modules.pop("0")


def _feature(model, sampler, graph):
    graph.ndata["more"] = graph.ndata["x"].clone()


CHANGES = {
    "the type of a module": (_set("", "act", nn.ELU()), r"type\(model.act\) was changed from ReLU to ELU"),
    "the class of a module": (_class, r"type\(model.act\) was changed from ReLU to ELU"),
    "an entry of a dict": (_set("cfg", "scale", 100.0), r"model.cfg\['scale'\] was changed from 1.0 to 100.0"),
    "a removed entry": (_removed, r"model.cfg\['scale'\] was removed"),
    "a new entry": (_set("cfg", "more", 1), r"model.cfg\['more'\] was added"),
    "a nested list": (_nested, r"model.cfg\['deep'\]\[0\]\['p'\] was changed from \(1, 2\) to \(1, 2, 3\)"),
    "a set": (_set_of_names, r"model.cfg\['names'\] was changed"),
    "a dataclass": (_set("settings", "depth", 3), "model.settings.depth was changed from 2 to 3"),
    "a namespace in it": (_set("settings.inner", "rate", 0.1), "model.settings.inner.rate was changed from 0.5 to 0.1"),
    "a slot": (_set("slotted", "factor", 1.0), "model.slotted.factor was changed from 3.0 to 1.0"),
    "parsed arguments": (_set("args", "rate", 0.2), "model.args.rate was changed from 0.1 to 0.2"),
    "a function": (_set("", "function", torch.tanh), "model.function was changed"),
    "what a function closes over": (_closed_over, "model.closure's factor was changed from 2.0 to 5.0"),
    "a private name": (_set("", "_hidden", 2), "model._hidden was changed from 1 to 2"),
    "a bool for a number": (_set("", "_hidden", True), "model._hidden was changed from 1 to True"),
    "NaN to a number": (_set("", "fill", 0.0), "model.fill was changed from nan to 0.0"),
    "a tensor in a list": (_set("table", 0, torch.ones(2)), r"model.table\[0\] was replaced by another tensor"),
    "None to something": (_set("", "optional", 1), "model.optional was changed from None to 1"),
    "what only a helper reads": (_set("", "known_to_helper", 2.0), "model.known_to_helper was changed from 1.0 to 2.0"),
    "a new attribute that is read": (_set("", "extra", True), "model.extra was added"),
    "a new attribute before a class's": (_set("", "bias", 1.0), "model.bias was added"),
    "a new method": (_method, "model.forward.* was added"),
    "a hook": (_hook, r"model.act._forward_hooks\[0\] was added"),
    "a parametrization": (_parametrized, r"type\(model.lin\) was changed from Linear to ParametrizedLinear"),
    "layers in another order": (_reordered, r"model.stack.* was moved to another place"),
    "a trained feature": (_trained_feature, r"graph.ndata\['x'\] was switched to require gradients"),
    "other memory": (_moved_data, "model.lin.weight was replaced by another tensor"),
    "a sampler's dict": (_plan, r"sampler.plan\['hops'\] was changed from \(2,\) to \(\)"),
    "a new feature": (_feature, r"graph.ndata\['more'\] was added"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_read_may_not_change(name):
    change, message = CHANGES[name]
    guard, *parts = _parts()
    guard.check()
    change(*parts)
    with pytest.raises(ChangedAfterCompileError, match=message) as raised:
        guard.check()
    assert str(raised.value).endswith("Call joestar.compile again.")


class Numbered(nn.Module):
    """Layers under computed names, and a list of the user's."""

    def __init__(self):
        super().__init__()
        self.conv0, self.losses = nn.Linear(2, 2), []

    def forward(self, blocks, x):
        return getattr(self, f"conv{0}")(x)


def test_what_may_be_read_under_a_computed_name():
    """The message says why a list counts that no code names."""
    graph = planted_graph(nodes=400)
    model = Numbered()
    guard = ChangeGuard(model, Sampler(graph), graph)
    model.losses.append(1.0)
    with pytest.raises(ChangedAfterCompileError, match=r"model.losses was changed .* computed names \(getattr"):
        guard.check()


def test_globals_and_classes_that_the_code_reads(monkeypatch):
    for target, name, value, message in [
        (None, "SCALE", 3.0, r"SCALE was changed from 2.0 to 3.0"),
        (OPTIONS, "shift", 5.0, r"OPTIONS\['shift'\] was changed from 1.0 to 5.0"),
        (Rich, "bias", 1.0, r"Rich.bias was changed from 0.0 to 1.0"),
        (Rich, "forward", lambda self, blocks, x: x, r"Rich.forward was"),
        (None, "helper", lambda model, x: x, r"helper was"),
    ]:
        guard, *_ = _parts()
        with monkeypatch.context() as patch:
            if target is OPTIONS:
                patch.setitem(target, name, value)
            else:
                patch.setattr(target or __import__(__name__, fromlist=["x"]), name, value)
            with pytest.raises(ChangedAfterCompileError, match=message):
                guard.check()
        guard.check()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules(kind):
    guard, *_ = _parts()
    hook = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        with pytest.raises(ChangedAfterCompileError, match=r"torch.nn's global \w+_hooks\[0\] was added"):
            guard.check()
    finally:
        hook.remove()
    guard.check()


def test_what_no_program_reads_may_change():
    guard, model, sampler, _ = _parts()
    model.best = 0.9  # set in __init__, read by no method
    model.best_epoch = 3
    model.log.append({"loss": 1.0})
    sampler.started = 1.5
    model.act.note = "mine"
    guard.check()
    model.eval()
    guard.check()
    model.train()
    model.stack.eval()
    guard.check()
    model.lin.weight.grad = torch.zeros_like(model.lin.weight)
    model.lin.weight.requires_grad_(False)  # followed
    model.register_state_dict_post_hook(lambda *args: None)
    model.cfg = {"scale": 1.0, "deep": [{"p": [1, 2]}], "names": {"b", "a"}}  # equal: the same program
    sampler.fanouts = [2]
    model.fill, model.limits = -float("nan"), [float("nan"), 1]  # other objects: NaN is itself
    guard.check()
    model.cfg["scale"] = 2.0  # the new one is watched, too
    with pytest.raises(ChangedAfterCompileError, match=r"model.cfg\['scale'\]"):
        guard.check()


def test_nothing_is_walked_while_nothing_changes(monkeypatch):
    guard, model, *_ = _parts()
    walks = []
    monkeypatch.setattr(Watched, "_note_module", lambda self, *args: walks.append(args))
    guard.check()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    guard.check()
    assert not walks


def test_cycles_and_foreign_objects():
    guard, model, sampler, graph = _parts()
    model.settings.inner.owner = model
    model.settings.inner.loop = [model.settings]
    model.settings.random = torch.Generator()
    guard = ChangeGuard(model, sampler, graph, nn.CrossEntropyLoss(label_smoothing=0.1))
    guard.check()
    guard._roots["loss"].label_smoothing = 0.0
    with pytest.raises(ChangedAfterCompileError, match=r"loss.label_smoothing was changed from 0.1 to 0.0"):
        guard.check()


def test_a_trained_model_has_not_changed():
    graph = planted_graph(nodes=400)
    model = joestar.nn.GraphSAGE(FEATURES, 8, 2, out_channels=CLASSES, dropout=0.5, norm="batch_norm")
    sampler = joestar.NeighborSampler(graph, [3, 2])
    step = joestar.compile(
        model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), backend="eager"
    )
    list(step.epoch(torch.arange(60), 20))
    step.predict(torch.arange(10))
    assert step._guard._watched.untouched()
    model.act = nn.ELU()
    for use in (lambda: next(step.epoch(torch.arange(60), 20)), lambda: step.predict(torch.arange(4))):
        with pytest.raises(ChangedAfterCompileError, match=r"type\(model.act\) was changed from ReLU to ELU"):
            use()


def test_the_same_keys_in_other_dicts_are_another_content():
    one, other = {"a": 1, "b": 2}, {"c": 3}
    entries = Entries([one, other])
    assert entries.same()
    one["b"] = 2
    assert entries.same()
    kept = dict(other)
    other.clear()
    other.update({"b": one.pop("b")} | kept)
    assert not entries.same()
