"""Choices of tuned steps that outlive a process: the cache on disk, and those that are saved and pinned."""

import json

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar import fn
from joestar.errors import ConfigError
from joestar.profile import tuner
from joestar.profile.choices import choices_folder
from joestar.runtime import tuning

from .common import CLASSES, FEATURES, planted_graph, train
from .tuned import IDX, adam, few, made_up_times, momentum, never, own_cache, small, traced

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return own_cache(monkeypatch, tmp_path)


@pytest.fixture
def timed(monkeypatch):
    made_up_times(monkeypatch)


def test_cached_choices_are_not_timed(timed, monkeypatch, cache):
    first = few()
    losses = train(first, IDX, epochs=1)
    record = first.report().tuning
    assert [path.stem for path in cache.iterdir()] == [record.key]
    monkeypatch.setattr(tuning.StepTimer, "_timed", never)
    monkeypatch.setattr(tuning.StepTimer, "__init__", never)
    monkeypatch.setattr(tuner, "tune", never)
    second = few()
    assert train(second, IDX, epochs=1) == losses
    again = second.report().tuning
    assert again.cached and (again.key, again.candidates) == (record.key, record.candidates)
    programs = [s._executors["train"].program for s in (first, second)]
    assert [s.taken for s in programs[0].sites] == [s.taken for s in programs[1].sites]
    assert second.counters.warm_up_batches == first.counters.warm_up_batches


def other_graph():
    return small(graph=planted_graph(dtype=torch.float64, degree=5))


OTHERS = {
    "graph": other_graph,
    "width": lambda: small(model_options={"norm": "batch_norm", "out_channels": CLASSES + 1}),
    "fanouts": lambda: small(fanouts=[4, 3]),
    "optimizer": lambda: small(momentum),
    "slack": lambda: small(slack=0.05),
}


def key_of(step, batch: int = 100) -> str:
    from joestar.profile.choices import cache_key

    return cache_key(tuning.tuning_facts(traced(step), batch))


def test_the_key_is_that_of_the_same_situation():
    base, other_weights = key_of(small()), small(seed=5)
    assert key_of(other_weights) == base, "initial weights do not matter"
    assert key_of(other_weights, batch=50) != base
    keys = {name: key_of(make()) for name, make in OTHERS.items()}
    assert len({base, *keys.values()}) == 1 + len(keys), keys


def test_a_damaged_cache_is_replaced(timed, cache):
    train(few(), IDX, epochs=1)
    (file,) = cache.iterdir()
    for text in ("{", json.dumps({**json.loads(file.read_text()), "choices": {"order:gone": "left"}})):
        file.write_text(text)
        step = few()
        train(step, IDX, epochs=1)
        assert not step.report().tuning.cached
        assert "order:gone" not in file.read_text()


def test_a_cache_that_cannot_be_written(timed, cache):
    cache.write_text("no folder")
    step = few()
    train(step, IDX, epochs=1)
    assert not step.report().tuning.cached and choices_folder() == cache


def test_tuning_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("JOESTAR_TUNE", "0")
    monkeypatch.setattr(tuning.StepTimer, "__init__", never)
    step = small()
    train(step, IDX, epochs=1)
    assert step.report().tuning.candidates == []


# --- pinning ---


def test_saved_choices_are_taken_over(timed, tmp_path):
    step = few(slack=0.1)
    losses = train(step, IDX, epochs=1)
    step.save_choices(tmp_path / "pins.json")
    pinned = small(tune=False, choices=tmp_path / "pins.json")
    assert train(pinned, IDX, epochs=1) == losses
    taken = [{s.key: s.taken for s in made._executors["train"].program.sites} for made in (step, pinned)]
    assert taken[0] == taken[1] != {s.key: s.default for s in step._executors["train"].program.sites}
    assert pinned._executors["train"].slack == step._executors["train"].slack
    assert pinned.report().tuning is None
    given = small(tune=False, choices=tmp_path / "pins.json", slack=0.2)
    train(given, IDX, epochs=1)
    assert given._executors["train"].slack == 0.2, "an argument counts more than the file"
    pinned.predict(IDX[:10])


def test_the_callable_form_takes_pinned_choices(tmp_path):
    (tmp_path / "pins.json").write_text(json.dumps({"format": 1, "choices": {"backward:hop0": "scatter"}}))
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(FEATURES, 16, 2, CLASSES)
    sampler = joestar.NeighborSampler(planted_graph(), [5, 3])
    compiled = joestar.compile(net, sampler, backend="eager", choices=tmp_path / "pins.json")
    with pytest.raises(ConfigError, match="nothing was chosen yet"):
        compiled.save_choices(tmp_path / "own.json")
    compiled(IDX[:50]).sum().backward()
    compiled.save_choices(tmp_path / "own.json")
    assert json.loads((tmp_path / "own.json").read_text())["choices"]["backward:hop0"] == "scatter"


def test_pins_of_another_model(tmp_path):
    (tmp_path / "pins.json").write_text(json.dumps({"format": 1, "choices": {"order:other": "update-first"}}))
    with pytest.raises(ConfigError, match="'order:other' belongs to no place of this program"):
        train(small(tune=False, choices=tmp_path / "pins.json"), IDX, epochs=1)


def test_tuning_needs_a_padded_training_step():
    graph = planted_graph()
    net = joestar.nn.GraphSAGE(FEATURES, 16, 2, CLASSES)
    with pytest.raises(ConfigError, match="tune=True times whole padded training steps"):
        joestar.compile(net, joestar.NeighborSampler(graph, [5, 3]), tune=True)
    with pytest.raises(ConfigError, match="pin choices that a tuned step saved"):
        joestar.compile(
            net, joestar.NeighborSampler(graph, [5, 3]), F.cross_entropy, adam(net.parameters()), tune=True,
            execution="exact",
        )  # fmt: skip


class OnlyWhileTraining(torch.nn.Module):
    """An aggregation with gradients that evaluation leaves out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, CLASSES)

    def forward(self, blocks, x):
        h = self.first(blocks[0].pull(fn.copy_u(x), "mean")).tanh()
        own = h[: blocks[1].num_dst]
        return self.second(own.cos() * blocks[1].pull(fn.copy_u(h), "mean").sin() if self.training else own)


def test_predictions_leave_out_choices_of_training(tmp_path):
    choices = {"backward:hop0": "scatter"}
    net = OnlyWhileTraining()
    sampler = joestar.NeighborSampler(planted_graph(), [5, 3])
    step = joestar.compile(net, sampler, F.cross_entropy, adam(net.parameters()), backend="eager", choices=choices)
    train(step, IDX, epochs=1)
    assert step.predict(IDX[:20]).shape == (20, CLASSES)
    taken = {p.kind: [(s.key, s.taken) for s in p.sites if s.key in choices] for p in step.report().programs}
    assert taken == {"train": [("backward:hop0", "scatter")], "predict": []}
