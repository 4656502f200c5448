"""Random scripts: what a loop does with a step, in any order, beside the same in plain PyTorch.

Epochs are begun, left, taken turns with; single steps, predictions, scores, states and mistakes come in between, and
what a loop may change: rates, weights, buffers, data, what is trained. Behind every event both sides hold the same
parameters, buffers, moments and averages; every loss is the same, and stays so.

``PYTHONPATH=tests python -m fuzz.scripts N`` runs script N and prints its events; a step on a GPU with
``JOESTAR_TEST_DEVICE=cuda``.
"""

import contextlib
import os
import random
import sys

import numpy as np
import torch
from torch import Tensor

from tests.runtime.common import default_dtype

from .script_plain import Plain
from .script_tasks import TASKS, Task
from .script_worlds import Ours, kept_of

OPTIMIZERS = {
    "Adam": {"lr": 0.01, "eps": 1e-4}, "AdamW": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9}, "RMSprop": {"lr": 0.01, "eps": 1e-3}, "NAdam": {"lr": 0.01, "eps": 1e-4},
}  # fmt: skip
NODES, EVENTS = 500, 40
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}
WITHIN = TOLERANCE | {"check_dtype": False, "check_device": False}
USES = {
    "next": 12, "interrupted": 2, "open": 3,
    "finish": 1, "leave": 1, "call": 2, "predict": 1, "full": 1, "evaluate": 1, "scale_rate": 1,
    "scheduled": 1, "freeze": 1.5, "freeze_norm": 0.7, "write_weights": 1, "write_buffer": 1, "write_kept": 1,
    "write_features": 1, "write_labels": 1,
    "keep_weights": 1, "load_weights": 1, "load_moments": 1, "by_hand": 1, "restart": 0.4,
    "tune": 1, "save": 1.5, "load": 1, "elsewhere": 0.7, "refused": 1, "random numbers": 1,
}  # fmt: skip


DECAY = ("weight_decay", 0.05), ("weight_decay", 0)
TUNED = dict.fromkeys(OPTIMIZERS, (*DECAY, ("betas", (0.8, 0.99)))) | {
    "SGD": (*DECAY, ("momentum", 0.5)), "RMSprop": (*DECAY, ("alpha", 0.9)),
}  # fmt: skip
CONTEXTS = {
    "": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
    "float16": lambda: default_dtype(torch.float16), "fork_rng": torch.random.fork_rng,
}  # fmt: skip
"""What may be around a use of the step; it makes no difference."""
AROUND = ("open", "next", "call", "predict", "evaluate", "save", "load")


