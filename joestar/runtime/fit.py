"""Epochs with validation, early stopping and the best parameters kept."""

import contextlib
import hashlib
import math
import sys
import time
import warnings
from dataclasses import asdict

import torch
from torch import Tensor

from joestar.distributed import is_first, world_size
from joestar.distributed.division import seeds_per_rank
from joestar.errors import CheckpointError, ConfigError, JoestarWarning
from joestar.metrics import Metric, better
from joestar.runtime.epochs import Epoch
from joestar.runtime.features import not_finite
from joestar.runtime.fit_asked import Settings, asked, check_asked
from joestar.runtime.fit_calls import stops
from joestar.runtime.fit_records import LOSS, EpochRecord, History, StepRecord, copied_weights, kept, line, named
from joestar.runtime.interrupts import Terminated, Whole, terminable
from joestar.runtime.loggers import loggers
from joestar.runtime.schedules import advance, check_length, check_plateau, check_scheduler, take_over, when
from joestar.runtime.scoring import check_averages
from joestar.runtime.seeds import check_batch_size
from joestar.whole_numbers import plain


class Fit:
    """A ``fit`` under way: what it has seen, and how to go on from a checkpoint.

    Attributes:
        epoch: the one under way, until it was scored; trained: that was all of it, and a checkpoint was written before
            it was scored.
        planned: epochs, and steps of the optimizer in each, of a fit with a scheduler.
        stop: a callback wants to; late: patience is over, which a checkpoint says, so that nothing is gone on with.
    """

    def __init__(self, step, train_idx: Tensor, val_idx: Tensor | None, batch_size: int, settings: Settings):
        self.step, self.settings = step, settings
        self.train_idx, self.val_idx = step._seeds(train_idx), None if val_idx is None else step._seeds(val_idx).long()
        self.batch_size = check_batch_size(batch_size)
        check_averages(step._update, settings.ema)
        if settings.scheduler is not None:
            check_scheduler(settings.scheduler, step.optimizer, settings.checkpoints is not None)
        if settings.checkpoints is not None:
            settings.checkpoints.check(step)
        self.history = step.history = History()
        self.losses: list[Tensor] = []
        self.logged: dict[str, list[Tensor]] = {}
        self.seconds = 0.0
        self._clock: tuple[float, float] | None = None
        self.epoch: Epoch | None = None
        self.trained = False
        self.stop = self.late = False
        self.planned = 0, 0
        self.terminated = Terminated()
        self.chosen = self.checked = False
        self.metrics: list[Metric] | None = None
        self.loggers = loggers(settings.loggers) if is_first() else []
        if val_idx is not None:
            self.metrics = step.scorer.metrics(settings.metric, settings.mode)
        if self.metrics is not None:
            self._choose({m.name: m for m in self.metrics})

    def _choose(self, metrics: dict[str, Metric]) -> None:
        """Decides what is monitored."""
        settings, history = self.settings, self.history
        self.chosen = True
        if settings.monitor == LOSS or not metrics:
            history.metric, history.mode = LOSS, "min"
        else:
            name = settings.monitor or next(iter(metrics))
            if name not in metrics:
                raise ConfigError(f"monitor={name!r} is not computed: expected {', '.join([*metrics, LOSS])}.")
            if metrics[name].mode is None:
                raise ConfigError(f"is more or less of {name} better? Give mode='max' or mode='min'.")
            history.metric, history.mode = name, metrics[name].mode
        if settings.scheduler is not None:
            check_plateau(settings.scheduler, history.mode, history.metric)

    def schedule(self, epochs: int, goes_on: bool) -> None:
        """Decides when the scheduler steps.

        Args:
            goes_on: from a checkpoint, which has the scheduler's length.
        """
        number = self.train_idx.numel()
        size = seeds_per_rank(number, self.batch_size, world_size()) * world_size()
        steps = self.step._most_steps(self.train_idx, size, self.settings.drop_last)
        steps = -(-steps // self.step.accumulate)
        self.history.schedule = when(self.settings.scheduler, self.settings.schedule, epochs)
        self.planned = epochs, steps
        if not goes_on:
            check_length(self.settings.scheduler, self.history.schedule, *self.planned)

    def train(self) -> float:
        """One epoch, or what is left of it: its mean loss."""
        settings, step = self.settings, self.step
        self._clock = time.perf_counter(), self.seconds
        number = len(self.history.records)
        self.epoch = epoch = step.epoch(self.train_idx, self.batch_size, drop_last=settings.drop_last)
        for loss in epoch:
            with Whole():
                self._note(loss)
            self.terminated.check()
            self._check_scores()
            self._after_step(StepRecord(number, epoch.position - 1, epoch.steps, loss, epoch.logged), epoch)
            self.terminated.check()
            if settings.checkpoint_every is not None and len(self.losses) % settings.checkpoint_every == 0:
                self._note_seconds()
                self.save_together()
            if self.stop:
                epoch.close()
                break
        self._note_seconds()
        self._clock = None
        return self.mean_loss()

    def _note_seconds(self) -> None:
        if self._clock is not None:
            start, before = self._clock
            self.seconds = before + time.perf_counter() - start

    def mean_loss(self) -> float:
        """Of the epoch's steps."""
        return torch.stack(self.losses).mean().item()

    def _note(self, loss: Tensor) -> None:
        """Behind a step: what is kept of it, and the scheduler."""
        settings, epoch = self.settings, self.epoch
        self.losses.append(loss.detach())
        for name, value in epoch.logged.items():
            self.logged.setdefault(name, []).append(value)
        if settings.scheduler is not None and self.history.schedule == "step" and epoch.updated:
            settings.scheduler.step()

    def catch_up(self) -> None:
        """Behind an interrupt: notes a step that had happened and was not handed out."""
        if self.epoch is not None and self.epoch.begun and self.epoch.position > len(self.losses):
            self._note(self.epoch.latest())
        self._note_seconds()

    def _check_scores(self) -> None:
        """Behind the first step, when the shapes of outputs are known: no epoch is spent on what cannot be scored."""
        if self.checked or self.val_idx is None:
            return
        self.checked = True
        program = self.step._runner.executor.program
        if None not in program.shapes:
            scorer = self.step.scorer
            like = torch.zeros((), dtype=torch.float32, device=scorer.graph.device)
            tensors = [like.expand(self.val_idx.numel(), *shape) for shape in program.shapes]
            outputs, idx = program.assembled(tensors), self.val_idx.to(scorer.graph.device)
            metrics = scorer.check(outputs, idx, self.metrics)
            if metrics is not None and not self.chosen:
                self._choose({m.name: m for m in metrics})

    def _after_step(self, record: StepRecord, epoch) -> None:
        settings = self.settings
        if settings.log_every is not None and (record.step + 1) % settings.log_every == 0:
            values = {"step/loss": record.loss, **{f"step/{name}": v for name, v in record.logged.items()}}
            self._log(
                {name: value.item() for name, value in values.items()}, record.epoch, record.step + 1, epoch.steps
            )
        if settings.on_step is not None:
            self.stop = stops(settings.on_step(record), "on_step")

    def _warn_of(self, loss: float) -> None:
        """Says once that the loss is no number any more, and whether features are the cause."""
        if math.isfinite(loss) or not all(math.isfinite(record.loss) for record in self.history.records):
            return
        graph = self.step.whole
        x = graph.ndata.get("x")
        place = None if x is None or x.is_meta else not_finite(x)
        cause = "All features are finite: a smaller learning rate, or clip_grad_norm, may help."
        if place is not None:
            cause = (
                f"graph.ndata['x'] is not finite: row {place[0]} holds {float(x[place])}. Mend or fill such features."
            )
        elif x is None or x.is_meta:
            cause = "A smaller learning rate, or clip_grad_norm, may help."
        epoch = len(self.history.records) + 1
        warnings.warn(f"the loss of epoch {epoch} is {loss}. {cause}", JoestarWarning, stacklevel=3)

    def finish(self, loss: float) -> EpochRecord:
        """Scores and notes an epoch, and keeps the parameters of the best."""
        if is_first():
            self._warn_of(loss)
        scores = {}
        if self.val_idx is not None:
            batch = self.batch_size * world_size()  # what is sampled depends on it: as in one process with such batches
            scores, metrics = self.step._scores(self.val_idx, batch, self.metrics, self.settings.ema)
            if not self.chosen:
                self._choose({m.name: m for m in metrics})
        with Whole():
            return self._closed(loss, scores)

    def _closed(self, loss: float, scores: dict[str, float]) -> EpochRecord:
        """Behind an epoch that was scored: its record, the best, the scheduler, and whether it is the last."""
        history, settings, step = self.history, self.settings, self.step
        value = scores.get(history.metric, loss)
        epoch, monitored = len(history.records), bool(scores) or settings.monitor == LOSS
        logged = {name: torch.stack(values).mean().item() for name, values in self.logged.items()}
        group = step.optimizer.param_groups[0]
        record = EpochRecord(
            epoch, loss, scores.get(history.metric, next(iter(scores.values()), None)), self.seconds, scores, logged,
            float(group["lr"]),
        )  # fmt: skip
        history.records.append(record)
        if not monitored or epoch == 0 or better(value, history.best_val, history.mode):
            history.best_epoch, history.best_val = epoch, value if monitored else None
            history.best = step.weights(settings.ema) if monitored else None
            history.best_loss = copied_weights(self.loss) if monitored and self.loss is not None else None
        self.late = settings.patience is not None and epoch - history.best_epoch >= settings.patience
        history.stopped_early = self.late or self.stop
        if settings.scheduler is not None and history.schedule == "epoch":
            advance(settings.scheduler, value)
        steps = len(self.losses) if self.epoch is None else self.epoch.steps
        self.epoch, self.trained, self.losses, self.logged, self.seconds = None, False, [], {}, 0.0
        self._log(named(record), epoch, steps, steps)
        return record

    def _log(self, values: dict[str, float], epoch: int, steps: int, of: int) -> None:
        for log in self.loggers:
            log(values, epoch * of + steps)

    def any_stops(self, stop: bool) -> bool:
        """Whether the callback of any rank wants to stop."""
        group = self.step.group
        return stop if group is None else bool(group.largest("the end of an epoch (on_epoch)", [stop])[0])

    # --- checkpoints ---

    def save_together(self) -> None:
        """``save``, for which other ranks wait: they would wait in the next step for less long."""
        group = self.step.group
        if group is None or self.settings.checkpoints is None:
            self.save()
            return
        with group.board.at("writing a checkpoint", long=True):
            self.save()
            group.exchange("a checkpoint of fit")

    def save(self):
        """Writes a checkpoint, if there is a place for it; its path. Of several ranks the first does."""
        settings = self.settings
        if settings.checkpoints is None or not (is_first() or self.step.state_of_all):
            return None
        state = self.step.state_dict()
        if not is_first():
            return None
        return settings.checkpoints.save(state, fit={
            "trained": self.trained or (self.epoch is not None and not self.epoch.running),
            "epoch": self.epoch.number if self.epoch is not None and self.epoch.running else None,
            "history": asdict(self.history) | {"stopped_early": self.late},
            "best": self.history.best, "best_loss": self.history.best_loss, "seconds": self.seconds,
            "losses": torch.stack(self.losses) if self.losses else None,
            "logged": {name: torch.stack(values) for name, values in self.logged.items()},
            "scheduler": None if settings.scheduler is None else settings.scheduler.state_dict(),
            "asked": self.asked,
        })  # fmt: skip

    def newest(self) -> dict | None:
        """What is in the newest checkpoint, if there is one and it is to be gone on from."""
        if not self.settings.resume:
            return None
        content = self.settings.checkpoints.latest("cpu")  # tables over partitions are as large as the host
        if self.step.group is not None:
            history = {} if content is None else content.get("fit", {}).get("history", {})
            same = hashlib.sha256(repr(history).encode()).hexdigest()[:8]  # folders may be the ranks' own
            found = "none" if content is None else f"after {len(history.get('records', []))} epochs ({same})"
            self.step.group.agree("fit(resume=True)", {"newest checkpoint": found})
        return content

    def resume(self, content: dict) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: if it is of something else than a ``fit`` like this one.
        """
        settings = self.settings
        self.loggers = loggers(settings.loggers, goes_on=True) if is_first() else []
        state = content.get("fit")
        if state is None:
            raise CheckpointError(
                f"{settings.checkpoints.folder} holds no checkpoint of fit: go on with load_state_dict."
            )
        if (state["scheduler"] is None) != (settings.scheduler is None):
            raise CheckpointError("the checkpoint was saved " + ("without" if settings.scheduler else "with")
                                  + " a scheduler: expected the same call of fit.")  # fmt: skip
        check_asked(state, self.asked)
        if settings.scheduler is not None:
            check_length(settings.scheduler, self.history.schedule, *self.planned, state["scheduler"])
        self.step.load_state_dict(content["step"])
        if "epoch" in state:  # others were a loop's of its own, broken off
            self.step._resumed = [epoch for epoch in self.step._resumed if epoch["number"] == state["epoch"]]
        if settings.scheduler is not None:
            take_over(settings.scheduler, state["scheduler"])
        history = state["history"]
        records = [EpochRecord(**record) for record in history.pop("records")]
        if records:
            self.chosen = "metric" in history
        else:  # what is monitored may not have been known yet: by default that is up to the first scores
            history |= {"metric": self.history.metric, "mode": self.history.mode}
        self.history = self.step.history = History(records, **history)
        device = self.step.graph.device
        self.history.best = kept(state["best"], device, content["step"].get("versions"))
        self.history.best_loss = kept(state.get("best_loss"), device, content["step"].get("loss_versions"))
        if self.history.stopped_early:  # by the patience of then
            behind = len(records) - 1 - self.history.best_epoch
            self.history.stopped_early = settings.patience is not None and behind >= settings.patience
        self.seconds, self.trained = state["seconds"], state.get("trained", False)
        self.losses = [] if state["losses"] is None else list(state["losses"].to(device).unbind())
        logged = state.get("logged", {}).items()
        self.logged = {name: list(values.to(device).unbind()) for name, values in logged}

    @property
    def loss(self) -> torch.nn.Module | None:
        """The loss, if it is a module of the user's, which may have buffers."""
        prepared = self.step.scorer.prepared
        return None if prepared is None else prepared.module

    @property
    def asked(self) -> dict:
        """See ``fit_asked``."""
        return asked(self.settings, self.metrics, self.val_idx is not None, self.history.schedule)

    def told(self, path) -> str:
        """Where things are, after an interrupt."""
        history = self.history
        where = f"in {path}" if path is not None else "in the model (checkpoints= would have written a file)"
        checkpoints = self.settings.checkpoints
        if not is_first() and checkpoints is not None:
            where = f"in the model; checkpoints are written by rank 0, in {checkpoints.folder}"
        if self.step.state_of_all and checkpoints is not None:
            paths = checkpoints.paths()
            newest = f"the newest whole checkpoint is {paths[-1]}" if paths else "no checkpoint has been written yet"
            where = f"in the model alone; {newest}"
        text = f"fit was interrupted after {len(self.losses)} steps of epoch {len(history.records)}; "
        text += f"the last state is {where}"
        if history.best is None:
            return text + "."
        best = f"epoch {history.best_epoch}, {history.metric} {history.best_val:.6g}"
        return f"{text}; the best parameters ({best}) are {'there, too' if path else 'in step.history.best'}."


def fit(step, train_idx: Tensor, val_idx: Tensor | None, epochs: int, batch_size: int, settings: Settings) -> History:
    """Trains for at most ``epochs``; see ``Step.fit``."""
    epochs, settings = plain(epochs), settings.plain()
    settings.check(epochs, val_idx is not None)
    run = Fit(step, train_idx, val_idx, batch_size, settings)
    with contextlib.nullcontext() if settings.checkpoints is None else settings.checkpoints.occupied():
        return _trained(run, epochs)


def _trained(run: Fit, epochs: int) -> History:
    step, settings = run.step, run.settings
    if run.val_idx is None:
        run._choose({})
    content = run.newest()
    if settings.scheduler is not None:
        run.schedule(epochs, content is not None)
    if content is not None:
        run.resume(content)
    try:
        with terminable() as run.terminated:
            _epochs(run, epochs)
    except BaseException as error:
        interrupt = error if isinstance(error, (KeyboardInterrupt, SystemExit)) else run.terminated.came
        if interrupt is None:
            raise
        run.catch_up()
        text = run.told(None if step.state_of_all else run.save())  # others may be at another step
        interrupt.add_note(text)
        if isinstance(interrupt, SystemExit):  # has no traceback that would show it
            print(text, file=sys.stderr, flush=True)
        if interrupt is error:
            raise
        raise interrupt from error  # something on the way made another error of it
    if run.history.best_loss is not None:
        run.loss.load_state_dict(run.history.best_loss)
    if run.history.best is not None:  # last: averages, of what a loss may hold as it was trained
        step.model.load_state_dict(run.history.best)
    return run.history


def _epochs(run: Fit, epochs: int) -> None:
    settings, history = run.settings, run.history
    while len(history.records) < epochs and not history.stopped_early:
        record = run.finish(run.mean_loss() if run.trained else run.train())
        run.terminated.check()
        if settings.verbose and is_first():
            print(line(record, history, epochs), flush=True)
        run.save_together()
        if settings.on_epoch is not None and run.any_stops(stops(settings.on_epoch(record), "on_epoch")):
            history.stopped_early = True
        run.terminated.check()
