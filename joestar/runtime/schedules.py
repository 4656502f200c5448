"""When a learning-rate scheduler steps: with every step of the optimizer, or once per epoch."""

import warnings
from collections.abc import Iterator, Mapping

from torch.optim import Optimizer, lr_scheduler

from joestar.errors import CheckpointError, ConfigError, JoestarWarning
from joestar.runtime.checkpoint import storable
from joestar.runtime.fit_calls import accepts

PER_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
"""Schedulers whose lengths are counted in steps."""


def check_scheduler(scheduler, optimizer, saved: bool) -> None:
    """Raises ``ConfigError`` for one that cannot be stepped as ``fit`` does, is over another optimizer, or is ``saved``
    in checkpoints and has no state that they can hold."""
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"scheduler must be one of torch.optim.lr_scheduler over the step's optimizer; got {scheduler!r}."
        )
    name, plateau = type(scheduler).__name__, isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    if not accepts(scheduler.step, *([0.0] if plateau else [])):
        raise ConfigError(
            f"{name}.step needs arguments that fit does not have: expected step(). Leave scheduler= out, and call it "
            "in on_epoch= or on_step=, for example on_epoch=lambda record: scheduler.step(record.epoch + 1)."
        )
    over = getattr(scheduler, "optimizer", optimizer)
    groups = getattr(over, "param_groups", optimizer.param_groups)  # of what wraps the optimizer they are its own
    if isinstance(over, Optimizer) and not any(one is other for one in groups for other in optimizer.param_groups):
        raise ConfigError(
            f"{name} is over another optimizer than the step's, whose rates would not change: make it with "
            "step.optimizer."
        )
    if saved:
        _check_saved(scheduler, name)


def _check_saved(scheduler, name: str) -> None:
    lacking = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, method, None))]
    if lacking:
        raise ConfigError(
            f"{name} has no {' and no '.join(lacking)}: a fit with checkpoints= goes on with the scheduler's state. "
            "Give it both, as torch.optim.lr_scheduler.LRScheduler has them, or leave checkpoints= out."
        )
    try:
        state = scheduler.state_dict()
    except Exception as error:
        raise ConfigError(
            f"{name}.state_dict() fails, which checkpoints= needs ({type(error).__name__}: {error})."
        ) from error
    storable(state, f"{name}.state_dict()")


def when(scheduler, schedule: str | None, epochs: int) -> str:
    """``"step"`` or ``"epoch"``: as asked for, else by the scheduler.

    Args:
        epochs: of the whole ``fit``.

    Raises:
        ConfigError: a plateau would be looked for per step.
    """
    if schedule not in (None, "step", "epoch"):
        raise ConfigError(f"schedule must be 'step', 'epoch' or None; got {schedule!r}.")
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    if plateau and schedule == "step":
        raise ConfigError("ReduceLROnPlateau looks at scores, which there are once per epoch: schedule='epoch'.")
    if schedule is None:
        once_per_epoch = getattr(scheduler, "total_steps", None) == epochs
        schedule = "step" if isinstance(scheduler, PER_STEP) and not once_per_epoch else "epoch"
    return schedule


def check_length(scheduler, schedule: str, epochs: int, steps: int, saved: Mapping | None = None) -> None:
    """Raises for a scheduler that was made for fewer steps than it would take.

    Args:
        epochs: of the whole ``fit``; steps: of the optimizer per epoch; saved: the state of a checkpoint that it goes
            on with, if there is one.

    Raises:
        ConfigError: as it is given; CheckpointError: as it was saved.
    """
    name, planned = type(scheduler).__name__, epochs * steps if schedule == "step" else epochs
    of = f"{planned} ({epochs} epochs{f' of {steps} steps of the optimizer' if schedule == 'step' else ''})"
    if saved is not None:
        total = saved.get("total_steps") if isinstance(saved, Mapping) else None
        if total is not None and total < planned:
            raise CheckpointError(
                f"{name} of the checkpoint was made for {total} steps, and is to take {of}: ask for fewer epochs, or "
                "begin a new run with its weights (model.load_state_dict)."
            )
        return
    total = getattr(scheduler, "total_steps", None)
    taken = 0 if total is None else max(0, getattr(scheduler, "last_epoch", 0))
    if total is None or taken + planned <= total:
        return
    if taken:
        raise ConfigError(
            f"{name} was made for {total} steps, has taken {taken} of them, and is to take {of} more: make a new one "
            "for every fit that does not go on from a checkpoint."
        )
    other = ", or schedule='epoch'" if schedule == "step" else ""
    raise ConfigError(f"{name} was made for {total} steps, and is to take {of}: give total_steps={planned}{other}.")


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
    """``load_state_dict``, which has the lengths of then; says so where others were given."""
    given = list(_lengths(scheduler.state_dict()))
    scheduler.load_state_dict(state)
    for (name, value), (_, now) in zip(given, _lengths(scheduler.state_dict()), strict=False):
        if now != value:
            warnings.warn(
                f"{type(scheduler).__name__} goes on with {name}={now} of the checkpoint, not {value}: rates are those "
                "of the run that was broken off. For others, begin a new run with its weights (model.load_state_dict).",
                JoestarWarning, stacklevel=3,
            )  # fmt: skip


def _lengths(state) -> Iterator[tuple[str, int]]:
    """Lengths in a scheduler's state, and in those of the schedulers that it is made of."""
    if not isinstance(state, (Mapping, list, tuple)):
        return
    for name, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        if name in _LENGTHS:
            yield name, value
        else:
            yield from _lengths(value)
