"""Schedulers in ``fit``: their state in checkpoints, and those that are refused before the first step."""

import io
import math
from collections import Counter

import pytest
import torch
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

import joestar
from joestar.errors import CheckpointError, ConfigError, JoestarWarning
from joestar.runtime.checkpoint import storable
from joestar.runtime.schedules import advance, take_over
from tests.runtime.common import make_step

pytestmark = [
    pytest.mark.usefixtures("cheapest_captures"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate", "ignore:Detected call of `lr_scheduler.step"),
]

IDX, VAL = torch.arange(0, 400), torch.arange(500, 700)
STEPS = 8


class Warmup:
    """A function with a state."""

    def __init__(self):
        self.calls, self.counts, self.pair = 0, Counter(), (1, 2)

    def __call__(self, number):
        self.calls += 1
        self.counts.update([number % 3])
        return 0.9**number + 0.01 * len(self.counts.most_common()) + 0.001 * self.calls


class Own:
    """Without a base class, and over no optimizer that could be seen."""

    def __init__(self, optimizer):
        self._own, self.taken = optimizer, Counter()

    def step(self):
        self.taken.update("s")
        for group in self._own.param_groups:
            group["lr"] = 0.1 / (1 + self.taken.total())

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class OwnNumber(Own):
    """Whose state is no dict."""

    def state_dict(self):
        return self.taken.total()

    def load_state_dict(self, state):
        self.taken = Counter(s=state)


class OwnList(OwnNumber):
    def state_dict(self):
        return [self.taken.total()]

    def load_state_dict(self, state):
        (number,) = state
        self.taken = Counter(s=number)


class Wrapper:
    """As of libraries that scale or shard: no ``Optimizer``."""

    def __init__(self, optimizer):
        self.inner, self.param_groups = optimizer, optimizer.param_groups


class Wrapped(torch.optim.SGD):
    """An ``Optimizer`` that has the groups of another one."""

    def __init__(self, optimizer):
        super().__init__([torch.nn.Parameter(torch.ones(1))], 0.1)
        self.param_groups = optimizer.param_groups


def sequential(o, *parts):
    return lr.SequentialLR(o, list(parts), [2, 5, 6][: len(parts) - 1])


MADE = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda number: 0.8**number),
    "LambdaLR, object": lambda o: lr.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, Warmup()),
    "StepLR": lambda o: lr.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4, 6], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.3, total_steps=STEPS, three_phase=True),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "CyclicLR, function": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.9**x),
    "CyclicLR, object": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Warmup()),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, "max", 0.5, patience=1, cooldown=1),
    "SequentialLR": lambda o: sequential(o, lr.LinearLR(o, 0.1, 1.0, 2), lr.MultiStepLR(o, [1, 2], 0.1)),
    "SequentialLR, nested": lambda o: sequential(
        o, sequential(o, lr.ConstantLR(o, 0.5, 1), lr.MultiStepLR(o, [1, 3], 0.1)), lr.LambdaLR(o, Warmup()),
        lr.CosineAnnealingLR(o, 4),
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.MultiStepLR(o, [3, 5], 0.1), lr.ExponentialLR(o, 0.9)]),
    "ChainedScheduler, nested": lambda o: lr.ChainedScheduler(
        [sequential(o, lr.ConstantLR(o, 0.5, 2), lr.MultiStepLR(o, [1, 3])), lr.LambdaLR(o, Warmup())]
    ),
    "SWALR": lambda o: SWALR(o, 0.02, 4, "cos"),
    "own": Own,
    "own, a number": OwnNumber,
    "own, a list": OwnList,
}  # fmt: skip


def test_there_is_a_case_for_each():
    assert {name for name in lr.__all__ if name not in ("LRScheduler", "_LRScheduler")} <= {
        name.partition(",")[0] for name in MADE
    }


def built(name, tensors):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    rate = torch.tensor(0.05, dtype=torch.float64) if tensors else 0.05
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": rate * 3}]
    optimizer = torch.optim.SGD(groups, rate, momentum=0.9)
    return optimizer, MADE[name](optimizer)


def rates(optimizer, scheduler, steps) -> list[list[float]]:
    found = []
    for number in steps:
        optimizer.step()
        advance(scheduler, math.sin(number))
        found.append([(float(group["lr"]), float(group["momentum"])) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", MADE)
def test_wherever_it_was_left_rates_go_on_as_they_would(name, tensors):
    """Through a file that holds nothing but tensors, numbers, strings and containers."""
    whole = rates(*built(name, tensors), range(STEPS))
    for left in range(STEPS):
        optimizer, scheduler = built(name, tensors)
        assert rates(optimizer, scheduler, range(left)) == whole[:left]
        state, file = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, io.BytesIO()
        torch.save(storable(state, "state"), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        optimizer, scheduler = built(name, tensors)
        optimizer.load_state_dict(state["optimizer"])
        take_over(scheduler, state["scheduler"])
        assert rates(optimizer, scheduler, range(left, STEPS)) == whole[left:], left


@pytest.mark.parametrize(("schedule", "stop"), [("epoch", 5), ("step", 3), ("step", 6)])
def test_a_fit_goes_on_with_schedulers_of_schedulers(tmp_path, schedule, stop):
    """``MultiStepLR`` counts its milestones in a ``Counter``, which was a dict in checkpoints."""

    def fitted(stop, **options):
        step, seen, taken = make_step(model_options={"dropout": 0.0, "num_layers": 1}, fanouts=[3]), [], []

        def on_step(record):
            seen.append((record.epoch, record.step, step.optimizer.param_groups[0]["lr"]))
            taken.append(record)
            if len(taken) == stop:
                raise KeyboardInterrupt

        scheduler = MADE["SequentialLR, nested"](step.optimizer)
        try:
            step.fit(IDX, epochs=4, batch_size=200, scheduler=scheduler, schedule=schedule, on_step=on_step, **options)
        except KeyboardInterrupt:
            assert stop
        return seen

    saved = joestar.Checkpoints(tmp_path)
    begun = fitted(stop, checkpoints=saved)
    assert begun + fitted(None, checkpoints=saved, resume=True) == fitted(None)


def test_lengths_within_a_scheduler_are_told():
    def of(length):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        return sequential(optimizer, lr.ConstantLR(optimizer, 0.5, 2), lr.CosineAnnealingLR(optimizer, length))

    with pytest.warns(JoestarWarning, match="SequentialLR goes on with T_max=10 of the checkpoint, not 20"):
        take_over(of(20), of(10).state_dict())


def step_of_one_layer():
    return make_step(model_options={"dropout": 0.0, "num_layers": 1}, fanouts=[3])


class Timm:
    def step(self, epoch, metric=None):
        raise AssertionError


class Bare:
    def step(self):
        raise AssertionError


class Unreadable(Bare):
    def load_state_dict(self, state):
        raise AssertionError

    def state_dict(self):
        return {"seen": [{1, 2}]}


class Broken(Unreadable):
    def state_dict(self):
        raise KeyError("what")


def of_another(make):
    return lambda step: make(torch.optim.SGD(step.model.parameters(), 0.05))


REFUSED = {
    "arguments": (lambda s: Timm(), r"Timm.step needs arguments that fit does not have.*on_epoch=lambda record"),
    "a class": (lambda s: lr.StepLR, "scheduler must be one of torch.optim.lr_scheduler"),
    "no state": (lambda s: Bare(), "Bare has no state_dict and no load_state_dict: a fit with checkpoints="),
    "a set": (lambda s: Unreadable(), r"Unreadable.state_dict\(\)\['seen'\] is a set: a checkpoint holds"),
    "an error": (lambda s: Broken(), r"Broken.state_dict\(\) fails, which checkpoints= needs \(KeyError: 'what'\)"),
    "another": (of_another(lambda o: lr.StepLR(o, 1)), "StepLR is over another optimizer than the step's"),
    "another, in parts": (of_another(MADE["SequentialLR"]), "SequentialLR is over another optimizer"),
    "another, in a chain": (of_another(MADE["ChainedScheduler"]), "ChainedScheduler is over another optimizer"),
    "another, plateau": (of_another(lambda o: lr.ReduceLROnPlateau(o, "max")), "Plateau is over another optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stepped_or_saved_is_refused_before_a_step(tmp_path, name):
    step, (make, words) = step_of_one_layer(), REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        step.fit(IDX, VAL, 1, 200, scheduler=make(step), checkpoints=joestar.Checkpoints(tmp_path))
    assert step.counters.steps == 0


@pytest.mark.parametrize("kind", [OwnNumber, OwnList])
def test_a_state_that_is_no_dict_is_gone_on_with(tmp_path, kind):
    saved = joestar.Checkpoints(tmp_path)
    for epochs in (1, 3):
        step = step_of_one_layer()
        history = step.fit(IDX, VAL, epochs, 200, scheduler=kind(step.optimizer), checkpoints=saved, resume=epochs > 1)
    assert [record.lr for record in history.records] == [0.01, 0.05, 0.1 / 3]


@pytest.mark.parametrize("wrap", [Wrapper, Wrapped])
def test_a_scheduler_over_what_wraps_the_optimizer_is_its_own(wrap):
    step = step_of_one_layer()
    scheduler = Own(step.optimizer)
    scheduler.optimizer = wrap(step.optimizer)
    assert [record.lr for record in step.fit(IDX, VAL, 2, 200, scheduler=scheduler).records] == [0.01, 0.05]


def test_without_checkpoints_no_state_is_needed():
    step = step_of_one_layer()
    unseen = Own(step.optimizer)
    del Own.state_dict
    try:
        history = step.fit(IDX, VAL, 2, 200, scheduler=unseen)
    finally:
        Own.state_dict = lambda self: {"taken": self.taken}
    assert [record.lr for record in history.records] == [0.01, 0.05]


def test_a_scheduler_that_is_used_up_is_refused():
    """By a fit that does not go on with it from a checkpoint; one that has steps left goes on."""
    step = step_of_one_layer()
    scheduler = lr.OneCycleLR(step.optimizer, 0.1, total_steps=6)
    assert len(step.fit(IDX, epochs=2, batch_size=200, scheduler=scheduler).records) == 2
    with pytest.raises(ConfigError, match=r"made for 6 steps, has taken 4 of them, and is to take 4 \(2 epochs of 2"):
        step.fit(IDX, epochs=2, batch_size=200, scheduler=scheduler)
    assert step.counters.steps == 4
    assert len(step.fit(IDX, epochs=1, batch_size=200, scheduler=scheduler).records) == 1


def test_a_longer_fit_with_the_length_of_a_checkpoint_is_refused(tmp_path):
    """It failed where the steps of then were over; the same one goes on."""
    saved = joestar.Checkpoints(tmp_path)

    def fitted(epochs, **options):
        step = step_of_one_layer()
        scheduler = lr.OneCycleLR(step.optimizer, 0.1, total_steps=2 * epochs)
        return step, lambda: step.fit(IDX, None, epochs, 200, scheduler=scheduler, checkpoints=saved, **options)

    def stop(record):
        return record.step == 0

    fitted(2, on_step=stop)[1]()
    assert len(fitted(2, resume=True)[1]().records) == 2
    step, call = fitted(3, resume=True)
    with pytest.raises(CheckpointError, match=r"OneCycleLR of the checkpoint was made for 4 steps, and is to take 6"):
        call()
    assert step.counters.steps == 0
