"""The two sides of a random script: a compiled ``Step``, and the loop that people write in plain PyTorch.

Both have the same methods, one per event of ``scripts.py``. The plain side knows of Joestar the sampler in Python and
the numbers that key its draws; it stays on the CPU, whatever device the step is on.
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
from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
from joestar.runtime.prediction import PREDICTED
from joestar.runtime.seeds import shuffled
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch
from joestar.stages.plan import Plan, Speeds
from tests.runtime.common import FEATURES, planted_graph, pressed

from .script_tasks import changed, labels, score, valued
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
        self.schedule = drawn.schedule(self.optimizer)
        self.sampler = self.sampled(drawn.fanouts, drawn.replace)

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
        self.logs, self.taken = self.step.logged, seeds
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
                first_stage=LargeBatch(2 * batch), **options,
            )  # fmt: skip
        step.first_stage = Everything(2 * batch, hops=2)
        return step


class PlainEpoch:
    """Seeds, and how far they have got."""

    def __init__(self, *given: int | Tensor | bool):
        self.given = self.idx, self.batch, self.shuffle, self.drop_last = given
        self.number, self.position, self.sums = -1, 0, []

    @property
    def steps(self) -> int:
        n = self.idx.numel()
        return n // min(self.batch, n) if self.drop_last else -(-n // self.batch)


class Plain(Parts):
    """The loop by hand: groups of batches, clipped, averaged."""

    def __init__(self, drawn, initial: int = 0):
        super().__init__(drawn, initial)
        self.seed, self.begun, self.calls = 7, 0, 0
        self.epochs: list[PlainEpoch] = []
        self.under_way: list[PlainEpoch] = []
        self.average, self.updates = copy.deepcopy(self.model), 0

    def given(self) -> Callable:
        """The loss in plain PyTorch."""
        return self.drawn.task.plain()

    def averages(self) -> dict[str, Tensor]:
        return dict(self.average.named_parameters()) if self.drawn.ema else {}

    def rows(self, seeds: Tensor, epoch: int, step: int, sampler=None) -> Tensor:
        sampler = sampler or self.sampler
        context = SamplingContext(step_key(self.seed, epoch, step, "cpu"))
        blocks = sampler.sample(self.graph.with_context(context), seeds.to(self.graph.indices.dtype))
        return self.model(blocks, self.graph.ndata["x"][blocks[0].srcs])

    def train(self, seeds: Tensor, epoch: int, step: int, group: int, sums: list, complete: bool) -> Tensor:
        """One batch of a group of so many, whose gradients are added to ``sums``."""
        self.taken = seeds
        loss, logs = valued(self.loss, self.rows(seeds, epoch, step), self.graph.ndata["y"][seeds], seeds)
        self.logs = {name: value.detach() for name, value in logs.items()}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss / group, parameters, allow_unused=True)
        sums[:] = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        if complete:
            self.update(parameters, sums)
            sums.clear()
        return loss.detach()

    def update(self, parameters: list, grads: list) -> None:
        self.optimizer.zero_grad()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        if self.drawn.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.drawn.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            share = 1.0 if self.updates == 0 else 1 - (self.drawn.ema or 0)
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, share)
        self.updates += 1

    def open(self, idx: Tensor, batch: int, shuffle: bool, drop_last: bool) -> None:
        self.epochs.append(self.under_way.pop(0) if self.under_way else PlainEpoch(idx, batch, shuffle, drop_last))

    def begin(self, number: int) -> PlainEpoch:
        """An epoch, which has its number from its first step on."""
        epoch = self.epochs[number]
        if epoch.number < 0:
            epoch.number, self.begun = self.begun, self.begun + 1
        return epoch

    def next(self, number: int) -> Tensor:
        epoch = self.begin(number)
        order = shuffled(epoch.idx, self.seed, epoch.number) if epoch.shuffle else epoch.idx
        at, k = epoch.position, self.drawn.accumulate
        group = min(k, epoch.steps - at // k * k)
        complete = (at + 1) % k == 0 or at + 1 == epoch.steps
        loss = self.train(order.split(epoch.batch)[at], epoch.number, at, group, epoch.sums, complete)
        epoch.position += 1
        return loss

    def left(self) -> list[int]:
        return [epoch.steps - epoch.position for epoch in self.epochs]

    def leave(self, number: int) -> None:
        del self.epochs[number]

    def call(self, seeds: Tensor) -> Tensor:
        self.calls += 1
        return self.train(seeds, -1 - self.calls, 0, 1, [], True)

    @torch.no_grad()
    def predict(self, idx: Tensor, batch: int | None, full: bool) -> Tensor:
        size, modes = PREDICTED if batch is None else batch, [module.training for module in self.model.modules()]
        self.model.eval()
        if full:  # every node: degrees in blocks are those of the graph
            rows = [self.rows(torch.arange(self.graph.num_nodes), -1, 0, self.sampled([-1, -1]))[idx]]
        else:
            rows = [self.rows(seeds, -1, step) for step, seeds in enumerate(idx.split(size))]
        for module, mode in zip(self.model.modules(), modes, strict=True):
            module.training = mode
        return torch.cat(rows)

    @torch.no_grad()
    def evaluate(self, idx: Tensor, batch: int | None, ema: bool) -> Tensor:
        kept = [p.clone() for p in self.model.parameters()]
        if ema:
            for parameter, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                parameter.copy_(mean)
        rows, y = self.predict(idx, batch, False), self.graph.ndata["y"][idx]
        for parameter, now in zip(self.model.parameters(), kept, strict=True):
            parameter.copy_(now)
        return torch.stack([score(name, self.loss, rows, y, idx).double() for name in self.drawn.task.scored])

    def restart(self, seed: int) -> None:
        self.seed, self.begun, self.calls, self.updates = seed, 0, 0, 0
        self.optimizer.state.clear()
        self.average.load_state_dict(self.model.state_dict())
        self.epochs, self.under_way = [epoch for epoch in self.epochs if epoch.number < 0], []

    def save(self) -> None:
        found = {name: vars(self)[name] for name in ("seed", "begun", "calls", "updates")}
        found["under_way"] = [e for e in self.epochs if e.number >= 0 and e.position < e.steps] + self.under_way
        kept = ("model", "optimizer", "average", "loss")
        found["states"] = {k: getattr(self, k).state_dict() for k in kept if hasattr(getattr(self, k), "state_dict")}
        self.saved = copy.deepcopy(found)

    def load(self) -> None:
        found = copy.deepcopy(self.saved)
        for name, state in found.pop("states").items():
            getattr(self, name).load_state_dict(state)
        vars(self).update(found)
        self.epochs = [epoch for epoch in self.epochs if epoch.number < 0]

    def elsewhere(self) -> None:
        self.epochs = []
        self.load()

    def told(self) -> bool:
        """Whether it is known what the trace read: quicker ones do not tell (``tests/captures.py``)."""
        return self.step._executor("train").program.captured.reads.told

    def refused(self, kind: str) -> None:
        """Nothing to be told of."""
