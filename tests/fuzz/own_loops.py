"""Random loops of one's own: a step compiled without a loss, beside the model in plain PyTorch.

The model returns several heads. Losses read some of them; calls are differentiated late, twice or never; gradients add
up, are read, clipped by hooks; what is trained, modes, weights and data change; states come and go.
"""

import copy
import io
import os
import random

import torch
from torch import Tensor, nn

import joestar
from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
from joestar.runtime.prediction import PREDICTED
from tests.runtime.common import CLASSES, FEATURES, planted_graph

NODES, EVENTS = 500, 40
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}
HEADS = "abc"
LOSSES = {
    "a": lambda out: out["a"].square().mean(), "b": lambda out: out["b"].logsumexp(1).sum(),
    "c": lambda out: out["c"].tanh().mean(), "ab": lambda out: (out["a"][:, :2] * out["b"][:, :2]).mean(),
    "rows of a": lambda out: out["a"][1:4].sum(), "b, changed": lambda out: out["b"].mul_(0.5).exp_().mean(),
    "all": lambda out: sum(rows.square().mean() for rows in out.values()),
}  # fmt: skip
USES = {
    "call": 5, "backward": 6, "update": 4, "zero": 2, "drop": 1, "predict": 1, "freeze": 1, "mode": 1, "hook": 0.5,
    "write_weights": 1, "write_features": 1, "save": 1, "load": 0.7, "elsewhere": 0.7,
}  # fmt: skip


class Net(nn.Module):
    """Three heads on a layer: b reads it through a layer of its own, c without gradients."""

    def __init__(self, conv: str):
        super().__init__()
        self.conv, self.norm = getattr(joestar.nn, conv)(FEATURES, 8), nn.BatchNorm1d(8)
        self.a, self.between, self.b, self.c = nn.Linear(8, CLASSES), nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, blocks, x):
        if self.training:
            self.steps += 1
        h = self.norm(self.conv(blocks[0], x)).relu()
        b = self.b(self.between(h).tanh()) + self.shift
        return {"a": self.a(h) + torch.zeros_like(self.shift).sum(), "b": b, "c": self.c(h.detach())}


class Drawn:
    """What a loop's step is compiled with."""

    def __init__(self, number: int, backend: str):
        rng = random.Random(f"own loop {number}")
        self.number, self.backend, self.device = number, backend, os.environ.get("JOESTAR_TEST_DEVICE", "cpu")
        self.conv = rng.choice(("SAGEConv", "GCNConv", "GATConv"))
        self.fanouts = [rng.choice((3, 5, -1))]
        self.execution = rng.choice(("padded", "padded", "exact"))
        self.slack, self.warm_up, self.patience = rng.choice(((0.5, 2, 2), (0.0, 1, 1), (0.0, 1, 1000)))
        self.optimizer = rng.choice(("AdamW", "SGD"))
        self.cuda_graph = self.device != "cpu" and random.Random(f"graph of loop {number}").random() < 0.6

    def options(self) -> dict:
        """For ``joestar.compile``."""
        names = "backend", "execution", "slack", "warm_up", "patience", "cuda_graph"
        return {name: getattr(self, name) for name in names}


