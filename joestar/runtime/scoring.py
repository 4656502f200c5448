"""Scores of a step's predictions."""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.lowering.loss import Loss, check_labels
from joestar.lowering.outputs import loss_and_values
from joestar.metrics import Metric, Task, aligned, infer_task, resolve, resolve_all

MAIN = ("logits", "out", "output", "pred")
"""Keys of a model's dict under which what is scored is looked for."""


def main_output(outputs):
    """The tensor to score: itself, the only one of a structure, or that under a key of ``MAIN``; else all as it is."""
    if isinstance(outputs, dict):
        found = next((outputs[key] for key in MAIN if isinstance(outputs.get(key), Tensor)), None)
        if found is not None:
            return found
    if isinstance(outputs, (dict, tuple, list)):
        values = list(outputs.values()) if isinstance(outputs, dict) else list(outputs)
        if len(values) == 1 and isinstance(values[0], Tensor):
            return values[0]
    return outputs


class Scorer:
    """What scores are computed with.

    Args:
        graph: has the labels, ``ndata["y"]``; loss_fn: as given to ``compile``, prepared: as it is traced; or ``None``.
    """

    def __init__(self, graph: Graph, loss_fn: Callable | None, prepared: Loss | None):
        self.graph, self.loss_fn, self.prepared = graph, loss_fn, prepared

    def metrics(self, metric, mode: str | None = None) -> list[Metric] | None:
        """The metrics meant; ``None``: the defaults of the task, which outputs decide.

        Raises:
            ConfigError: for names that do not exist, and the loss where there is none.
        """
        found = None if metric is None else resolve_all(metric, mode)
        if found and self.prepared is None and any(m.is_loss for m in found):
            raise ConfigError("metric 'loss' needs a step compiled with a loss.")
        if found is None and mode is not None:
            resolve("accuracy", None if mode in ("min", "max") else mode)  # says what mode may be
            raise ConfigError(f"mode={mode!r} was given without metric=.")
        return found

    def task(self, outputs: Tensor, y: Tensor) -> Task:
        """The kind of prediction; see ``metrics.infer_task``."""
        return infer_task(outputs, y, self.loss_fn, self.graph.ndata["y"])

    def __call__(self, outputs, idx: Tensor, metrics: list[Metric] | None) -> tuple[dict[str, float], list[Metric]]:
        """Name -> score of what the model returned for these nodes, and the metrics."""
        y = check_labels(self.graph.ndata.get("y"))[idx]
        main, task = main_output(outputs), None
        if isinstance(main, Tensor) and not (metrics and all(m.is_function or m.is_loss for m in metrics)):
            task = self.task(main, y)
        if metrics is None:
            if task is None:
                raise ConfigError(
                    f"the model returns a {type(outputs).__name__}, and it is not clear what of it to score: return a "
                    "dict with the key 'logits', or give metric= a function (output, target) -> float."
                )
            metrics = resolve_all(None, None, task)
        found = {}
        for metric in metrics:
            if metric.is_loss:
                found[metric.name] = self._loss(outputs, y, idx)
            else:
                found[metric.name] = metric(outputs if metric.is_function else main, y, task)
        return found, metrics

    def check(self, outputs, idx: Tensor, metrics: list[Metric] | None) -> list[Metric] | None:
        """Raises what scoring outputs of these shapes would raise, without functions and objects being called.

        Returns:
            The metrics, as far as it is known which.
        """
        main = main_output(outputs)
        if not isinstance(main, Tensor):
            return metrics
        told = None if metrics is None else [m for m in metrics if not m.is_function and not m.is_loss]
        if told is None or told:
            task = self.task(main, self.graph.ndata["y"][idx])
            aligned(main, self.graph.ndata["y"][idx], task)
            for metric in told or []:
                if metric.given is None:
                    resolve(metric.of or metric.name, None, task)
            return resolve_all(None, None, task) if metrics is None else metrics
        return metrics

    @torch.no_grad()
    def _loss(self, outputs, y: Tensor, idx: Tensor) -> float:
        data = self.graph.ndata
        further = {name: idx if name == "seeds" else data[name][idx] for name in self.prepared.inputs}
        value, _ = loss_and_values(self.prepared.call(outputs, y, **further), self.prepared.name)
        return value.item()


def of_first(group: Group | None, scores: dict[str, float]) -> dict[str, float]:
    """Rank 0's scores, on all ranks: of metrics that draw random numbers, too, all decide by the same.

    Raises:
        DistributedError: on all ranks, if they are of other metrics on some.
    """
    if group is None:
        return scores
    facts = {"metrics": ", ".join(scores)}
    return group.agree("the scores of step.evaluate or fit", facts, {"scores": scores})[0]["scores"]


def check_averages(update, wanted: bool) -> None:
    """Raises ``ConfigError`` if averages are ``wanted`` and the step was compiled without ``ema``."""
    if wanted and (update is None or update.average is None):
        raise ConfigError("ema=True needs averages of the weights: joestar.compile(..., ema=0.999).")


def with_averages(update, wanted: bool, call: Callable):
    """What ``call()`` returns; if ``wanted``, parameters are their moving averages within.

    Raises:
        ConfigError: the step was compiled without ``ema``.
    """
    check_averages(update, wanted)
    if not wanted:
        return call()
    average = update.average
    try:
        try:
            average.exchange(True)
            return call()
        finally:
            average.exchange(False)
    finally:
        average.exchange(False)  # an interrupt may have come in front of the one above
