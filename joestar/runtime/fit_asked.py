"""What a ``fit`` was asked for: one that goes on from its checkpoints is asked for the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from joestar.errors import CheckpointError, ConfigError
from joestar.metrics import Metric
from joestar.runtime.checkpoint import Checkpoints
from joestar.runtime.fit_calls import check_callback
from joestar.runtime.fit_records import LOSS
from joestar.whole_numbers import plain

_WORDS = {"validated": "whether there is val_idx"}


@dataclass
class Settings:
    """Arguments of ``Step.fit`` beyond seeds and epochs; see there."""

    patience: int | None = None
    scheduler: object = None
    on_epoch: Callable | None = None
    checkpoints: Checkpoints | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    metric: object = None
    mode: str | None = None
    monitor: str | None = None
    schedule: str | None = None
    on_step: Callable | None = None
    loggers: object = None
    log_every: int | None = None
    drop_last: bool = False
    ema: bool = False
    verbose: bool = False

    def plain(self) -> "Settings":
        """The same with numbers of Python's."""
        counts = {name: plain(getattr(self, name)) for name in ("patience", "checkpoint_every", "log_every")}
        return replace(self, **counts)

    def check(self, epochs: int, validated: bool) -> None:
        """Raises ``ConfigError`` for what cannot be."""
        counts = {"checkpoint_every": self.checkpoint_every, "log_every": self.log_every}
        for name, value in [("epochs", epochs), *((k, v) for k, v in counts.items() if v is not None)]:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer; got {value!r}.")
        for name in ("on_epoch", "on_step"):
            check_callback(getattr(self, name), name)
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):
            raise ConfigError(f"checkpoints must be a joestar.Checkpoints(folder); got {self.checkpoints!r}.")
        whole = isinstance(self.patience, int) and not isinstance(self.patience, bool) and self.patience >= 1
        if self.patience is not None and not (whole and (validated or self.monitor == LOSS)):
            raise ConfigError(
                f"patience must be a positive number of epochs and needs val_idx, or monitor={LOSS!r}; got "
                f"{self.patience!r}."
            )
        if self.checkpoints is None and (self.resume or self.checkpoint_every is not None):
            raise ConfigError("resume and checkpoint_every need checkpoints=joestar.Checkpoints(folder).")
        if not validated and (self.metric is not None or self.monitor not in (None, LOSS)):
            raise ConfigError(f"metric and monitor are of validation nodes: give val_idx, or monitor={LOSS!r}.")
        if self.log_every is not None and self.loggers is None:
            raise ConfigError("log_every needs loggers=.")


def asked(settings: Settings, metrics: list[Metric] | None, validated: bool, schedule: str | None) -> dict:
    """What decides which epoch is the best, and when rates change.

    Args:
        metrics: that ``settings`` names, resolved; validated: there is ``val_idx``; schedule: when the
            scheduler steps.
    """
    names = None if metrics is None or settings.metric is None else [metric.name for metric in metrics]
    return {
        "validated": validated, "metric": names, "mode": settings.mode, "monitor": settings.monitor,
        "schedule": schedule, "scheduler": None if settings.scheduler is None else type(settings.scheduler).__name__,
    }  # fmt: skip


def check_asked(state: dict, mine: dict) -> None:
    """Raises ``CheckpointError`` where another call would take other epochs for the best.

    Args:
        state: of the fit, as saved (before there was ``asked``, nothing can be compared).
    """
    for name, value in state.get("asked", mine).items():
        if value != mine[name]:
            raise CheckpointError(
                f"the checkpoint is of a fit with another {_WORDS.get(name, name)}: {value!r}, this one has "
                f"{mine[name]!r}. Expected the same call of fit; epochs, patience and callbacks may differ."
            )
