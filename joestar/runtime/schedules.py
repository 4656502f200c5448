"""When a learning-rate scheduler steps: with every step of the optimizer, or once per epoch."""

from torch.optim import lr_scheduler

from joestar.errors import ConfigError

PER_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
"""Schedulers whose lengths are counted in steps."""


def when(scheduler, schedule: str | None, epochs: int, steps: int) -> str:
    """``"step"`` or ``"epoch"``: as asked for, else by the scheduler.

    Args:
        epochs: of the whole ``fit``; steps: of the optimizer per epoch.

    Raises:
        ConfigError: the scheduler cannot be stepped that often, or a plateau would be looked for per step.
    """
    if schedule not in (None, "step", "epoch"):
        raise ConfigError(f"schedule must be 'step', 'epoch' or None; got {schedule!r}.")
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    if plateau and schedule == "step":
        raise ConfigError("ReduceLROnPlateau looks at scores, which there are once per epoch: schedule='epoch'.")
    total = getattr(scheduler, "total_steps", None)
    if schedule is None:
        once_per_epoch = total is not None and total == epochs
        schedule = "step" if isinstance(scheduler, PER_STEP) and not once_per_epoch else "epoch"
    planned = epochs * steps if schedule == "step" else epochs
    if total is not None and total < planned:
        raise ConfigError(
            f"{type(scheduler).__name__} was made for {total} steps, and is to take {planned} ({epochs} epochs"
            f"{f' of {steps} steps of the optimizer' if schedule == 'step' else ''}): give total_steps={planned}"
            + (", or schedule='epoch'." if schedule == "step" else ".")
        )
    return schedule


def check_plateau(scheduler, mode: str, name: str) -> None:
    """Raises ``ConfigError`` where a plateau scheduler would take an improvement for a plateau."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and scheduler.mode != mode:
        raise ConfigError(
            f"ReduceLROnPlateau(mode={scheduler.mode!r}) watches {name}, of which "
            f"{'more' if mode == 'max' else 'less'} is better: make it with mode={mode!r}."
        )


def advance(scheduler, value: float) -> None:
    """The scheduler's step at the end of an epoch, with the monitored value."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(value)
    else:
        scheduler.step()
