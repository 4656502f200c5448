"""``metric=`` as people give it: a name, an object with update, compute and reset, or a function."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joestar.errors import ConfigError, LabelError
from joestar.metrics import scores
from joestar.metrics.tasks import Task, aligned, as_task, infer_task

_YES = {"accuracy": scores.hit_rate, "roc_auc": scores.roc_auc, "ap": scores.ap}
_NAMED: dict[str, dict[str, Callable]] = {
    "multiclass": {
        "accuracy": scores.accuracy, "f1_micro": scores.accuracy, "f1_macro": scores.macro_f1,
        "roc_auc": scores.class_auc, "ap": scores.class_ap,
    },
    "binary": {**_YES, "f1": scores.f1_micro, "f1_micro": scores.f1_micro},
    "multilabel": {
        "f1_micro": scores.f1_micro, "f1_macro": scores.f1_macro, "accuracy": scores.hit_rate,
        "roc_auc": scores.roc_auc_macro, "roc_auc_micro": scores.roc_auc, "ap": scores.ap_macro, "ap_micro": scores.ap,
    },
    "regression": {"rmse": scores.rmse, "mae": scores.mae, "mse": scores.mse, "r2": scores.r2},
}  # fmt: skip
"""Task -> name -> function of aligned outputs and targets."""
DEFAULTS = {
    "multiclass": ("accuracy",), "binary": ("accuracy",), "multilabel": ("f1_micro",),
    "regression": ("rmse", "mae", "r2"),
}  # fmt: skip
"""What is scored where nothing is asked for; the first one decides which epoch is the best."""
_SYNONYMS = {
    "acc": "accuracy", "auc": "roc_auc", "auroc": "roc_auc", "rocauc": "roc_auc", "average_precision": "ap",
    "micro_f1": "f1_micro", "macro_f1": "f1_macro", "r2_score": "r2", "l1": "mae",
}  # fmt: skip
_LOWER = ("rmse", "mae", "mse", "loss")
LOSS = "loss"
"""The metric that is the step's own loss."""


@dataclass(frozen=True)
class Metric:
    """A score: its name, whether more is better, and how it is computed.

    Attributes:
        mode: ``max``, ``min``, or ``None`` where nobody said.
        given: the function or object, ``None`` for a named one. of: which named one, if it goes by another name.
    """

    name: str
    mode: str | None
    given: object = None
    of: str | None = None

    @property
    def is_function(self) -> bool:
        """Called with what the model returns; modules with update, compute and reset can be called, too."""
        return callable(self.given) and not _is_object(self.given)

    @property
    def is_loss(self) -> bool:
        """The step's own."""
        return self.given is None and (self.of or self.name) == LOSS

    def __call__(self, output, target: Tensor, task: Task | None = None) -> float:
        """The score of outputs ``[n, ...]`` against their targets.

        Functions get both as they are, and may be given any structure that the model returns; all others get the rows
        of nodes that have a label.

        Args:
            task: the kind of prediction; by default what dtype, values and shapes tell (``infer_task``).

        Raises:
            ConfigError: the task has no such metric, or a function returned something else than a number.
            LabelError: outputs and targets do not fit.
        """
        if self.is_function:
            return self._number(self.given(output, target))
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"metric {self.name!r} needs one tensor of outputs; the model returns a {type(output).__name__}. "
                "Return a dict with the key 'logits', or give metric= a function (output, target) -> float."
            )
        task = task or infer_task(output, target)
        output, target = aligned(output, target, task)
        if self.given is not None:
            return self._number(_updated(self.given, self.name, output, target, task))
        if task.probabilities:
            output = _logits(output)
        return _function(self.of or self.name, task)(output, target)

    def _number(self, value) -> float:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # of tensors of several entries
            raise ConfigError(
                f"metric {self.name!r} gave {_said(value)}: expected one number. Give each score as a metric of its "
                "own: metric={name: function or object, ...}."
            ) from error


def _said(value) -> str:
    """What is no number, in words."""
    keys = f" of {', '.join(map(repr, value))}" if isinstance(value, Mapping) and value else ""
    return f"a {type(value).__name__}{keys}"


