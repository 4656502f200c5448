"""Metrics in float64, on the tensors' device; each takes aligned outputs and targets and returns a number.

Entries whose target is NaN are left out. What is not defined (an AUC of one class, R2 of one node) is NaN, and so is
any metric where an output is NaN whose target is known: a model that diverged has no accuracy.
"""

import math

import torch
from torch import Tensor

# --- regression: output and target [n] or [n, T] ---


def mae(output: Tensor, target: Tensor) -> float:
    """Mean absolute error over all known entries."""
    return _mean(_errors(output, target).abs())


def mse(output: Tensor, target: Tensor) -> float:
    """Mean squared error over all known entries."""
    return _mean(_errors(output, target).square())


def rmse(output: Tensor, target: Tensor) -> float:
    """Root of the mean squared error over all known entries."""
    return math.sqrt(mse(output, target))


def r2(output: Tensor, target: Tensor) -> float:
    """Coefficient of determination, mean over the columns; a constant column counts 1 if it is met, else 0."""
    output, target = _columns(output.double()), _columns(target.double())
    if not len(target):
        return math.nan
    known = ~torch.isnan(target)
    number = known.sum(0)
    center = torch.where(known, target, 0).sum(0) / number
    total = torch.where(known, target - center, 0).square().sum(0)
    rest = torch.where(known, output - target, 0).square().sum(0)
    constant = torch.where(known, target, -math.inf).amax(0) == torch.where(known, target, math.inf).amin(0)
    degenerate = torch.where(rest == 0, 1.0, torch.where(torch.isnan(rest), rest, 0.0))
    columns = torch.where(constant, degenerate, 1 - rest / total)
    return _mean(columns[number > 1])


def _errors(output: Tensor, target: Tensor) -> Tensor:
    known = ~torch.isnan(target)
    return output.double()[known] - target.double()[known]


# --- one of C classes: output [n, C], target int64 [n] in [0, C) ---


def accuracy(output: Tensor, target: Tensor) -> float:
    """Share of the nodes whose largest output is that of their class."""
    return math.nan if _has_nan(output) else _mean((output.argmax(1) == target).double())


def macro_f1(output: Tensor, target: Tensor) -> float:
    """Mean F1 of the classes that occur among targets or predictions."""
    if _has_nan(output):
        return math.nan
    classes, predicted = output.shape[1], output.argmax(1)
    hits = torch.bincount(target[predicted == target], minlength=classes).double()
    total = torch.bincount(target, minlength=classes) + torch.bincount(predicted, minlength=classes)
    return _mean((2 * hits / total)[total > 0])


def class_auc(output: Tensor, target: Tensor) -> float:
    """Area under the ROC curve of every class against the rest, by softmax; mean over classes that have both sides."""
    return roc_auc_macro(output.double().softmax(1), _one_hot(target, output.shape[1]))


def class_ap(output: Tensor, target: Tensor) -> float:
    """Average precision of every class against the rest, by softmax; mean over classes that occur."""
    return ap_macro(output.double().softmax(1), _one_hot(target, output.shape[1]))


def _one_hot(target: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(target, classes).double()


# --- yes or no: output above 0 means yes; target 0, 1 or NaN, [n] or [n, T] ---


def hit_rate(output: Tensor, target: Tensor) -> float:
    """Share of the known entries that are predicted right."""
    known = ~torch.isnan(target)
    return math.nan if _has_nan(output[known]) else _mean(((output > 0) == (target > 0.5))[known].double())


def f1_micro(output: Tensor, target: Tensor) -> float:
    """F1 over all known entries together; 0 without any positive one, in targets or predictions."""
    both, total = _overlap(output, target)
    if _has_nan(both):
        return math.nan
    return (2 * both.sum() / total.sum().clamp(min=1)).item() if target.numel() else math.nan


def f1_macro(output: Tensor, target: Tensor) -> float:
    """Mean F1 of the columns; 0 for those without any positive entry, in targets or predictions."""
    both, total = _overlap(output, target)
    seen = (~torch.isnan(_columns(target))).any(0)
    return _mean((2 * both / total.clamp(min=1))[seen])


def _overlap(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Per column: true positives, and positive targets plus positive predictions; NaN of NaN outputs."""
    output, target = _columns(output), _columns(target)
    known = ~torch.isnan(target)
    positive, predicted = (target > 0.5) & known, (output > 0) & known
    lost = (torch.isnan(output) & known).any(0)
    both, total = (positive & predicted).sum(0).double(), (positive.sum(0) + predicted.sum(0)).double()
    return both.masked_fill(lost, math.nan), total


def roc_auc(output: Tensor, target: Tensor) -> float:
    """Area under the ROC curve over all known entries together: chance that a positive one outranks a negative one."""
    output, positive = _known(output, target)
    ones = positive.sum().item()
    zeros = positive.numel() - ones
    if not ones or not zeros or bool(torch.isnan(output).any()):
        return math.nan
    ranks = _ranks(output)
    return (ranks[positive].sum().item() - ones * (ones + 1) / 2) / (ones * zeros)


def ap(output: Tensor, target: Tensor) -> float:
    """Average precision over all known entries together: precision at every threshold, weighted by gained recall."""
    output, positive = _known(output, target)
    ones = positive.sum().item()
    if not ones or bool(torch.isnan(output).any()):
        return math.nan
    order = torch.argsort(output, descending=True)
    output, hits = output[order], positive[order].double().cumsum(0)
    last = torch.cat([output[1:] != output[:-1], torch.ones_like(positive[:1])])  # of entries with equal outputs
    at = torch.nonzero(last).flatten()
    hits = hits[at]
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return (gained * hits / (at + 1)).sum().item() / ones


def roc_auc_macro(output: Tensor, target: Tensor) -> float:
    """Mean area under the ROC curve of the columns that have positive and negative entries."""
    return _over_columns(roc_auc, output, target)


def ap_macro(output: Tensor, target: Tensor) -> float:
    """Mean average precision of the columns that have positive entries."""
    return _over_columns(ap, output, target)


def _known(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    known = ~torch.isnan(target)
    return output.double()[known], target[known] > 0.5


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[inverse]


def _over_columns(metric, output: Tensor, target: Tensor) -> float:
    output, target = _columns(output), _columns(target)
    found = [(column, metric(output[:, column], target[:, column])) for column in range(target.shape[1])]
    if any(bool(torch.isnan(output[~torch.isnan(target[:, c]), c]).any()) for c, _ in found):
        return math.nan
    defined = [value for _, value in found if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _has_nan(values: Tensor) -> bool:
    return bool(torch.isnan(values).any())


def _columns(values: Tensor) -> Tensor:
    return values[:, None] if values.dim() == 1 else values.flatten(1)


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan
