"""Interrupts and errors in the middle of a step: it happens as a whole, or as if it had never begun."""

import contextlib
import functools
import inspect
import itertools
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fuzz.broken import broken_at, counted
from torch import nn

import joestar
from joestar.runtime import undone
from joestar.runtime.interrupts import Whole
from joestar.runtime.runner import StepRunner
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph, pressed, tight_bounds

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(2, 182), torch.arange(182, 260)


class Net(nn.Module):
    """Writes: statistics of a norm, and a count."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = joestar.nn.SAGEConv(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.register_buffer("steps", torch.zeros(()))
        self.double()

    def forward(self, blocks, x):
        if self.training:
            self.steps += 1
        return self.head(self.norm(self.conv(blocks[0], x)).relu())


PLACES = ("forward", "in backward", "backward", "optimizer", "behind")


def made(**options):
    torch.manual_seed(0)
    graph, net = planted_graph(nodes=400, dtype=torch.float64), Net()
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    sampler = joestar.NeighborSampler(graph, [3], seed=1)
    return joestar.compile(net, sampler, F.cross_entropy, sgd, backend="eager", **options)


def state(step) -> dict:
    moments = {f"momentum {n}": v["momentum_buffer"] for n, v in enumerate(step.optimizer.state.values())}
    return {name: value.clone() for name, value in (step.model.state_dict() | moments).items()}


@pytest.fixture(scope="module")
def undisturbed():
    step = made()
    return [float(loss) for loss in step.epoch(IDX, 30)], state(step)


def goes_on(step, epoch, losses: list[float], undisturbed) -> None:
    """Takes the other steps of an epoch that was interrupted: all is as if it had not been."""
    if epoch.position > len(losses):
        losses.append(float(epoch.latest()))
    losses += [float(loss) for loss in epoch]
    assert losses == pytest.approx(undisturbed[0], rel=1e-9)
    for name, value in state(step).items():
        torch.testing.assert_close(value, undisturbed[1][name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", [{}, {"execution": "exact"}, {"slack": 0.0, "warm_up": 1, "patience": 99}])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.every(2)
def test_an_interrupted_step_is_whole(monkeypatch, undisturbed, options, after, place):
    """The first step, which compiles, too; padded, exact, and such as are made again exactly."""
    if "slack" in options:
        tight_bounds(monkeypatch, 1.0)
    step, losses = made(**options), []
    step._ready(IDX, 30)  # so that there is a program
    epoch = step.epoch(IDX, 30)
    press = functools.partial(signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), pressed(step, place, press, after):
        losses.extend(float(loss) for loss in epoch)
    goes_on(step, epoch, losses, undisturbed)


@pytest.mark.parametrize(
    "code", ["run.position = position + 1", "self.counters.steps += 1", "return run.loss(position)"]
)
def test_a_step_that_happened_is_not_taken_again(undisturbed, code):
    """In front of the first of these lines it was: the optimizer's step was made, and the position was of before."""
    source, first = inspect.getsourcelines(StepRunner.take)
    (line,) = [first + place for place, text in enumerate(source) if text.strip().startswith(code)]
    step, losses = made(), []
    step._ready(IDX, 30)
    epoch = step.epoch(IDX, 30)
    with pytest.raises(KeyboardInterrupt), broken_at((inspect.getfile(StepRunner), line, 2), kill=False):
        losses.extend(float(loss) for loss in epoch)
    goes_on(step, epoch, losses, undisturbed)


@pytest.mark.parametrize("use", ["evaluate", "weights"])
def test_parameters_are_their_own_wherever_scores_of_averages_are_interrupted(use):
    """Ctrl-C within the exchange of parameters and averages left some of each: ``fit`` saved and went on with them."""
    step = made(ema=0.9)
    list(step.epoch(IDX, 60))
    step.evaluate(VAL, 60)
    weights, averages = step.weights(), {name: value.clone() for name, value in step.ema.items()}
    used = (lambda: step.evaluate(VAL, 60, ema=True)) if use == "evaluate" else (lambda: step.weights(ema=True))
    with counted() as lines:
        used()
    places = [
        (file, line, number)
        for (file, line), times in lines.items() if Path(file).stem in ("scoring", "update", "interrupts")
        for number in range(times)
    ]  # fmt: skip
    assert {Path(file).stem for file, _, _ in places} == {"scoring", "update", "interrupts"}
    for place in places:
        with pytest.raises(KeyboardInterrupt), broken_at(place, kill=False) as came:
            used()
        assert came[0]
        for name, value in step.weights().items():
            assert torch.equal(value, weights[name]), (place, name)
        for name, value in step.ema.items():
            assert torch.equal(value, averages[name]), (place, name)


def test_an_epoch_that_is_to_be_gone_on_with_is_kept_wherever_its_making_is_interrupted():
    """It was forgotten where Ctrl-C came as it was made: the next one began, and lost its steps."""
    step, states = made(), []
    epoch = step.epoch(IDX, 30)
    next(epoch)
    states.append(step.state_dict())
    other = made()
    other.load_state_dict(states[0])
    with counted() as lines:
        other.epoch(IDX, 30)
    places = [(file, line, 0) for file, line in lines if Path(file).stem == "epochs"]
    assert len(places) > 10
    for place in places:
        other.load_state_dict(states[0])
        with pytest.raises(KeyboardInterrupt), broken_at(place, kill=False) as came:
            other.epoch(IDX, 30)
        assert came[0] and [e["number"] for e in other.state_dict()["under_way"]] == [0], place
        again = other.epoch(IDX, 30)
        assert again.position == 1


