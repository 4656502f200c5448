"""Tuning a training step: nothing that training reads is changed, results are cached, choices can be pinned."""

import copy
import gc
import json
import weakref

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar import fn
from joestar.errors import PaddingError
from joestar.runtime import tuning
from joestar.runtime.program import Program

from .common import CLASSES, FEATURES, planted_graph, train
from .tuned import FAST, IDX, PINS, adam, few, made_up_times, momentum, own_cache, small, traced

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    return own_cache(monkeypatch, tmp_path)


@pytest.fixture
def timed(monkeypatch):
    made_up_times(monkeypatch)


def bits(step) -> dict:
    """Everything that training reads and writes, as it is."""
    trainer = step._runner
    return copy.deepcopy(
        {
            "model": step.model.state_dict(),
            "optimizer": trainer.optimizer.optimizer.state_dict(),
            "gradients": [p.grad for p in step.model.parameters()],
            "random": torch.get_rng_state(),
            "seed": trainer.seed,
            "flag": trainer.state.flag,
            "epochs": step._epochs,
            "calls": step._calls,
            "versions": getattr(trainer.optimizer.optimizer, "_opt_called", None),
            "steps": step.counters.steps,
        }
    )


def same_bits(ours, theirs, name="state") -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            same_bits(ours[key], theirs[key], f"{name}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), name
        for position, pair in enumerate(zip(ours, theirs, strict=True)):
            same_bits(*pair, f"{name}[{position}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    else:
        assert ours == theirs, name


# --- nothing is changed ---


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("GraphSAGE", adam), pytest.param("GraphSAGE", momentum, marks=pytest.mark.fuzz),
     *(pytest.param("GAT", optimizer, marks=pytest.mark.slow) for optimizer in (adam, momentum))],
)  # fmt: skip
def test_state_is_the_same_bit_for_bit(model, optimizer, monkeypatch):
    """With the real clock: candidates run whole steps, padded and exact, and leave nothing behind."""
    monkeypatch.setattr(tuning, "SPAN", 0.0)
    step = small(optimizer, model, graph=planted_graph(dtype=torch.float64, degree=4))
    trainer = traced(step)
    before = bits(step)
    record = tuning.tune(trainer, IDX.int(), 100)
    same_bits(bits(step), before)
    assert len(record.candidates) >= 8 and sum(c.taken for c in record.candidates) == 1
    if optimizer is adam:
        assert not trainer.optimizer.optimizer.state, "Adam's state must not appear because of tuning"


def test_state_of_a_trained_step_is_the_same(timed):
    """Moments, step counts, gradients and running statistics that exist already."""
    step = few(tune=False)
    train(step, IDX, epochs=1)
    assert all(p.grad is not None for p in step.model.parameters())
    moments = {k: v.data_ptr() for k, v in next(iter(step._runner.optimizer.optimizer.state.values())).items()}
    before = bits(step)
    tuning.tune(step._runner, IDX.int(), 100)
    same_bits(bits(step), before)
    after = next(iter(step._runner.optimizer.optimizer.state.values()))
    assert {k: v.data_ptr() for k, v in after.items()} == moments, "a captured step holds on to them"


