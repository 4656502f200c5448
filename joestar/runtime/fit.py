"""Epochs with validation, early stopping and the best parameters kept."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.errors import ConfigError, LabelError


@dataclass
class EpochRecord:
    """One epoch: mean training loss, validation score (0 to 1, or ``None``), seconds of training."""

    epoch: int
    loss: float
    val: float | None
    seconds: float


@dataclass
class History:
    """Every epoch of a ``fit``; ``best_epoch`` is the one whose parameters the model holds afterwards."""

    records: list[EpochRecord] = field(default_factory=list)
    best_epoch: int = -1
    best_val: float | None = None
    stopped_early: bool = False


def score(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """``{"accuracy": ...}`` for class labels (negative ones left out), ``{"f1_micro": ...}`` for multi-label targets.

    Multi-label predictions are logits above 0; entries whose target is NaN are left out.
    """
    if not labels.dtype.is_floating_point:
        known = labels >= 0
        if not bool(known.any()):
            raise LabelError("none of these nodes has a label: nothing to score.")
        hits = (logits.argmax(-1) == labels)[known]
        return {"accuracy": hits.float().mean().item()}
    if labels.dim() == 1 or labels.shape != logits.shape:
        raise LabelError(f"cannot score logits {list(logits.shape)} against targets {list(labels.shape)}.")
    known = ~torch.isnan(labels)
    positive, predicted = (labels > 0.5) & known, (logits > 0) & known
    both = (positive & predicted).sum()
    total = positive.sum() + predicted.sum()
    return {"f1_micro": (2 * both / total.clamp(min=1)).item()}


def fit(
    step, train_idx: Tensor, val_idx: Tensor | None, epochs: int, batch_size: int, patience: int | None = None,
    scheduler=None, on_epoch: Callable[[EpochRecord], None] | None = None,
) -> History:  # fmt: skip
    """Trains for at most ``epochs``; see ``Step.fit``."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"epochs must be a positive integer; got {epochs!r}.")
    if patience is not None and (patience < 1 or val_idx is None):
        raise ConfigError(f"patience must be a positive number of epochs and needs val_idx; got {patience!r}.")
    history, best = History(), None
    for epoch in range(epochs):
        start = time.perf_counter()
        losses = list(step.epoch(train_idx, batch_size))
        loss = torch.stack(losses).mean().item()
        seconds = time.perf_counter() - start
        val = None if val_idx is None else next(iter(step.evaluate(val_idx, batch_size).values()))
        history.records.append(EpochRecord(epoch, loss, val, seconds))
        if val is None or history.best_val is None or val > history.best_val:
            history.best_epoch, history.best_val = epoch, val
            best = copy.deepcopy(step.model.state_dict()) if val is not None else None
        _advance(scheduler, loss if val is None else val)
        if on_epoch is not None:
            on_epoch(history.records[-1])
        if patience is not None and epoch - history.best_epoch >= patience:
            history.stopped_early = True
            break
    if best is not None:
        step.model.load_state_dict(best)
    return history


def _advance(scheduler, metric: float) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(metric)
    else:
        scheduler.step()
