"""Samples of every loss that has a rule for padding, with each reduction."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .hostile import Sample, rows, sample, shared, signed

CLASS = rows(make=lambda v: (v * 4).floor(), dtype=torch.int64)
IGNORED = rows(make=lambda v: torch.where(v > 0.5, (v * 4).floor(), -100), dtype=torch.int64)
LABELS = rows(4, make=lambda v: (v * 4).floor(), dtype=torch.int64)
SIGNS = rows(make=lambda v: torch.where(v > 0.5, 1.0, -1.0), grad=False)
LOGITS = rows(4, make=signed)
TARGET = rows(4, grad=False)
WEIGHT = shared(4, grad=False)


def reduced(loss, *operands, reductions=("mean", "none"), **options) -> list[Sample]:
    """The loss with these reductions."""
    return [
        sample(
            lambda *tensors, r=reduction: loss(*tensors, reduction=r, **options),
            *operands,
        )
        for reduction in reductions
    ]


def log_likelihood(z: Tensor, y: Tensor, **options) -> Tensor:
    return F.nll_loss(z.log_softmax(1), y, **options)


def weighted(z: Tensor, y: Tensor, w: Tensor, **options) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, pos_weight=w, **options)


LOSSES = {
    "cross_entropy_loss": [
        *reduced(F.cross_entropy, LOGITS, CLASS), *reduced(F.cross_entropy, LOGITS, IGNORED, label_smoothing=0.1),
        *reduced(lambda z, y, w, **o: F.cross_entropy(z, y, w, **o), LOGITS, CLASS, WEIGHT, label_smoothing=0.1),
        *reduced(F.cross_entropy, LOGITS, TARGET),
    ],
    "nll_loss_nd": reduced(log_likelihood, LOGITS, CLASS) + reduced(log_likelihood, LOGITS, IGNORED),
    "binary_cross_entropy_with_logits": [
        *reduced(F.binary_cross_entropy_with_logits, LOGITS, TARGET),
        *reduced(weighted, LOGITS, TARGET, WEIGHT),
    ],
    "binary_cross_entropy": [
        sample(lambda z, y: F.binary_cross_entropy(z.sigmoid(), y.clamp(0, 1)), LOGITS, TARGET),
        sample(lambda p, y: F.binary_cross_entropy(p, y), rows(4), TARGET, tame="both must be in [0, 1]"),
    ],
    "mse_loss": reduced(F.mse_loss, LOGITS, rows(4), reductions=("mean", "sum", "none")),
    "l1_loss": reduced(F.l1_loss, LOGITS, TARGET),
    "smooth_l1_loss": reduced(F.smooth_l1_loss, LOGITS, TARGET, beta=0.3),
    "huber_loss": reduced(F.huber_loss, LOGITS, TARGET, delta=0.3),
    "soft_margin_loss": [sample(lambda z, y: F.soft_margin_loss(z, y.sign()), LOGITS, TARGET)],
    "poisson_nll_loss": [sample(lambda z, y: F.poisson_nll_loss(z, y, full=True), LOGITS, TARGET)],
    "kl_div": [
        *reduced(lambda z, y, **o: F.kl_div(z.log_softmax(1), y, **o), LOGITS, TARGET),
        sample(lambda z, y: F.kl_div(z, y, log_target=True, reduction="sum"), LOGITS, TARGET),
    ],
    "margin_ranking_loss": reduced(F.margin_ranking_loss, rows(), rows(make=lambda v: 1 - v), SIGNS),
    "hinge_embedding_loss": reduced(F.hinge_embedding_loss, rows(), SIGNS),
    "cosine_embedding_loss": [
        sample(lambda x, y, s: F.cosine_embedding_loss(x, y, s), LOGITS, rows(4), SIGNS)
    ],
    "triplet_margin_loss": [
        sample(lambda x, y, z: F.triplet_margin_loss(x, y, z), LOGITS, rows(4), rows(4))
    ],
    "multi_margin_loss": reduced(F.multi_margin_loss, LOGITS, CLASS),
    "multilabel_margin_loss": [
        sample(lambda z, y: F.multilabel_margin_loss(z, y), LOGITS, LABELS)
    ],
}  # fmt: skip
"""By the name that the op has in a captured graph."""
