"""Losses over all pairs of seeds (contrast, in-batch negatives): padded equals exact and eager; errors say how."""

import pytest
import torch
import torch.nn.functional as F

from joestar.errors import CaptureError

from .harness import Case, Rows, assert_refused, check, raises
from .test_padding_losses import check_losses, pairs

pytestmark = pytest.mark.usefixtures("quick_captures")


def alike(y):
    """Which pairs are of one class."""
    return (y[:, None, 0] == y[:, 0]).double()


def eye(z):
    return torch.eye(z.shape[0], dtype=torch.bool)


def logits(z, y, **options):
    return F.binary_cross_entropy_with_logits(pairs(z), alike(y), **options)


def test_losses_of_pairs():
    check_losses({
        "bce": logits, "sum": lambda z, y: logits(z, y, reduction="sum"),
        "none": lambda z, y: logits(z, y, reduction="none").mean(1),
        "weights": lambda z, y: logits(z, y, weight=2 - alike(y), pos_weight=torch.tensor(3.0)),
        "weights of rows": lambda z, y: logits(z, y, weight=y[:, 4:5]),
        "mse": lambda z, y: F.mse_loss(pairs(z), alike(y)),
        "l1, the first dimension not of rows": lambda z, y: F.l1_loss(
            torch.stack([pairs(z), pairs(z).tanh()]), torch.stack([alike(y), alike(y)])),
        "kl": lambda z, y: F.kl_div(
            pairs(z) - pairs(z).logsumexp(1, True), pairs(z.tanh()).softmax(1), reduction="batchmean"),
        "ranking": lambda z, y: F.margin_ranking_loss(pairs(z), pairs(z.tanh()), 2 * alike(y) - 1, margin=0.1),
        "hinge, sum": lambda z, y: F.hinge_embedding_loss(pairs(z), 2 * alike(y) - 1, reduction="sum"),
    })  # fmt: skip


def of_both(z):
    """Similarities to two views, without those to itself: what NT-Xent puts side by side."""
    return pairs(z).masked_fill(eye(z), -1e9), F.normalize(z, dim=1) @ F.normalize(z.tanh(), dim=1).T / 0.3


def test_what_the_errors_say_to_write():
    check_losses({
        "in place of cat": lambda z, y: (
            torch.logaddexp(of_both(z)[0].logsumexp(1), of_both(z)[1].logsumexp(1)) - of_both(z)[1].diagonal()).mean(),
        "of a mask": lambda z, y: torch.where(alike(y) > 0, pairs(z), 0).sum(1).sum(0) / (alike(y) > 0).sum(1).sum(0),
        "probabilities": lambda z, y: -(
            pairs(z.tanh()).softmax(1) * (pairs(z) - pairs(z).logsumexp(1, keepdim=True))).sum(1).mean(),
        "trace": lambda z, y: pairs(z).diagonal().sum(),
        "covariance": lambda z, y: ((z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1)).square().sum(),
    })  # fmt: skip
    check(Rows(lambda m, b, h: h * (b.srcs[:, None] == b.dsts).any(1)[:, None]))  # in place of isin


def test_refused_pairs():
    assert_refused({
        "[n] and [n, 1]": (lambda m, b, h: h + F.mse_loss(h[:, 0], h[:, :1]), "one of them [n] and the other [n, 1]?"),
        "two views": (lambda m, b, h: h + torch.cat([h @ h.T, h @ h.T], 1).logsumexp(1)[:, None], "torch.logaddexp(a"),
        "beside columns": (lambda m, b, h: h + torch.cat([h[:, :1], h @ h.T], 1).logsumexp(1)[:, None], "Of the parts"),
        "some pairs": (lambda m, b, h: h + (h @ h.T)[(h @ h.T) > 0].mean(), "torch.where(mask, x, 0).sum(1).sum(0)"),
        "soft targets": (lambda m, b, h: h + F.cross_entropy(h @ h.T, (h @ h.T > 0).double()), "x - x.logsumexp("),
        "trace": (lambda m, b, h: h + (h @ h.T).trace(), "Write x.diagonal().sum()"),
        "isin": (lambda m, b, h: h * torch.isin(b.srcs, b.dsts)[:, None], "(ids[:, None] == among).any(1)"),
    }, "test_padding_pairs.py")  # fmt: skip


def test_covariances_of_torch_are_refused_with_what_to_write():
    with raises(CaptureError, "c.T @ c / (len(x) - 1)"):
        Case(Rows(lambda m, b, h: h + torch.cov(h.T).sum())).trace()
