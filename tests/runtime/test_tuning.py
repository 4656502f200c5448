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
from joestar.errors import ConfigError, PaddingError
from joestar.profile import tuner
from joestar.profile.choices import cache_folder
from joestar.profile.sizes import step_key
from joestar.runtime import tuning
from joestar.runtime.program import Program

from .common import CLASSES, FEATURES, make_step, planted_graph, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(100, 500)
FAST = "update-first"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    monkeypatch.delenv("JOESTAR_TUNE", raising=False)
    return tmp_path / "choices"


@pytest.fixture
def timed(monkeypatch):
    """Every candidate carries out a step; the time is made up: each choice makes a step 10 % faster."""

    measure = tuning.StepTimer.milliseconds

    def noted(timer, candidate, round):
        timer.candidate = candidate
        return measure(timer, candidate, round)

    def milliseconds(timer, launch, launches):
        if launches == 1:
            launch()
        return 10.0 * 0.9 ** len(timer.candidate.choices)

    monkeypatch.setattr(tuning.StepTimer, "milliseconds", noted)
    monkeypatch.setattr(tuning.StepTimer, "_timed", milliseconds)


def never(*args):
    raise AssertionError("nothing may be timed")


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2, weight_decay=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9, nesterov=True)


def small(optimizer=adam, model="GraphSAGE", **options):
    options = {"model_options": {"norm": "batch_norm"}, "optimizer": optimizer, "tune": True, **options}
    return make_step(model=model, **options)


PINS = {"order:model_convs_1_lin_l_weight": "update-first", "backward:hop0": "transposed"}


def few(**options):
    """A step with a third of the candidates, where it does not matter what they are."""
    return small(choices=PINS, **options)


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


def traced(step):
    """The step's trainer, its program captured but not compiled."""
    trainer = step._runner
    trainer.executor.program.trace(IDX[:100].int(), step_key(trainer.seed, 0, 0, "cpu"))
    return trainer


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


# --- the cache ---


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
    assert not step.report().tuning.cached and cache_folder() == cache


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