def resolve(metric, mode: str | None = None, task: Task | str | None = None) -> Metric:
    """A ``Metric`` from its name, an object with ``update``, ``compute`` and ``reset``, or a function.

    Args:
        mode: ``"min"`` or ``"max"``: which is better; by default that of the name, or ``higher_is_better`` of an
            object or function.
        task: checks that the name is one of this task's metrics.

    Raises:
        ConfigError: the name is unknown or not the task's; mode is neither, or contradicts the name.
    """
    if mode not in (None, "min", "max"):
        raise ConfigError(f"mode must be 'min' or 'max'; got {mode!r}.")
    if isinstance(metric, Metric):
        return metric if mode in (None, metric.mode) else replace(metric, mode=mode)
    if isinstance(metric, str):
        name = _SYNONYMS.get(metric.lower(), metric.lower())
        own = "min" if name in _LOWER else "max"
        if name != LOSS:
            _check_name(metric, name, as_task(task))
        if mode not in (None, own):
            raise ConfigError(f"mode={mode!r} contradicts metric {metric!r}, of which {_WORDS[own]} is better.")
        return Metric(name, own)
    if not (_is_object(metric) or callable(metric)):
        raise ConfigError(
            f"metric must be a name ({', '.join(named())}), an object with update, compute and reset, or a function "
            f"(output, target) -> float; got {type(metric).__name__}."
        )
    higher = getattr(metric, "higher_is_better", None)
    own = None if higher is None else ("max" if higher else "min")
    name = getattr(metric, "__name__", type(metric).__name__)
    return Metric(name.strip("<>"), mode or own, metric)


_WORDS = {"min": "less", "max": "more"}


def resolve_all(metric=None, mode: str | None = None, task: Task | str | None = None) -> list[Metric]:
    """Metrics from one or several (a list, or a dict by name); ``None``: the task's ``DEFAULTS``. mode: the first's."""
    if metric is None:
        task = as_task(task)
        if task is None:
            raise ConfigError(f"which metric? Give a name ({', '.join(named())}), a function, or the task.")
        metric = DEFAULTS[task.kind]
    if isinstance(metric, Mapping):
        found = [resolve(value, mode if i == 0 else None, task) for i, value in enumerate(metric.values())]
        found = [
            replace(m, name=str(name), of=(m.of or m.name) if m.given is None else None)
            for name, m in zip(metric, found, strict=True)
        ]
        return _distinct(found)
    several = isinstance(metric, Iterable) and not isinstance(metric, (str, torch.nn.Module)) and not _is_object(metric)
    if several:
        return _distinct([resolve(value, mode if i == 0 else None, task) for i, value in enumerate(metric)])
    return [resolve(metric, mode, task)]


def _distinct(metrics: list[Metric]) -> list[Metric]:
    """Raises ``ConfigError`` if two have one name: scores are told by it."""
    names = [metric.name for metric in metrics]
    again = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if again is not None:
        raise ConfigError(
            f"two metrics are called {again!r}: scores go by their names. Give a dict, for example "
            f"metric={{'{again}_1': ..., '{again}_2': ...}}."
        )
    return metrics


def named(task: str | None = None) -> list[str]:
    """Names of metrics, of one task or of all."""
    tables = _NAMED.values() if task is None else [_NAMED[task]]
    return list(dict.fromkeys(name for table in tables for name in table))


def better(value: float, than: float | None, mode: str) -> bool:
    """Whether a score is an improvement; a number is one on NaN, and NaN never is."""
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value > than if mode == "max" else value < than


def _check_name(given: str, name: str, task: Task | None) -> None:
    if name not in named():
        close = difflib.get_close_matches(name, [*named(), *_SYNONYMS], 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"there is no metric {given!r};{hint} Metrics are: {', '.join([*named(), LOSS])}.")
    if task is not None:
        _function(name, task)


def _function(name: str, task: Task) -> Callable:
    table = _NAMED[task.kind]
    if name not in table:
        raise ConfigError(
            f"metric {name!r} is none of a {task.kind} task, which these labels and outputs are: expected one of "
            f"{', '.join(table)}."
        )
    return table[name]


def _logits(output: Tensor) -> Tensor:
    """Of probabilities, in float64: above 0 means yes, and small ones keep their order."""
    return output.double().clamp(0, 1).logit()


def _is_object(metric) -> bool:
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


def _updated(metric, name: str, output: Tensor, target: Tensor, task: Task):
    if target.dtype.is_floating_point:
        if bool(torch.isnan(target).any()):
            raise LabelError(
                f"labels hold NaN for some entries of a node, which metric object {name} cannot leave out: give a "
                "function (output, target) -> float, or a name."
            )
        if task.kind != "regression":
            target = target.long()
    if not task.probabilities and task.kind in ("binary", "multilabel"):
        output = output.sigmoid()
    if isinstance(metric, torch.nn.Module):
        metric = metric.to(output.device)
    metric.reset()
    metric.update(output, target)
    return metric.compute()