class Side:
    """Model, optimizer and data, and calls whose outputs may still be differentiated."""

    def __init__(self, drawn: Drawn, initial: int = 0, device: str = "cpu"):
        torch.manual_seed(initial)
        self.drawn, self.model = drawn, Net(drawn.conv).to(device)
        self.graph = planted_graph(nodes=NODES, dtype=torch.float64).to(device)
        self.sampler = joestar.NeighborSampler(self.graph, drawn.fanouts, seed=7)
        kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[drawn.optimizer]
        settings = {"AdamW": {"weight_decay": 0.1, "eps": 1e-4}, "SGD": {"momentum": 0.9}}[drawn.optimizer]
        self.optimizer = kind(self.model.parameters(), lr=0.02, **settings)
        self.outputs: list[dict[str, Tensor]] = []

    def backward(self, number: int, loss: str, retain: bool) -> Tensor:
        value = LOSSES[loss](self.outputs[number])
        if value.requires_grad:
            value.backward(retain_graph=retain)
        if not retain:
            del self.outputs[number]
        return value.detach()

    def drop(self, number: int) -> None:
        del self.outputs[number]

    def update(self) -> None:
        self.optimizer.step()

    def zero(self, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def freeze(self, name: str, frozen: bool) -> None:
        getattr(self.model, name).requires_grad_(not frozen)

    def mode(self, name: str, training: bool) -> None:
        (self.model if name == "all" else self.model.norm).train(training)

    def hook(self) -> None:
        self.model.a.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    @torch.no_grad()
    def write_weights(self, name: str) -> None:
        getattr(self.model, name).weight.mul_(0.9)

    def write_features(self, node: int) -> None:
        self.graph.ndata["x"][node] *= 2

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers, gradients (of which there may be none) and moments."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = value
        here = {"device": "cpu", "dtype": torch.float64}
        return {name: value if value is None else value.detach().to(**here) for name, value in found.items()}


class Ours(Side):
    """A compiled step in a loop of one's own."""

    def __init__(self, drawn: Drawn, initial: int = 0):
        super().__init__(drawn, initial, drawn.device)
        self.step = joestar.compile(self.model, self.sampler, **drawn.options())
        self.saved: io.BytesIO | None = None

    def call(self, seeds: Tensor, grads: bool) -> Tensor:
        with torch.set_grad_enabled(grads):
            self.outputs.append(self.step(seeds.to(self.drawn.device)))
        return _joined(self.outputs[-1])

    def predict(self, idx: Tensor, batch: int | None) -> Tensor:
        return _joined(self.step.predict(idx.to(self.drawn.device), batch))

    def save(self) -> None:
        self.saved = io.BytesIO()
        torch.save({"step": self.step.state_dict(), "optimizer": self.optimizer.state_dict()}, self.saved)

    def load(self) -> None:
        self.saved.seek(0)
        state = torch.load(self.saved, weights_only=True)
        self.step.load_state_dict(state["step"])
        self.optimizer.load_state_dict(state["optimizer"])

    def elsewhere(self) -> None:
        """A new process, whose data and flags are those of now, and which has no gradients yet."""
        new = Ours(self.drawn, initial=5)
        new.graph.ndata["x"].copy_(self.graph.ndata["x"])
        for ours, old in zip(new.model.parameters(), self.model.parameters(), strict=True):
            ours.requires_grad_(old.requires_grad)
        for ours, old in zip(new.model.modules(), self.model.modules(), strict=True):
            ours.training = old.training
        new.saved = self.saved
        vars(self).clear()
        vars(self).update(vars(new))
        self.load()


class Plain(Side):
    """The same without Joestar but for the sampler, and the numbers that key it."""

    calls = 0

    def rows(self, seeds: Tensor, epoch: int, step: int) -> dict[str, Tensor]:
        context = SamplingContext(step_key(7, epoch, step, "cpu"))
        blocks = self.sampler.sample(self.graph.with_context(context), seeds.to(self.graph.indices.dtype))
        return self.model(blocks, self.graph.ndata["x"][blocks[0].srcs])

    def call(self, seeds: Tensor, grads: bool) -> Tensor:
        self.calls += 1
        with torch.set_grad_enabled(grads):
            self.outputs.append(self.rows(seeds, 0, self.calls))
        return _joined(self.outputs[-1])

    @torch.no_grad()
    def predict(self, idx: Tensor, batch: int | None) -> Tensor:
        modes = [module.training for module in self.model.modules()]
        self.model.eval()
        found = [_joined(self.rows(seeds, -1, step)) for step, seeds in enumerate(idx.split(batch or PREDICTED))]
        for module, mode in zip(self.model.modules(), modes, strict=True):
            module.training = mode
        return torch.cat(found)

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.calls))

    def load(self) -> None:
        model, optimizer, self.calls = copy.deepcopy(self.saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def elsewhere(self) -> None:
        self.optimizer.zero_grad()
        self.outputs = []
        for name in ("a",):  # hooks are the script's, which set them later
            getattr(self.model, name).weight._backward_hooks = None
        self.load()


def _joined(outputs: dict[str, Tensor]) -> Tensor:
    return torch.cat([outputs[head].detach() for head in HEADS], 1)


class Loop:
    """One loop, as it is drawn while it runs.

    Attributes:
        said: its events so far.
    """

    def __init__(self, number: int, backend: str = "eager"):
        self.drawn, self.rng = Drawn(number, backend), random.Random(f"events of loop {number}")
        self.ours, self.plain = Ours(self.drawn), Plain(self.drawn)
        self.said: list[str] = []

    def run(self) -> None:
        """All events, compared one by one.

        Raises:
            AssertionError: where the sides differ, with the events that led there.
        """
        try:
            for _ in range(EVENTS):
                self._event(self.rng.choices(list(USES), list(USES.values()))[0])
                self._compare()
        except BaseException as error:
            error.add_note(f"loop {self.drawn.number}: {vars(self.drawn)}\n" + "\n".join(self.said))
            raise

    def _compare(self) -> None:
        ours, plain = self.ours.state(), self.plain.state()
        assert ours.keys() == plain.keys(), ours.keys() ^ plain.keys()
        for name, value in plain.items():
            assert (ours[name] is None) == (value is None), (name, ours[name], value)
            if value is not None:
                torch.testing.assert_close(
                    ours[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
                )

    def _both(self, event: str, *given) -> None:
        self.said.append(
            f"{event}({', '.join(f'{len(g)} nodes' if isinstance(g, Tensor) else repr(g) for g in given)})"
        )
        found = [getattr(side, event)(*given) for side in (self.ours, self.plain)]
        if isinstance(found[1], Tensor):
            torch.testing.assert_close(*found, **TOLERANCE, check_dtype=False, check_device=False)

    def _event(self, use: str) -> None:
        if use in ("backward", "drop") and not self.plain.outputs:
            use = "call"
        if use in ("load", "elsewhere") and not hasattr(self.plain, "saved"):
            use = "save"
        if use in ("update", "load", "elsewhere", "write_weights", "write_features", "mode"):
            self._drop_all()  # what was saved for their backward passes is written: weights, rows, a norm's statistics
        if use == "call" and self.drawn.cuda_graph:
            self._drop_all()  # refused: a CUDA graph has one place for them (docs/architecture.md)
        getattr(self, f"_{use}", lambda: self._both(use))()

    def _drop_all(self) -> None:
        while self.plain.outputs:
            self._both("drop", 0)

    def _some(self, most: int) -> Tensor:
        return torch.tensor(self.rng.sample(range(NODES), self.rng.randint(5, most)))

    def _call(self) -> None:
        self._both("call", self._some(80), self.rng.random() < 0.85)

    def _backward(self) -> None:
        retain = self.rng.random() < 0.3 and not self.drawn.cuda_graph  # which is refused
        loss = self.rng.choice([name for name in LOSSES if not (retain and "changed" in name)])
        number = self.rng.randrange(len(self.plain.outputs))
        if self.plain.outputs[number]["a"].requires_grad or "changed" not in loss:
            self._both("backward", number, loss, retain)

    def _drop(self) -> None:
        self._both("drop", self.rng.randrange(len(self.plain.outputs)))

    def _zero(self) -> None:
        self._both("zero", self.rng.random() < 0.7)

    def _predict(self) -> None:
        self._both("predict", self._some(200), self.rng.choice((None, 50)))

    def _freeze(self) -> None:
        self._both("freeze", self.rng.choice(("conv", "norm", "between", "b", "c")), self.rng.random() < 0.6)

    def _mode(self) -> None:
        self._both("mode", self.rng.choice(("all", "norm")), self.rng.random() < 0.6)

    def _write_weights(self) -> None:
        self._both("write_weights", self.rng.choice(("a", "b", "c", "between")))

    def _write_features(self) -> None:
        self._both("write_features", self.rng.randrange(NODES))
