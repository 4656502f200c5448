"""Scores of predictions: by name, as an object like torchmetrics', or as a function of (output, target)."""

from joestar.metrics.resolve import DEFAULTS, Metric, better, named, resolve, resolve_all
from joestar.metrics.tasks import TASKS, Task, aligned, infer_task

__all__ = [
    "DEFAULTS", "TASKS", "Metric", "Task", "aligned", "better", "infer_task", "named", "resolve", "resolve_all"
]  # fmt: skip
