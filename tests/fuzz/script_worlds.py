"""What both sides of a random script are made of, and the side of a compiled ``Step``; the other is ``script_plain``.

Both have the same methods, one per event of ``scripts.py``.
"""

import contextlib
import copy
import functools
import io
import signal
import types
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

import joestar
from joestar.errors import JoestarError
from joestar.staged.planning import Planner
from joestar.stages.plan import Plan, Speeds
from tests.runtime.common import FEATURES, planted_graph, pressed

from .script_tasks import changed, labels
from .staged import Everything

SETTINGS = types.ModuleType("settings")
"""Where a model looks for a factor that is not there."""


class Kept:
    """What a model finds behind a cached function: a row in float64, and a number."""

    def __init__(self, width: int, device: str):
        self.row, self.factor = torch.ones(width, dtype=torch.float64, device=device), 1.0


@functools.cache
def kept_of(side: str, number: int, width: int, device: str) -> Kept:
    """What a side of a script keeps outside of its model."""
    return Kept(width, device)


class Net(nn.Module):
    """Two layers and a head, normalised, a count of its steps and a number in a buffer; in float64.

    Args:
        kept: arguments of ``kept_of``.
    """

    def __init__(self, conv: str, norm: str, width: int, kept: tuple):
        super().__init__()
        self.kept = kept
        kind = getattr(joestar.nn, conv)
        self.first, self.second, self.head = kind(FEATURES, 8), kind(8, 8), nn.Linear(8, width)
        self.norm = getattr(nn, norm)(8)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, blocks, x):
        if self.training:
            self.steps += 1
        h = self.norm(self.first(blocks[0], x)).relu()
        kept = kept_of(*self.kept)
        factor = kept.factor * getattr(SETTINGS, "factor", 1.0)
        return self.head(self.second(blocks[1], h).tanh()) * self.scale * kept.row * factor


