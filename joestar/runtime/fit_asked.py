"""What a ``fit`` was asked for: one that goes on from its checkpoints is asked for the same."""

from joestar.errors import CheckpointError
from joestar.metrics import Metric

_WORDS = {"validated": "whether there is val_idx"}


def asked(settings, metrics: list[Metric] | None, validated: bool, schedule: str | None) -> dict:
    """What decides which epoch is the best, and when rates change.

    Args:
        settings: ``fit.Settings``; metrics: that it names, resolved; validated: there is ``val_idx``; schedule: when
            the scheduler steps.
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
