"""When a learning-rate scheduler steps: with every step of the optimizer, or once per epoch."""

import warnings

from torch.optim import lr_scheduler

from joestar.errors import ConfigError, JoestarWarning

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


_LENGTHS = ("T_max", "total_steps", "total_iters")
"""What schedulers call the number of steps that they are made for."""


def take_over(scheduler, state: dict) -> None:
    """``load_state_dict``, which has the length of then; says so where another was given."""
    given = {name: getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)}
    scheduler.load_state_dict(state)
    for name, value in given.items():
        if getattr(scheduler, name) != value:
            warnings.warn(
                f"{type(scheduler).__name__} goes on with {name}={getattr(scheduler, name)} of the checkpoint, not "
                f"{value}: rates are those of the run that was broken off. For others, begin a new run with its "
                "weights (model.load_state_dict).", JoestarWarning, stacklevel=3,
            )  # fmt: skip