def test_the_epoch_behind_one_that_was_broken_off_as_it_began_has_a_number_of_its_own():
    """Ctrl-C between an epoch's number and the next one's: two epochs had the same order and masks."""
    step, other = made(), made()
    begun = step.epoch(IDX, 30)
    next(begun)
    state = step.state_dict() | {"epochs": 0}
    assert state["under_way"][0]["number"] == 0
    other.load_state_dict(state)
    list(other.epoch(IDX, 30))
    following = other.epoch(IDX, 30)
    next(following)
    assert following.number == 1 and other._epochs == 2


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("place", ["forward", "in backward", "backward"])
def test_an_error_in_front_of_the_optimizer_leaves_no_trace(undisturbed, place, execution):
    """Of a hook of the user's, or because memory is short."""

    def fail():
        raise torch.OutOfMemoryError("made up")

    step, losses = made(execution=execution), []
    step._ready(IDX, 30)
    epoch = step.epoch(IDX, 30)
    with pytest.raises(torch.OutOfMemoryError, match="made up"), pressed(step, place, fail, 2):
        losses.extend(float(loss) for loss in epoch)
    goes_on(step, epoch, losses, undisturbed)


def fitted(
    folder, around=lambda step: contextlib.nullcontext(), called=lambda: None, logged=lambda values, steps: None
):
    """(records, state, best epoch) of a run with a schedule per step, that goes on with what is in the folder.

    Args:
        around: of a step, what the run is in; called: whenever an epoch is scored; logged: behind it.
    """
    step = made(deterministic=True)
    step._ready(IDX, 30)

    def score(out, y):
        called()
        return -float(F.cross_entropy(out, y))

    schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=18)
    with around(step):
        history = step.fit(
            IDX, VAL, 3, 30, metric={"ours": score}, mode="max", checkpoints=joestar.Checkpoints(folder), resume=True,
            loggers=logged, patience=2, scheduler=schedule,
        )  # fmt: skip
    return [(r.loss, r.val, r.lr) for r in history.records], state(step), history.best_epoch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "at", [("in backward", 3), ("behind", 3), ("optimizer", 8), ("scored", 1), ("behind", 11), ("logged", 1)]
)
@pytest.mark.each("at")
def test_fit_goes_on_with_the_bits_of_an_unbroken_run(tmp_path, number, at):
    """Schedules per step; interrupted within steps, behind the last of an epoch, and while it is scored."""
    place, after = at
    scores = itertools.count()

    def around(step):
        press = functools.partial(signal.raise_signal, number)
        return pressed(step, place, press, after) if place in PLACES else contextlib.nullcontext()

    def called():
        if place == "scored" and next(scores) == after:
            signal.raise_signal(number)

    def logged(values, steps):
        if place == "logged" and values["epoch"] == after:
            signal.raise_signal(number)

    expected = fitted(tmp_path / "whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(tmp_path / "broken", around, called, logged)
    records, values, best = fitted(tmp_path / "broken")
    assert records == expected[0] and best == expected[2]
    assert all(torch.equal(value, expected[1][name]) for name, value in values.items())


def test_a_run_that_is_killed_behind_the_last_step_of_an_epoch_is_not_trained_longer(tmp_path):
    """The checkpoint of that step is from before the epoch was scored."""
    saved, steps = joestar.Checkpoints(tmp_path), []

    def killed(out, y):
        raise MemoryError("stands for a process that is killed")

    def fit(metric):
        step = make_step(model_options={"dropout": 0.0})
        given = {"checkpoints": saved, "checkpoint_every": 2, "resume": True, "on_step": steps.append}
        return step.fit(IDX, VAL, 2, 90, metric={"ours": metric}, mode="max", **given)

    with pytest.raises(MemoryError):
        fit(killed)
    records = fit(lambda out, y: 0.0).records
    assert len(records) == 2 and len(steps) == 4
    again = make_step(model_options={"dropout": 0.0}).fit(
        IDX, VAL, 2, 90, metric={"ours": lambda out, y: 0.0}, mode="max"
    )
    assert [record.loss for record in records] == [record.loss for record in again.records]


def test_what_is_large_is_copied_where_everything_is_to_be_kept(monkeypatch):
    """A memory bank, in steps that compile; else what a step wrote of it stays."""
    monkeypatch.setattr(undone, "KEPT", 100)

    def fail(written):
        raise MemoryError

    def left(size: int, everything: bool, happened: bool) -> list[float]:
        bank, undo, found = [torch.zeros(size)], undone.Undone(), []
        for _ in range(2):
            with pytest.raises(MemoryError), undo(bank, everything, lambda: happened):
                fail(bank[0].add_(1))
            found.append(float(bank[0].max()))
        return found

    assert left(25, False, False) == left(26, True, False) == [0, 0]
    assert left(26, False, False) == left(25, False, True) == [1, 2]


def test_signals_wait_for_the_end_and_a_second_acts_at_once():
    handler, done = signal.getsignal(signal.SIGINT), []

    def act(*what, error=None):
        with Whole():
            for thing in what:
                thing() if callable(thing) else done.append(thing)
            if error is not None:
                raise error

    send = functools.partial(signal.raise_signal, signal.SIGINT)
    for what in ((send, "waited"), (functools.partial(act, send, "inner"), "outer"), (send, send, "never")):
        with pytest.raises(KeyboardInterrupt):
            act(*what)
    with pytest.raises(ValueError, match="its own"):
        act(error=ValueError("its own"))
    thread = threading.Thread(target=act, args=("another thread",))
    thread.start()
    thread.join()
    assert done == ["waited", "inner", "outer", "another thread"] and signal.getsignal(signal.SIGINT) is handler