class Parts:
    """What both sides are made of, each of its own: model, loss, optimizer, graph, sampler, schedule.

    Attributes:
        device: where the model is; home: where seeds and the graph are.
    """

    def __init__(self, drawn, initial: int = 0, device: str = "cpu", home: str = "cpu"):
        torch.manual_seed(initial)
        self.drawn, self.logs, self.taken = drawn, {}, torch.zeros(0)
        self.device, self.home = device, home
        self.kept = kept_of(*(kept := (type(self).__name__, drawn.number, drawn.task.width, device)))
        self.model = Net(drawn.conv, drawn.norm, drawn.task.width, kept)
        if drawn.spectral:
            nn.utils.parametrizations.spectral_norm(self.model.head)
        self.model.to(device)
        graph = planted_graph(nodes=500, dtype=torch.float64)
        graph.ndata["y"] = labels(drawn.task.labels, graph.ndata["y"])
        self.graph, self.loss = graph.to(home), self.given()
        if isinstance(self.loss, nn.Module):
            self.loss.to(device)
        self.optimizer = getattr(torch.optim, drawn.optimizer)(self.model.parameters(), **drawn.settings)
        if drawn.hooked:
            self.optimizer.register_step_post_hook(self.behind_a_step)
        self.schedule = drawn.schedule(self.optimizer)
        self.sampler = self.sampled(drawn.fanouts, drawn.replace)

    def behind_a_step(self, *given) -> None:
        """A decay of one's own."""
        with torch.no_grad():
            self.model.head.bias.mul_(0.9)

    def sampled(self, fanouts: list[int], replace: bool = False) -> joestar.NeighborSampler:
        """A sampler of the graph."""
        return joestar.NeighborSampler(self.graph, fanouts, replace=replace, seed=7)

    def parameter(self, number: int) -> nn.Parameter:
        """One of those that may be frozen; the head is always trained."""
        return [p for name, p in self.model.named_parameters() if not name.startswith("head")][number]

    def scale_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def scheduled(self) -> None:
        self.schedule.step()

    def freeze(self, number: int, frozen: bool) -> None:
        self.parameter(number).requires_grad_(not frozen)

    def freeze_norm(self, frozen: bool) -> None:
        self.model.norm.train(not frozen)

    def write_weights(self, number: int, hidden: bool) -> None:
        parameter = self.parameter(number)
        with torch.no_grad():
            (parameter.data if hidden else parameter).mul_(0.9)

    def write_buffer(self) -> None:
        self.model.scale.mul_(1.1)

    def write_kept(self) -> None:
        self.kept.row.mul_(1.1)

    def write_features(self, node: int, hidden: bool) -> None:
        features = self.graph.ndata["x"]
        (features.data if hidden else features)[node] *= 2

    def tune(self, name: str, value) -> None:
        for group in self.optimizer.param_groups:
            if name in group:
                group[name] = value

    def write_labels(self, node: int) -> None:
        self.graph.ndata["y"][node] = changed(self.drawn.task.labels, self.graph.ndata["y"][node])

    def keep_weights(self) -> None:
        self.kept_weights = copy.deepcopy(self.model.state_dict())
        self.kept_moments = copy.deepcopy(self.optimizer.state_dict())

    def load_weights(self) -> None:
        self.model.load_state_dict(self.kept_weights)

    def load_moments(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.kept_moments))  # PyTorch goes on with the tensors given

    def by_hand(self, seeds: Tensor, stepping: bool) -> None:
        """A step of one's own beside those of epochs, or gradients that somebody left behind."""
        graph = self.graph.to(self.device).keyed(99)
        blocks = self.sampler.sample(graph, seeds.to(self.device))
        self.optimizer.zero_grad()
        self.model(blocks, graph.ndata["x"][blocks[0].srcs]).square().mean().backward()
        if stepping:
            self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers, moments and rates."""
        found = dict(self.model.state_dict())
        if isinstance(self.loss, nn.Module):
            found |= {f"loss.{name}": value for name, value in self.loss.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = value
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"lr {number}"] = torch.as_tensor(group["lr"])
        found |= {f"logged {name}": value for name, value in self.logs.items()} | {"seeds": self.taken}
        found |= {f"average of {name}": value for name, value in self.averages().items()}
        return {name: value.detach().to("cpu", torch.float64) for name, value in found.items()}


class Ours(Parts):
    """A compiled step.

    Attributes:
        refuses: events that are an error.
    """

    refuses = frozenset()

    def __init__(self, drawn, initial: int = 0, data: dict[str, Tensor] | None = None, home: str | None = None):
        super().__init__(drawn, initial, drawn.device, drawn.device if home is None else home)
        self.graph.ndata.update(data or {})
        self.epochs: list = []
        self.saved: io.BytesIO | None = None
        self.stepped = False
        self.step = self.compiled()

    def compiled(self) -> joestar.Step:
        """The step of these parts."""
        return joestar.compile(self.model, self.sampler, self.loss, self.optimizer, **self.drawn.options())

    def averages(self) -> dict[str, Tensor]:
        return self.step.ema or {}

    def open(self, idx: Tensor, batch: int, shuffle: bool, drop_last: bool) -> None:
        idx = idx.to(self.home)
        self.epochs.append(self.step.epoch(idx, batch, shuffle, drop_last=drop_last, with_seeds=True))

    def given(self) -> Callable:
        """The loss, as a user gives it."""
        return self.drawn.task.given()

    def next(self, number: int) -> Tensor:
        loss, seeds = next(self.epochs[number])
        self.stepped = True
        self.logs, self.taken = self.epochs[number].logged, seeds
        return loss

    def left(self) -> list[int]:
        """Steps that open epochs have still to take."""
        return [len(epoch) for epoch in self.epochs]

    def leave(self, number: int) -> None:
        del self.epochs[number]

    def interrupted(self, number: int, place: str) -> Tensor | None:
        """The next step of an epoch, in which Ctrl-C is pressed: its loss, if it happened."""
        epoch, press = self.epochs[number], functools.partial(signal.raise_signal, signal.SIGINT)
        before = epoch.position
        with contextlib.suppress(KeyboardInterrupt), pressed(self.step, place, press):
            next(epoch)
        if epoch.position == before:
            return None
        loss = epoch.latest()
        self.logs, self.taken = epoch.logged, epoch._taken(before)
        return loss

    def call(self, seeds: Tensor) -> Tensor:
        loss = self.step(seeds.to(self.home))
        self.stepped = True
        self.logs, self.taken = self.step.logged, seeds.clone()  # NumPy may write to them
        return loss

    def predict(self, idx: Tensor, batch: int | None, full: bool) -> Tensor:
        return self.step.predict(idx.to(self.home), batch, full)

    def evaluate(self, idx: Tensor, batch: int | None, ema: bool) -> Tensor:
        scores = self.step.evaluate(idx.to(self.home), batch, metric=list(self.drawn.task.scored), ema=ema)
        return torch.tensor(list(scores.values()), dtype=torch.float64)

    def restart(self, seed: int) -> None:
        self.step.restart(seed)
        self.epochs = [epoch for epoch in self.epochs if epoch.running]

    def save(self) -> None:
        self.saved = io.BytesIO()
        torch.save(self.step.state_dict(), self.saved)

    def load(self) -> None:
        self.saved.seek(0)
        self.step.load_state_dict(torch.load(self.saved, weights_only=True))
        self.epochs = [epoch for epoch in self.epochs if epoch.running]

    def elsewhere(self) -> None:
        """A new process: the same script, whose data are those of now; what was saved is loaded."""
        new = type(self)(self.drawn, initial=5, data={name: self.graph.ndata[name].clone() for name in "xy"})
        for ours, old in zip(new.model.parameters(), self.model.parameters(), strict=True):
            ours.requires_grad_(old.requires_grad)
        new.model.norm.train(self.model.norm.training)
        new.kept_weights, new.kept_moments, new.saved = self.kept_weights, self.kept_moments, self.saved
        new.schedule.load_state_dict(self.schedule.state_dict())
        new.logs, new.taken = self.logs, self.taken
        vars(self).clear()
        vars(self).update(vars(new))
        self.load()

    def told(self) -> bool:
        """Whether it is known what the trace read: quicker ones do not tell (``tests/captures.py``)."""
        return self.step._executor("train").program.captured.reads.told

    def refused(self, kind: str) -> None:
        """A mistake that is told, and changes nothing."""
        node = functools.partial(torch.full, (1,), device=self.home)
        kinds = {
            "seeds": lambda: self.step(node(10**6)), "batch": lambda: self.step.epoch(node(9), 0),
            "state": lambda: self.step.load_state_dict({"format": 1}),
            "metric": lambda: self.step.evaluate(node(9), metric="acuracy"),
            "kept": lambda: self.step(node(9)), "lacking": lambda: self.step(node(9)),
        }  # fmt: skip
        if kind in ("kept", "lacking") and not (self.stepped and self.told()):
            return  # a first step reads what is there
        try:
            self.kept.factor = 2.0 if kind == "kept" else 1.0
            if kind == "lacking":
                SETTINGS.factor = 2.0
            kinds[kind]()
        except JoestarError:
            return
        finally:
            self.kept.factor = 1.0
            vars(SETTINGS).pop("factor", None)
        raise AssertionError(f"{kind}: nothing was said")


class OverMacroBatches(Ours):
    """A step over macro-batches that keep every neighbour: mini-batches are those of the whole graph."""

    refuses = frozenset({"write_features", "write_labels", "full"})

    def __init__(self, drawn, initial: int = 0, data: dict[str, Tensor] | None = None):
        super().__init__(drawn, initial, data, home="cpu")

    def compiled(self) -> joestar.Step:
        """As planned here, with room for everything, and half of the rows on the device."""
        batch, graph = 60, self.graph
        hot = torch.arange(0, graph.num_nodes, 2, dtype=graph.indices.dtype)
        plan = Plan(1 << 30, False, 2 * batch, 4, len(hot), graph.num_nodes, graph.num_edges, hot_ids=hot, batch=batch)
        options = {name: value for name, value in self.drawn.options().items() if name != "prefetch"}
        with (
            mock.patch.object(Planner, "_measured", return_value=Speeds()),
            mock.patch.object(Planner, "plan", return_value=plan),
        ):
            step = joestar.compile(
                self.model, self.sampler, self.loss, self.optimizer, memory=1 << 30, batch_size=batch,
                first_stage=Everything(2 * batch, hops=2), **options,
            )  # fmt: skip
        return step
