"""Losses in the forms that the compiled step can mask, and the checks of labels."""

import copy
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.errors import LabelError

IGNORE_INDEX = -100


def prepare_loss(loss_fn: Callable, labels: Tensor) -> Callable:
    """The loss that is traced: ``loss_fn`` itself, or, for labels with NaN entries, its mean over the known entries.

    Raises:
        LabelError: if labels hold NaN and ``loss_fn`` offers no ``reduction="none"``.
    """
    if not (labels.dtype.is_floating_point and bool(torch.isnan(labels).any())):
        return loss_fn
    per_entry = unreduced(loss_fn)
    if per_entry is None:
        raise LabelError(
            "graph.ndata['y'] holds NaN (unknown labels) and the loss offers no reduction='none', so they cannot be "
            "left out. Give a loss with a `reduction` argument (F.binary_cross_entropy_with_logits, nn.MSELoss, ...)."
        )

    def known_entries(logits: Tensor, y: Tensor) -> Tensor:
        known = ~torch.isnan(y)
        losses = per_entry(logits, torch.where(known, y, torch.zeros_like(y)))
        total = torch.where(known, losses, torch.zeros_like(losses)).sum()
        return total / known.sum().clamp(min=1)

    return known_entries


def unreduced(loss_fn: Callable) -> Callable | None:
    """``loss_fn`` with ``reduction="none"``, or ``None`` if it has no such argument."""
    if isinstance(loss_fn, torch.nn.Module):
        if not hasattr(loss_fn, "reduction"):
            return None
        twin = copy.copy(loss_fn)
        twin.reduction = "none"
        return twin
    try:
        parameters = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return None
    return functools.partial(loss_fn, reduction="none") if "reduction" in parameters else None


def check_labels(labels, num_nodes: int) -> Tensor:
    """``graph.ndata["y"]`` if it can be trained on.

    Raises:
        LabelError: if labels are missing, or neither int64 nor floating point.
    """
    if labels is None:
        raise LabelError("training needs labels: set graph.ndata['y'] (int64 [num_nodes], or float [num_nodes, T]).")
    if labels.dtype != torch.int64 and not labels.dtype.is_floating_point:
        raise LabelError(
            f"graph.ndata['y'] must be int64 (classes) or floating point (targets); got {labels.dtype}. "
            "Convert it with .long()."
        )
    return labels


def check_classes(labels: Tensor, nodes: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises ``LabelError`` unless the class labels of ``nodes`` fit the model's outputs."""
    if labels.dtype.is_floating_point:
        return
    chosen = labels[nodes]
    wrong = torch.nonzero(((chosen < 0) | (chosen >= num_classes)) & (chosen != ignore_index))
    if wrong.numel():
        at = wrong[0].tolist()
        node, value = int(nodes[at[0]]), int(chosen[tuple(at)])
        raise LabelError(
            f"label {value} of node {node} is out of range: the model has {num_classes} outputs, so labels must be in "
            f"[0, {num_classes}), or {ignore_index} for nodes to be ignored. Check out_channels and graph.ndata['y']."
        )
