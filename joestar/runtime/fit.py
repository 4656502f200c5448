"""Epochs with validation, early stopping and the best parameters kept."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from joestar.errors import CheckpointError, ConfigError, LabelError
from joestar.runtime.checkpoint import Checkpoints


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


class Fit:
    """A ``fit`` under way: what it has seen, and how to go on from a checkpoint."""

    def __init__(self, step, scheduler, checkpoints: Checkpoints | None, every: int | None):
        self.step = step
        self.scheduler = scheduler
        self.checkpoints = checkpoints
        self.every = every
        self.history = History()
        self.best: dict | None = None
        self.losses: list[Tensor] = []
        self.seconds = 0.0

    def train(self, epoch: int, train_idx: Tensor, batch_size: int) -> float:
        """One epoch, or what is left of it: its mean loss."""
        start, before = time.perf_counter(), self.seconds
        for loss in self.step.epoch(train_idx, batch_size):
            self.losses.append(loss.detach())
            if self.every is not None and len(self.losses) % self.every == 0:
                self.seconds = before + time.perf_counter() - start
                self.save()
        loss = torch.stack(self.losses).mean().item()
        self.seconds = before + time.perf_counter() - start
        return loss

    def finish(self, epoch: int, loss: float, val: float | None) -> EpochRecord:
        """Notes an epoch, and keeps the parameters of the best."""
        history = self.history
        history.records.append(EpochRecord(epoch, loss, val, self.seconds))
        if val is None or history.best_val is None or val > history.best_val:
            history.best_epoch, history.best_val = epoch, val
            self.best = copy.deepcopy(self.step.model.state_dict()) if val is not None else None
        _advance(self.scheduler, loss if val is None else val)
        self.losses, self.seconds = [], 0.0
        return history.records[-1]

    def save(self) -> None:
        """Writes a checkpoint, if there is a place for it."""
        if self.checkpoints is None:
            return
        history = asdict(self.history)
        self.checkpoints.save(self.step, fit={
            "history": history, "best": self.best, "seconds": self.seconds,
            "losses": torch.stack(self.losses) if self.losses else None,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        })  # fmt: skip

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one.

        Raises:
            CheckpointError: if it is of something else than a ``fit`` like this one.
        """
        content = self.checkpoints.latest(self.step.graph.device)
        if content is None:
            return
        state = content.get("fit")
        if state is None:
            raise CheckpointError(f"{self.checkpoints.folder} holds no checkpoint of fit: go on with load_state_dict.")
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise CheckpointError("the checkpoint was saved " + ("without" if self.scheduler else "with")
                                  + " a scheduler: expected the same call of fit.")  # fmt: skip
        self.step.load_state_dict(content["step"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        records = [EpochRecord(**record) for record in state["history"].pop("records")]
        self.history = History(records, **state["history"])
        self.best, self.seconds = state["best"], state["seconds"]
        self.losses = [] if state["losses"] is None else list(state["losses"].unbind())


def fit(
    step, train_idx: Tensor, val_idx: Tensor | None, epochs: int, batch_size: int, patience: int | None = None,
    scheduler=None, on_epoch: Callable[[EpochRecord], None] | None = None, checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None, resume: bool = False,
) -> History:  # fmt: skip
    """Trains for at most ``epochs``; see ``Step.fit``."""
    for name, value in (("epochs", epochs), ("checkpoint_every", checkpoint_every)):
        if (name == "epochs" or value is not None) and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigError(f"{name} must be a positive integer; got {value!r}.")
    if patience is not None and (patience < 1 or val_idx is None):
        raise ConfigError(f"patience must be a positive number of epochs and needs val_idx; got {patience!r}.")
    if checkpoints is None and (resume or checkpoint_every is not None):
        raise ConfigError("resume and checkpoint_every need checkpoints=joestar.Checkpoints(folder).")
    run = Fit(step, scheduler, checkpoints, checkpoint_every)
    if resume:
        run.resume()
    history = run.history
    try:
        while len(history.records) < epochs and not history.stopped_early:
            epoch = len(history.records)
            loss = run.train(epoch, train_idx, batch_size)
            val = None if val_idx is None else next(iter(step.evaluate(val_idx, batch_size).values()))
            record = run.finish(epoch, loss, val)
            history.stopped_early = patience is not None and epoch - history.best_epoch >= patience
            run.save()
            if on_epoch is not None:
                on_epoch(record)
    except KeyboardInterrupt:
        run.save()
        raise
    if run.best is not None:
        step.model.load_state_dict(run.best)
    return history


def _advance(scheduler, metric: float) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(metric)
    else:
        scheduler.step()
