"""What ``fit`` tells of its epochs and steps, and keeps of the best."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.runtime.checkpoint import versioned

LOSS = "train_loss"
"""What is monitored without validation nodes, or by that name."""


@dataclass
class EpochRecord:
    """One epoch.

    Attributes:
        loss: mean training loss; val: the monitored score of the validation nodes, or ``None``; seconds: of training.
        scores: every score of the validation nodes; logged: means of what the loss returned beside; lr: of the first
            group, at the end.
    """

    epoch: int
    loss: float
    val: float | None
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    lr: float | None = None


@dataclass
class StepRecord:
    """One step, as ``on_step`` gets it.

    Attributes:
        epoch, step: numbers from 0; steps: of the epoch.
        loss: 0-d tensor, final; reading it with ``.item()`` waits for the device. logged: as ``Epoch.logged``.
    """

    epoch: int
    step: int
    steps: int
    loss: Tensor
    logged: dict[str, Tensor]


@dataclass
class History:
    """Every epoch of a ``fit``; ``best_epoch`` is the one whose parameters the model holds afterwards.

    Attributes:
        best_val: its score; metric, mode: what decides; schedule: whether the scheduler stepped per ``step`` or
            ``epoch``; stopped_early: by patience or by a callback.
        best, best_loss: the model's ``state_dict()`` then, and that of a loss that is a module, or ``None``.
    """

    records: list[EpochRecord] = field(default_factory=list)
    best_epoch: int = -1
    best_val: float | None = None
    stopped_early: bool = False
    metric: str = LOSS
    mode: str = "min"
    schedule: str = "epoch"

    def __post_init__(self):
        self.best: dict | None = None
        self.best_loss: dict | None = None


def named(record: EpochRecord) -> dict[str, float]:
    """What loggers are given."""
    values = {"epoch": record.epoch, "train/loss": record.loss, "lr": record.lr, "train/seconds": record.seconds}
    values |= {f"train/{name}": value for name, value in record.logged.items()}
    return values | {f"val/{name}": value for name, value in record.scores.items()}


def line(record: EpochRecord, history: History, epochs: int) -> str:
    """What ``verbose`` prints."""
    parts = [f"epoch {record.epoch + 1}/{epochs}", f"loss {record.loss:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in (record.logged | record.scores).items()]
    mark = "  *" if history.best_epoch == record.epoch and record.scores else ""
    return "  ".join([*parts, f"{record.seconds:.2f} s"]) + mark


def copied_weights(model: torch.nn.Module, replaced: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A copy of the model's state, with some of its tensors replaced."""
    state = model.state_dict()  # with the versions of its modules
    state.update(replaced or {})
    return copy.deepcopy(state)


def kept(state: dict | None, device: torch.device, versions: dict | None):
    """A module's state of a checkpoint: tensors there, what it keeps beside them as it is; ``None`` for ``None``."""
    if state is None:
        return None
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}
    return versioned(there, versions)