class Drawn:
    """What a script's step is compiled with."""

    def __init__(self, number: int, backend: str):
        rng = random.Random(f"script {number}")
        self.number, self.backend, self.device = number, backend, os.environ.get("JOESTAR_TEST_DEVICE", "cpu")
        self.conv, self.norm = rng.choice(("SAGEConv", "GCNConv", "GATConv")), rng.choice(("BatchNorm1d", "LayerNorm"))
        self.optimizer = rng.choice(list(OPTIMIZERS))
        self.settings = OPTIMIZERS[self.optimizer] | {"foreach": False}
        self.loss = random.Random(f"task {number}").choice(list(TASKS))
        self.fanouts, self.replace = rng.choice(([4, 3], [2, 5], [-1, 3])), False
        if rng.random() < 0.2:
            self.fanouts, self.replace = [4, 3], True
        self.accumulate, self.clip = rng.choice((1, 1, 2, 3)), rng.choice((None, None, 0.05))
        self.ema = rng.choice((None, None, 0.9))
        self.execution = rng.choice(("padded", "padded", "exact"))
        self.prefetch = self.execution == "padded" and rng.random() < 0.4
        self.hooked = self.device == "cpu" and random.Random(f"hooked {number}").random() < 0.2
        self.spectral = random.Random(f"spectral {number}").random() < 0.15
        self.slack, self.warm_up, self.patience = rng.choice(((0.5, 2, 2), (0.0, 1, 1), (0.0, 1, 1000)))

    @property
    def task(self) -> Task:
        """Loss and labels."""
        return TASKS[self.loss]

    def schedule(self, optimizer: torch.optim.Optimizer):
        """Of learning rates."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def options(self) -> dict:
        """For ``joestar.compile``."""
        return {
            "backend": self.backend, "execution": self.execution, "prefetch": self.prefetch, "slack": self.slack,
            "warm_up": self.warm_up, "patience": self.patience, "accumulate": self.accumulate, "ema": self.ema,
            "clip_grad_norm": self.clip,
        }  # fmt: skip


class Script:
    """One script, as it is drawn while it runs: what is possible next depends on what came before.

    Attributes:
        said: its events so far; uses: how often each.
    """

    def __init__(self, number: int, backend: str = "eager", side: type[Ours] = Ours):
        self.drawn = Drawn(number, backend)
        self.rng = random.Random(f"events {number}")
        kept_of.cache_clear()
        self.ours, self.plain = side(self.drawn), Plain(self.drawn)
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.said: list[str] = []
        self.array = np.zeros(40, dtype=np.int64)
        self.written = torch.from_numpy(self.array)

    def run(self) -> None:
        """All events, compared one by one.

        Raises:
            AssertionError: where the sides differ, with the events that led there.
        """
        try:
            self._both("keep_weights")
            for _ in range(EVENTS):
                self._event(self.rng.choices(list(USES), list(USES.values()))[0])
                self._compare()
            for ours, plain in self.losses:
                torch.testing.assert_close(ours, plain, **WITHIN)
        except BaseException as error:
            error.add_note(f"script {self.drawn.number}: {vars(self.drawn)}\n" + "\n".join(self.said))
            raise

    def _compare(self) -> None:
        compare(self.ours.state(), self.plain.state())
        assert self.ours.left() == self.plain.left()

    def _both(self, event: str, *given) -> tuple:
        around = self.rng.choice(("", *CONTEXTS)) if event in AROUND else ""
        self.said.append(f"{around and f'{around}: '}{event}({', '.join(map(_short, given))})")
        with CONTEXTS[around]():
            ours = getattr(self.ours, event)(*given)
        copies = [each.clone() if each is self.written else each for each in given]
        found = ours, getattr(self.plain, event)(*copies)
        if isinstance(found[1], Tensor):
            torch.testing.assert_close(*found, **WITHIN)
        return found

    def _event(self, use: str) -> None:
        running = [number for number, left in enumerate(self.plain.left()) if left]
        if use in self.ours.refuses:
            return
        if use in ("next", "interrupted") and not running:
            use = "open"
        if (use in ("finish", "leave") and not self.plain.epochs) or (use == "finish" and not running):
            return
        if use in ("load", "elsewhere") and not hasattr(self.plain, "saved"):
            use = "save"
        if use == "freeze" and self._within_a_group():
            return  # refused: ``runtime/test_between_steps.py``
        if use == "open" and len(self.plain.epochs) > 2:
            use = "leave"
        getattr(self, f"_{use.replace(' ', '_')}", lambda running: self._both(use))(running)

    def _within_a_group(self) -> bool:
        several = (
            *self.plain.epochs,
            *self.plain.under_way,
            *getattr(self.plain, "saved", {"under_way": ()})["under_way"],
        )
        return any(epoch.sums for epoch in several)

    def _some(self, most: int) -> Tensor:
        """Seeds in no order, at times some of them twice, or in a tensor that NumPy writes to again and again."""
        count, rng = self.rng.randint(5, most), self.rng
        found = rng.choices(range(NODES), k=count) if rng.random() < 0.2 else rng.sample(range(NODES), count)
        if random.Random(f"written {self.drawn.number} {len(self.said)}").random() < 0.15:
            self.array[:] = (found * len(self.array))[: len(self.array)]
            return self.written
        return torch.tensor(found)

    def _next(self, running: list[int]) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            number = self.rng.choice(running)
            if self.plain.left()[number]:
                self.losses.append(self._both("next", number))

    def _interrupted(self, running: list[int]) -> None:
        number, place = self.rng.choice(running), self.rng.choice(("forward", "backward", "optimizer", "behind"))
        self.said.append(f"interrupted({number}, {place!r})")
        loss = self.ours.interrupted(number, place)
        self.plain.begin(number)
        if loss is not None:
            self.losses.append((loss, self.plain.next(number)))

    def _finish(self, running: list[int]) -> None:
        number = self.rng.choice(running)
        while self.plain.left()[number]:
            self.losses.append(self._both("next", number))

    def _open(self, running: list[int]) -> None:
        resumed = self.plain.under_way[:1]
        given = self._some(250), self.rng.choice((30, 50, 64, 300)), self.rng.random() < 0.6, self.rng.random() < 0.3
        self._both("open", *(resumed[0].given if resumed else given))

    def _leave(self, running: list[int]) -> None:
        self._both("leave", self.rng.randrange(len(self.plain.epochs)))

    def _call(self, running: list[int]) -> None:
        self.losses.append(self._both("call", self._some(60)))

    def _predict(self, running: list[int]) -> None:
        self._both("predict", self._some(200), self._batch(), False)

    def _batch(self) -> int | None:
        """Seeds per batch of predictions; the default of steps over macro-batches is their plan's."""
        return self.rng.choice((50, 77) if self.ours.refuses else (None, 50, 77))

    def _full(self, running: list[int]) -> None:
        self._both("predict", self._some(200), None, True)

    def _evaluate(self, running: list[int]) -> None:
        self._both("evaluate", self._some(200), self._batch(), self.drawn.ema is not None and self.rng.random() < 0.5)

    def _scale_rate(self, running: list[int]) -> None:
        self._both("scale_rate", self.rng.choice((0.5, 0.9, 1.2)))

    def _tune(self, running: list[int]) -> None:
        self._both("tune", *self.rng.choice(TUNED[self.drawn.optimizer]))

    def _freeze(self, running: list[int]) -> None:
        self._both("freeze", self.rng.randrange(6), self.rng.random() < 0.6)

    def _freeze_norm(self, running: list[int]) -> None:
        self._both("freeze_norm", self.rng.random() < 0.5)

    def _write_weights(self, running: list[int]) -> None:
        self._both("write_weights", self.rng.randrange(6), self.rng.random() < 0.3)

    def _write_features(self, running: list[int]) -> None:
        hidden = not self.drawn.prefetch and self.rng.random() < 0.3  # else seen a step later (docs/quickstart.md)
        self._both("write_features", self.rng.randrange(NODES), hidden)

    def _write_labels(self, running: list[int]) -> None:
        self._both("write_labels", self.rng.randrange(NODES))

    def _by_hand(self, running: list[int]) -> None:
        self._both("by_hand", self._some(40), self.rng.random() < 0.5)

    def _restart(self, running: list[int]) -> None:
        self._both("restart", self.rng.choice((7, 8)))

    def _refused(self, running: list[int]) -> None:
        self._both("refused", self.rng.choice(("seeds", "batch", "state", "metric", "kept", "lacking")))

    def _random_numbers(self, running: list[int]) -> None:
        self.said.append("random numbers")
        torch.manual_seed(self.rng.randrange(1000))
        torch.rand(self.rng.randrange(1, 9))


def compare(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Raises ``AssertionError`` where states differ; moments that one side has not made yet are 0."""
    for name in ours | plain:
        new = torch.ones_like if name.startswith("mu_product") else torch.zeros_like  # moments before a first step
        pair = [side[name] if name in side else new((ours | plain)[name]) for side in (ours, plain)]
        scale = max([1.0, *(float(value.abs().max()) for value in pair if value.numel())])
        within = TOLERANCE | {"atol": TOLERANCE["atol"] * scale}  # sums over seeds are large
        torch.testing.assert_close(*pair, **within, msg=lambda text, name=name: f"{name}: {text}")


def _short(given) -> str:
    return f"{len(given)} nodes" if isinstance(given, Tensor) else repr(given)


if __name__ == "__main__":
    script = Script(int(sys.argv[1]))
    try:
        script.run()
    finally:
        print(vars(script.drawn), *script.said, sep="\n")
