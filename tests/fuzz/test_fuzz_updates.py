"""Random settings of everything behind a loss, beside the same loop in plain PyTorch.

Optimizer, groups of batches, loss scale, clipping, averages, batches that overflow, single steps in between.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.runtime.common import make_step, planted_graph, tight_bounds
from tests.runtime.test_update import PlainUpdates, agrees

pytestmark = pytest.mark.usefixtures("shared_captures")  # what is behind the loss is no part of them

OPTIMIZERS = {
    "Adam": {"lr": 0.01, "eps": 1e-4}, "AdamW": {"lr": 0.02, "amsgrad": True, "eps": 1e-4},
    "SGD": {"lr": 0.1, "momentum": 0.9}, "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5, "eps": 1e-3},
    "NAdam": {"lr": 0.01, "eps": 1e-4}, "RAdam": {"lr": 0.02, "eps": 1e-4}, "Adagrad": {"lr": 0.05, "eps": 1e-3},
}  # fmt: skip


class Settings:
    """What a number stands for; ``repr`` says it, for a test that fails."""

    def __init__(self, number: int):
        rng = self.rng = random.Random(f"update {number}")
        self.kind = rng.choice(list(OPTIMIZERS))
        self.accumulate, self.clip = rng.choice((1, 2, 3, 5)), rng.choice((None, 0.05))
        self.scale, self.ema = rng.choice((None, 8.0, 4096.0)), rng.choice((None, 0.5, 0.99))
        self.interval, self.infinite = rng.choice((1, 2, 5)), rng.random() < 0.5
        self.overflows, self.drop_last = rng.random() < 0.5, rng.random() < 0.3
        self.number, self.batch = rng.randint(150, 500), rng.choice((64, 90, 100))
        self.prefetch = random.Random(f"prefetch {number}").random() < 0.5

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "rng")

    def options(self) -> dict:
        """For ``joestar.compile``."""
        scale = None if self.scale is None else {"initial": self.scale, "interval": self.interval}
        return {
            "accumulate": self.accumulate, "ema": self.ema, "loss_scale": scale, "clip_grad_norm": self.clip,
            "patience": 1000 if self.overflows else 2, "prefetch": self.prefetch,
        }  # fmt: skip


@pytest.mark.parametrize("number", [*range(3), *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(3, 30))])
def test_as_the_plain_loop(number, monkeypatch):
    drawn = Settings(number)
    if drawn.overflows:
        tight_bounds(monkeypatch, 1.0)
    graph = planted_graph(dtype=torch.float64)
    weight = torch.ones(graph.num_nodes, dtype=torch.float64)
    if drawn.scale and drawn.infinite:
        weight[drawn.rng.randrange(drawn.number)] = torch.inf

    def loss(out, y, seeds):
        return (F.cross_entropy(out, y, reduction="none") * weight[seeds]).mean()

    def optimizer(parameters):
        return getattr(torch.optim, drawn.kind)(parameters, **OPTIMIZERS[drawn.kind])

    step = make_step(
        graph=graph, loss=loss, optimizer=optimizer, model_options={"dropout": 0.0}, **drawn.options()
    )  # fmt: skip
    enabled = drawn.scale is not None
    scaler = torch.amp.GradScaler("cpu", drawn.scale or 1.0, growth_interval=drawn.interval, enabled=enabled)
    plain = PlainUpdates(step, None, drawn.accumulate, scaler, drawn.ema, drawn.clip)
    plain.optimizer = optimizer(plain.model.parameters())
    idx, calls = torch.arange(drawn.number), 0
    for epoch in range(2):
        ours = step.epoch(idx, drawn.batch, drop_last=drawn.drop_last)
        kept = idx.numel() // drawn.batch * drawn.batch if drawn.drop_last else None
        theirs = plain.epoch(epoch, idx, drawn.batch, loss, kept)
        for value in ours:
            assert value.item() == pytest.approx(next(theirs), rel=1e-7), drawn
            if ours.updated and drawn.rng.random() < 0.3:
                calls, some = calls + 1, idx[drawn.rng.randrange(100) :][:30]
                plain.loss = lambda out, y, some=some: loss(out, y, some)
                assert step(some).item() == pytest.approx(*plain.group([some], -1 - calls, 0), rel=1e-7), drawn
    agrees(step, plain, 1e-7)
