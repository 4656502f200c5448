"""A few steps of ``joestar.compile`` beside a plain PyTorch loop: losses, weights, optimizer state, buffers.

Steps of two programs on one graph take turns. Bounds come from one small batch and have no slack, so that later batches
overflow, are redone, and widen them. Behind some steps both loops change the learning rate, or freeze a parameter and
thaw it again. Under autocast a loop in float64 says how far they may be apart; in float16 losses are scaled.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

import joestar
from joestar.profile import sizes
from joestar.profile.sizes import step_key

from . import plain
from .runs import MOVES, ROUNDING, autocast_of, in_float64, rounded

TOLERANCE = 1e-7
OPTIMIZERS = {
    "Adam": ({"lr": 0.01}, {"lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.1}, {"lr": 0.01, "amsgrad": True}),
    "AdamW": ({"lr": 0.01}, {"lr": 0.03, "weight_decay": 0.2}),
    "SGD": (
        {"lr": 0.05}, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.8, "nesterov": True},
        {"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.05, "maximize": True},
    ),
}  # fmt: skip
"""Optimizers with their settings. ``eps`` is large: a gradient that is 0 but for rounding must not become a step."""
CHANGES = ("nothing", "the learning rate", "what is trained")
"""What both loops change behind the first step; a frozen parameter is thawed behind the second."""


class Training:
    """What a program is trained with, and the two loops.

    Args:
        subject: the program; made: its capture; split: makes a ``Program`` of both and options.
    """

    def __init__(self, subject, made, split):
        self.subject, self.made, self.split = subject, made, split
        self.rng = rng = random.Random(f"training {subject.written.number}")
        self.kind = rng.choice(list(OPTIMIZERS))
        self.settings = {**rng.choice(OPTIMIZERS[self.kind]), **({} if self.kind == "SGD" else {"eps": 1e-4})}
        self.clipping = rng.choice(({}, {}, {"clip_grad_norm": 0.5}, {"clip_grad_value": 0.02}))
        self.patience = rng.choice((1, 2, 5))
        self.prefetch = random.Random(f"prefetch {subject.written.number}").random() < 0.5
        self.start = copy.deepcopy(subject.model.state_dict())
        between = random.Random(f"between steps {subject.written.number}")
        self.trained = [p for p in subject.model.parameters() if p.requires_grad]
        self.change = between.choice(CHANGES if len(self.trained) > 1 else CHANGES[:2])
        self.frozen = between.choice(self.trained) if self.trained else None
        self.autocast = autocast_of(subject.written)
        first = random.Random(f"loss scale {subject.written.number}").choice((8.0, 1024.0))
        self.loss_scale = {"initial": first} if self.autocast == torch.float16 else None
        self.losses: list[Tensor] = []
        self.step = None

    def optimizer(self, fused: bool | None = None) -> torch.optim.Optimizer:
        """A new one over the model's parameters."""
        return getattr(torch.optim, self.kind)(self.subject.model.parameters(), **self.settings, fused=fused)

    def restart(self) -> None:
        """Puts weights and buffers back, and what is trained."""
        self.subject.model.load_state_dict(self.start)
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def between(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """What a loop changes behind a step."""
        if self.change == "the learning rate" and number == 0:
            for group in optimizer.param_groups:
                group["lr"] *= 2
        if self.change == "what is trained":
            self.frozen.requires_grad_(number != 0)

    def plain(self, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """(losses, state) after a plain loop.

        Raises:
            AmbiguousError: where a mask is not known.
            OverflowError: where a scaled gradient is too large for float16.
        """
        optimizer, losses = self.optimizer(fused=False), []
        first = (self.loss_scale or {"initial": 1.0})["initial"]
        scaler = torch.amp.GradScaler("cpu", first, enabled=self.loss_scale is not None)
        for number, seeds in enumerate(batches):
            optimizer.zero_grad()
            with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None, cache_enabled=False):
                loss = plain.forward(self.subject, seeds, step_key(0, 0, number, "cpu"))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            self._clip()
            scaler.step(optimizer)
            scaler.update()
            if scaler.is_enabled() and scaler.get_scale() < first:
                raise OverflowError
            losses.append(loss.detach())
            self.between(optimizer, number)
        optimizer.zero_grad()
        return losses, self._state(optimizer)

    def _clip(self) -> None:
        parameters = [p for p in self.subject.model.parameters() if p.grad is not None]
        if "clip_grad_norm" in self.clipping:
            nn.utils.clip_grad_norm_(parameters, self.clipping["clip_grad_norm"])
        if "clip_grad_value" in self.clipping:
            nn.utils.clip_grad_value_(parameters, self.clipping["clip_grad_value"])

    def compiled(self, nodes: Tensor, batch: int):
        """An epoch of a ``Step``, to be drawn from."""
        self.used = self.optimizer()
        self.step = joestar.compile(
            self.subject.model, self.subject.sampler, self.subject.loss, self.used, backend="eager", slack=0.0,
            warm_up=1, patience=self.patience, prefetch=self.prefetch, autocast=self.autocast,
            loss_scale=self.loss_scale, **self.clipping,
        )  # fmt: skip
        executor = self.step._executors["train"]
        executor.program = self.split(self.subject, self.made, executor.program.options)
        return self.step.epoch(nodes, batch, shuffle=False)

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and moments as they are."""
        self.used.zero_grad()
        return self._state(self.used)

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        found = dict(self.subject.model.state_dict())
        for name, parameter in self.subject.model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key} of {name}"] = value
        return {name: value.detach().clone().to(torch.float64) for name, value in found.items()}


def differences(
    got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | Callable[[str, float], float] = TOLERANCE
) -> list[str]:
    """What differs, in words; a tensor that is missing is zero (momentum of a parameter without gradient).

    Args:
        tolerance: the largest difference that is none, of (name, scale), or as a share of a tensor's scale: of its
            largest entry, not less than a thousandth of the largest of its kind: what cancels has no scale of its own.
    """
    found, floors = [], {}
    for name, wanted in expected.items():
        floors[_kind(name)] = max(floors.get(_kind(name), 1.0), _largest(wanted))
    for name in {**got, **expected}:
        pair = [values.get(name) for values in (got, expected)]
        value, wanted = (torch.zeros(()) if tensor is None else tensor for tensor in pair)
        scale, off = _largest(wanted), _largest(value - wanted)
        floor = 1e-3 * floors.get(_kind(name), 1.0)
        if not off <= (tolerance(name, scale) if callable(tolerance) else tolerance * max(scale, floor)):
            found.append(f"{name}: off by {off:.3g} at a scale of {scale:.3g}")
    return found


def _kind(name: str) -> str:
    """Of moments and losses: of all parameters, all steps; of weights and buffers all together."""
    return name.partition(" ")[0] if " " in name else ""


AWAY = 1e9
"""Losses, weights and moments from here on are those of a training that has diverged."""


class Autocast:
    """What a training under autocast may be off by: a few times what the plain loop is off by from one in float64.

    Args:
        training: under autocast; batches: of its steps; losses, state: of the plain loop.

    Attributes:
        tells: whether rounding leaves something to compare: the plain loop is off by less than half of what there is.
        away: whether it has diverged, to where squares in float32 may be infinite: nothing is compared.
    """

    def __init__(self, training: Training, batches: list[Tensor], losses: list[Tensor], state: dict[str, Tensor]):
        twin = in_float64(training.subject)
        twin.model.load_state_dict(training.start)
        self.training, self.batches, self.moved = Training(twin, None, None), batches, False
        self.share, self.rounding = ROUNDING[training.subject.written.autocast]
        self.start = {name: value.double() for name, value in training.start.items()}
        self.true, self.off = self._run(), {}
        self.scales = {}
        for name, value in self.true.items():
            kind = _kind(name)
            self.scales[kind] = max(self.scales.get(kind, 0.0), _largest(value))
        self._take_in(self.outcome(losses, state))
        self.away = not max(self.scales.values(), default=0.0) < AWAY
        self.tells = not self.away and all(
            self.off[name] <= 0.5 * scale for name in self.true if (scale := self._scale(name))
        )

    def _scale(self, name: str) -> float:
        """What an error is measured by; 0 of a weight that moves by rounding alone (a bias in front of a norm)."""
        largest, own = self.scales.get(_kind(name), 0.0), _largest(self.true.get(name, torch.zeros(())))
        noise = name in self.start and own < 1e-6 * largest
        return 0.0 if noise else max(own, 0.1 * largest)

    def outcome(self, losses: list[Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is compared: losses, how far weights and buffers have come, moments."""
        moved = {name: value - self.start[name] if name in self.start else value for name, value in state.items()}
        return moved | {f"loss of step {n}": value.double() for n, value in enumerate(losses)}

    def _run(self) -> dict[str, Tensor]:
        found = self.outcome(*self.training.plain(self.batches))
        self.training.restart()
        return found

    def _take_in(self, got: dict[str, Tensor]) -> None:
        for name, value in self.true.items():
            self.off[name] = max(self.off.get(name, 0.0), _largest(got.get(name, torch.zeros(())) - value))

    def __call__(self, name: str, scale: float) -> float:
        """The largest difference that is none; any, where rounding decides."""
        known = self._scale(name)
        return 4 * self.off.get(name, 0.0) + self.share * known if known and self.tells else math.inf

    def differences(self, losses: list[Tensor], state: dict[str, Tensor]) -> list[str]:
        """What a training is off by."""
        if self.away:
            return []
        got = self.outcome(losses, state)
        wrong = differences(got, self.true, self)
        if wrong and not self.moved:  # a ReLU's input that is next to nothing, a sum that cancels
            self.moved, random = True, torch.Generator().manual_seed(0)
            for _ in range(MOVES):
                with rounded(self.training.subject.model, self.rounding, random):
                    self._take_in(self.outcome(*self.training.plain(self.batches)))
            wrong = differences(got, self.true, self)
        return wrong


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def run_together(trainings: list[Training], report) -> dict[int, list[str]]:
    """Trains programs of one pack side by side; what differs from plain loops, by the number of the program.

    Args:
        report: counts those that were compared, and the overflows.

    Raises:
        RaisedError: with the number of the program whose step raised.
    """
    graph, rng = trainings[0].subject.graph, trainings[0].rng
    size, steps = rng.randint(3, 5), rng.choice((2, 3, 3))
    by_degree = torch.argsort(graph.in_degrees(), stable=True)[-(size * steps - 1) :]
    nodes = by_degree if rng.random() < 0.6 else torch.tensor(rng.sample(range(graph.num_nodes), size * steps - 1))
    nodes = nodes.to(graph.indices.dtype)
    expected, batches = {}, list(nodes.split(size))
    for training in trainings:
        try:
            result = training.plain(batches)
        except (plain.AmbiguousError, RuntimeError, ValueError, OverflowError):  # a batch norm of one row
            continue
        finally:
            training.restart()
        if all(map(torch.isfinite, result[0])):  # else every label of a batch is ignored
            expected[training] = result
    losses = _take_turns(list(expected), nodes, size)
    found = {}
    for training, (wanted, state) in expected.items():
        report.trained += 1
        report.overflows += training.step.counters.overflows
        if training.autocast is None:
            pairs = {f"loss of step {n}": value.double() for n, value in enumerate(wanted)}
            got = {f"loss of step {n}": value.double() for n, value in enumerate(losses[training])}
            wrong = differences(got, pairs, 1e-5) + differences(training.state(), state)
        else:
            told = Autocast(training, batches, wanted, state)
            wrong = told.differences(losses[training], training.state())
            report.narrow += told.tells
        what = f"{training.kind}({training.settings}), {training.clipping}, patience {training.patience}"
        what += f", changed behind the first step: {training.change}"
        found[training.subject.written.number] = [f"trained with {what}: {words}" for words in wrong]
        training.restart()
    return found


class RaisedError(Exception):
    """Training of the program of this number raised its cause."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextmanager
def _named(training: Training) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RaisedError(training.subject.written.number) from error


def _take_turns(trainings: list[Training], nodes: Tensor, size: int) -> dict[Training, list[Tensor]]:
    """Losses of an epoch of each, one step of everyone at a time."""
    losses = {training: [] for training in trainings}
    with ExitStack() as stack:
        if hasattr(sizes, "ROUND"):
            stack.enter_context(mock.patch.object(sizes, "ROUND", 1))
        epochs = {training: training.compiled(nodes, size) for training in trainings}
        for number in range(-(-len(nodes) // size)):
            for training, epoch in epochs.items():
                with _named(training):
                    losses[training].append(next(epoch))
                training.between(training.used, number)
        for epoch in epochs.values():
            epoch.close()
    return losses