def test_state_survives_a_failure(monkeypatch):
    step = few()
    trainer = traced(step)
    before = bits(step)

    def fails(timer, launch, launches):
        launch()
        torch.rand(3)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(tuning.StepTimer, "_timed", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tuning.tune(trainer, IDX.int(), 100)
    same_bits(bits(step), before)


def test_training_is_that_of_the_choices(timed):
    """A tuned run equals a run under the same choices that was never tuned, and nearly one under the defaults."""
    tuned = few()
    losses = train(tuned, IDX)
    choices = next(c.choices for c in tuned.report().tuning.candidates if c.taken)
    assert choices, "every choice makes a step faster here"
    assert losses == train(small(tune=False, choices={**PINS, **choices}), IDX)
    assert losses == pytest.approx(train(small(tune=False), IDX), rel=1e-9)


def test_losers_are_freed(timed, monkeypatch):
    kept = []
    compile = Program.compile

    def noted(program, *args):
        kept.append(weakref.ref(program))
        return compile(program, *args)

    monkeypatch.setattr(Program, "compile", noted)
    step = few()
    train(step, IDX, epochs=1)
    gc.collect()
    alive = [ref() for ref in kept if ref() is not None]
    assert alive == [step._executors["train"].program] and len(kept) >= 4


# --- what is tried and taken ---


@pytest.mark.parametrize("model", ["GraphSAGE", pytest.param("GAT", marks=pytest.mark.fuzz)])
def test_the_winner_is_what_trains(model, timed):
    step = small(model=model, slack=0.03)
    train(step, IDX, epochs=1)
    report = step.report()
    record = report.tuning
    assert not record.cached and record.seconds > 0 and len(record.candidates) >= 8
    (taken,) = [c for c in record.candidates if c.taken]
    assert len(taken.choices) == max(len(c.choices) for c in record.candidates), "each choice makes a step faster"
    (program,) = [p for p in report.programs if p.kind == "train"]
    assert {site.key: site.taken for site in program.sites} | taken.choices == {s.key: s.taken for s in program.sites}
    default = next(c for c in record.candidates if not c.choices and c.slack == 0.03)
    assert taken.compiled_ms < default.compiled_ms and default.eager_ms == 10.0
    assert program.compiles == 1 and step.counters.recompiles == 0, "what was compiled to be timed goes on"
    assert report.counters.seconds["tuning"] > 0
    assert json.loads(report.to_json())["tuning"]["candidates"][0]["eager_ms"] == 10.0


def test_smaller_slacks_are_candidates(timed, monkeypatch):
    monkeypatch.setattr("joestar.profile.slacks.RISK", 1.0)
    step = few(slack=0.3)
    train(step, IDX, epochs=1)
    slacks = {c.slack for c in step.report().tuning.candidates}
    assert 0.3 in slacks and len(slacks) > 1


def test_pinned_choices_stay(timed):
    sites = traced(small(tune=False)).executor.program.sites
    key = next(site.key for site in sites if site.options[0] == FAST)
    step = small(choices={key: "aggregate-first"})
    train(step, IDX, epochs=1)
    assert all(key not in c.choices for c in step.report().tuning.candidates)
    sites = {site.key: site.taken for site in step._executors["train"].program.sites}
    assert sites[key] == "aggregate-first"


def test_a_candidate_that_cannot_be_padded_loses(timed, monkeypatch):
    compile = Program.compile

    def refuses(program, *args):
        if FAST in program.options.choices.values():
            raise PaddingError("no correct form")
        return compile(program, *args)

    monkeypatch.setattr(Program, "compile", refuses)
    step = small()
    losses = train(step, IDX, epochs=1)
    failed = [c for c in step.report().tuning.candidates if FAST in c.choices.values()]
    assert len(losses) == 4 and failed and all(c.eager_ms is None and not c.taken for c in failed)


def test_an_error_of_the_default_is_an_error(monkeypatch):
    monkeypatch.setattr(Program, "compile", lambda *args: (_ for _ in ()).throw(PaddingError("no correct form")))
    with pytest.raises(PaddingError, match="no correct form"):
        train(few(), IDX, epochs=1)


def test_predictions_of_a_tuned_step(timed):
    ours, theirs = few(), small(tune=False)
    for step in (ours, theirs):
        train(step, IDX, epochs=1)
    torch.testing.assert_close(ours.predict(IDX[:50]), theirs.predict(IDX[:50]), rtol=1e-9, atol=1e-9)


class WholeDegrees(torch.nn.Module):
    """Sources are scaled by degrees that are computed for the whole graph."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, CLASSES)

    def forward(self, blocks, x):
        scale = blocks[0].graph.in_degrees().clamp(min=1).float().rsqrt()[blocks[0].srcs.long()]
        h = self.first(blocks[0].pull(fn.copy_u(x * scale[:, None]), "sum")).relu()
        return self.second(blocks[1].pull(fn.copy_u(h), "mean"))


def test_variants_share_what_was_hoisted(timed, monkeypatch):
    held, compile = set(), Program.compile

    def noted(program, *args):
        constants = [id(role.tensor) for role in program.captured.roles if role.held]
        assert program.hoisted and all(id(h.value) in constants for h in program.hoisted)
        held.update(id(h.value) for h in program.hoisted)
        return compile(program, *args)

    monkeypatch.setattr(Program, "compile", noted)
    net = WholeDegrees()
    sampler = joestar.NeighborSampler(planted_graph(), [5, 3])
    options = {"backend": "eager", "tune": True}
    step = joestar.compile(net, sampler, F.cross_entropy, adam(net.parameters()), **options)
    first = {id(h.value) for h in traced(step).executor.program.hoisted}
    train(step, IDX, epochs=1)
    assert first == held and len(step.report().tuning.candidates) > 1
