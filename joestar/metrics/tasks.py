"""What kind of prediction labels ask for, and outputs and targets in the form that its metrics take."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar.errors import ConfigError, LabelError

TASKS = ("multiclass", "binary", "multilabel", "regression")
_CLASSES = (F.cross_entropy, F.nll_loss, F.multi_margin_loss, nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_LOGITS = (
    F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss
)  # fmt: skip
_PROBABILITIES = (F.binary_cross_entropy, nn.BCELoss)
_VALUES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_FAMILIES = {"classes": _CLASSES, "logits": _LOGITS, "probabilities": _PROBABILITIES, "values": _VALUES}


@dataclass(frozen=True)
class Task:
    """A kind of prediction.

    Attributes:
        kind: ``multiclass`` (one of C classes), ``binary``, ``multilabel`` (T times yes or no), or ``regression``.
        probabilities: outputs of binary and multi-label models are probabilities, not logits: yes above 0.5, not 0.
        ignore_index: class of nodes that are left out, beside negative ones.
    """

    kind: str
    probabilities: bool = False
    ignore_index: int | None = None

    def __post_init__(self):
        if self.kind not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}; got {self.kind!r}.")


def family(loss) -> str | None:
    """``classes``, ``logits``, ``probabilities`` or ``values`` for PyTorch's losses, by what they compare."""
    loss = _plain(loss)
    for name, members in _FAMILIES.items():
        if any(loss is member or type(loss) is member for member in members):
            return name
    return None


def _plain(loss):
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _ignored(loss) -> int | None:
    if isinstance(loss, functools.partial):
        return loss.keywords.get("ignore_index", _ignored(loss.func))
    return getattr(loss, "ignore_index", None)


def infer_task(output: Tensor, target: Tensor, loss=None, labels: Tensor | None = None) -> Task:
    """The kind of prediction, by the loss if it is one of PyTorch's, else by dtype, values and shape of the labels.

    Integers are classes (with one output per node: 0 or 1); floating-point labels of 0, 1 and NaN only are yes or no;
    other ones are values.

    Args:
        output: one row per node; target: its labels, ``[n]`` or ``[n, T]``; labels: those of all nodes, if known: a
            kind must not depend on which nodes are scored.

    Raises:
        LabelError: labels do not fit the loss or the outputs, or could mean several things.
    """
    kind, labels = family(loss), target if labels is None else labels
    wide = target.dim() > 1 and target[0:1].numel() != 1
    if not target.dtype.is_floating_point:
        return _of_integers(output, target, kind, labels, wide, _ignored(loss))
    if kind == "classes":
        return Task("multiclass")  # probabilities of classes
    yes_or_no = _only_zero_and_one(labels)
    if kind == "values" or (kind is None and not yes_or_no):
        return Task("regression")
    if not yes_or_no:
        raise LabelError(
            "the loss is a binary cross entropy and graph.ndata['y'] has values beside 0, 1 and NaN: it is not clear "
            "how to score them. Give metric=, for example a function (output, target) -> float."
        )
    return Task("multilabel" if wide else "binary", kind == "probabilities")


def _of_integers(output: Tensor, target: Tensor, kind, labels: Tensor, wide: bool, ignored: int | None) -> Task:
    many = output.dim() > 1 and output.shape[1] > 1
    if kind == "values":
        raise LabelError("the loss compares values and graph.ndata['y'] holds integers: convert it with .float().")
    if many and (kind == "classes" or not wide or output.dim() > 2):
        return Task("multiclass", ignore_index=ignored)
    if bool((labels > 1).any()):
        raise LabelError(
            f"labels go up to {int(labels.max())} and outputs are {list(output.shape)}: classes need an output each "
            "([n, C]); values to predict must be floating point: graph.ndata['y'].float()."
        )
    return Task("multilabel" if wide else "binary", kind == "probabilities")


def _only_zero_and_one(labels: Tensor) -> bool:
    return bool(((labels == 0) | (labels == 1) | torch.isnan(labels)).all())


def aligned(output: Tensor, target: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Outputs and targets of the nodes that have a label, in the form that the metrics of a task take.

    Returns:
        ``([n, C], int64 [n])`` for classes; else two tensors of one shape, ``[n]`` or ``[n, T]``, where targets are
        floating point, NaN where unknown.

    Raises:
        LabelError: shapes do not fit, or no node has a label.
    """
    if task.kind == "multiclass":
        return _aligned_classes(output, target, task)
    if output.shape != target.shape and output[0:1].numel() == target[0:1].numel() == 1:
        output, target = output.reshape(-1), target.reshape(-1)
    if output.shape != target.shape:
        raise LabelError(
            f"cannot score outputs {list(output.shape)} against labels {list(target.shape)} ({task.kind}): expected "
            "the same shape. Make the model's last layer as wide as graph.ndata['y']."
        )
    if not target.dtype.is_floating_point:
        target = target.double().masked_fill(target < 0, torch.nan)
    if task.kind == "binary":
        output, target = output.reshape(-1), target.reshape(-1)
    known = ~torch.isnan(target)
    _check_any(known)
    rows = known if known.dim() == 1 else known.flatten(1).any(1)
    output, target = output[rows], target[rows]
    return output, target


def _aligned_classes(output: Tensor, target: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    if target.dtype.is_floating_point and target.dim() > 1:  # probabilities of classes
        unknown = torch.isnan(target).any(1)
        target = target.nan_to_num(0).argmax(1).masked_fill(unknown, -1)
    target = target.long()
    if output.dim() > 2:  # several heads, as cross_entropy takes them
        output = output.movedim(1, -1).reshape(-1, output.shape[1])
    target = target.reshape(-1)
    if output.dim() != 2 or len(output) != len(target):
        raise LabelError(f"cannot score outputs {list(output.shape)} against {len(target)} class ids: expected [n, C].")
    known = target >= 0
    if task.ignore_index is not None:
        known &= target != task.ignore_index
    _check_any(known)
    output, target = output[known], target[known]
    if bool((target >= output.shape[1]).any()):
        raise LabelError(f"label {int(target.max())} has no output: outputs are {list(output.shape)}.")
    return output, target


def _check_any(known: Tensor) -> None:
    if not bool(known.any()):
        raise LabelError("none of these nodes has a label: nothing to score.")


def as_task(task) -> Task | None:
    """A ``Task`` from its name, or as given."""
    return Task(task) if isinstance(task, str) else task
