"""What random scripts train on: labels, a loss as a user gives it, and what it is in plain PyTorch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.common import CLASSES, RunningLoss

NODES = 500


def by_seeds(out: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
    """Nodes count differently."""
    return (F.cross_entropy(out, y, reduction="none") * (0.5 + seeds % 3)).mean()


def with_logs(out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Two numbers beside the loss."""
    loss, norm = F.cross_entropy(out, y), out.square().mean()
    return loss + 0.1 * norm, {"loss": loss, "norm": norm}


def some_only(out: Tensor, y: Tensor) -> Tensor:
    """Rows of some classes, if there are any."""
    known = y > 0
    return F.cross_entropy(out[known], y[known], reduction="sum") / known.sum().clamp(min=1)


def known_entries(loss: Callable, out: Tensor, y: Tensor) -> Tensor:
    """What NaN among labels makes of a mean."""
    known = ~y.isnan()
    return loss(out[known], y[known], reduction="sum") / known.sum().clamp(min=1)


def as_rows(loss: Callable, out: Tensor, y: Tensor) -> Tensor:
    """Labels ``[n]`` of outputs ``[n, 1]``."""
    return loss(out, y[:, None])


@dataclass(frozen=True)
class Task:
    """A loss and its labels.

    Attributes:
        labels: what they are: ``classes``, ``values``, ``several`` per node (some unknown); width: of the outputs.
        given: makes the loss for ``joestar.compile``; plain: makes ``loss(out, y[, seeds])`` in plain PyTorch.
        scored: metrics whose values the plain side knows.
    """

    labels: str
    width: int
    given: Callable[[], Callable]
    plain: Callable[[], Callable]
    scored: tuple[str, ...] = ("loss",)


def _same(labels: str, width: int, loss: Callable, *scored: str) -> Task:
    return Task(labels, width, lambda: loss, lambda: loss, ("loss", *scored))


_values = functools.partial(functools.partial, as_rows)
TASKS = {
    "cross entropy": _same("classes", CLASSES, F.cross_entropy, "accuracy"),
    "running": Task("classes", CLASSES, lambda: RunningLoss(0.9), lambda: RunningLoss(0.9), ("accuracy",)),
    "smooth": _same("classes", CLASSES, nn.CrossEntropyLoss(label_smoothing=0.1), "accuracy"),
    "by seeds": _same("classes", CLASSES, by_seeds, "accuracy"),
    "with logs": _same("classes", CLASSES, with_logs, "accuracy"),
    "some only": _same("classes", CLASSES, some_only, "accuracy"),
    "squares": Task("values", 1, lambda: F.mse_loss, lambda: _values(F.mse_loss), ("loss", "mae")),
    "huber": Task("values", 1, nn.SmoothL1Loss, lambda: _values(F.smooth_l1_loss), ("loss", "mae")),
    "several": Task(
        "several", CLASSES, nn.BCEWithLogitsLoss,
        lambda: functools.partial(known_entries, F.binary_cross_entropy_with_logits),
    ),
}  # fmt: skip


def labels(kind: str, classes: Tensor) -> Tensor:
    """Labels made of planted classes ``[N]``."""
    if kind == "values":
        return classes.double() - 1.5 + torch.arange(len(classes)) % 5 / 10
    if kind == "several":
        found = F.one_hot(classes, CLASSES).double()
        found[torch.arange(len(classes)) % 3 == 0, 1] = torch.nan
        return found
    return classes.clone()


def changed(kind: str, label: Tensor) -> Tensor:
    """Another label of a node."""
    return {"classes": lambda: (label + 1) % CLASSES, "values": lambda: label + 1, "several": lambda: 1 - label}[kind]()


def score(name: str, loss: Callable, rows: Tensor, y: Tensor, idx: Tensor) -> Tensor:
    """A metric in plain PyTorch."""
    if name == "accuracy":
        return (rows.argmax(1) == y).double().mean()
    if name == "mae":
        return (rows[:, 0] - y).abs().mean()
    return valued(loss, rows, y, idx)[0]


def valued(loss: Callable, rows: Tensor, y: Tensor, seeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, what it logs)."""
    found = loss(rows, y, seeds) if loss is by_seeds else loss(rows, y)
    return found if isinstance(found, tuple) else (found, {})
