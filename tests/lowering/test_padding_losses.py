"""Losses over padded seeds: padded equals exact and eager, or is refused."""

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real
from torch import nn
from torch.distributions import Categorical, Normal, Poisson

from joestar.errors import DomainError

from .harness import NUM_CLASSES, NUM_NODES, OLDER, Case, Heads, Rows, assert_refused, check, small_graph, targets

pytestmark = pytest.mark.usefixtures("quick_captures")

ONE = torch.ones(1, dtype=torch.int64)
W = torch.tensor([0.3, 1.0, 2.0, 0.5], dtype=torch.float64)


def labels() -> torch.Tensor:
    """Columns 0: class; 1: class or -100; 2: bit; 3: bit; from 4: probabilities."""
    generator = torch.Generator().manual_seed(7)
    classes = torch.randint(0, NUM_CLASSES, (NUM_NODES, 1), generator=generator)
    some = torch.where(torch.arange(NUM_NODES)[:, None] % 3 == 0, -100, classes)
    bits = torch.randint(0, 2, (NUM_NODES, 2), generator=generator)
    return torch.cat([classes, some, bits, targets(NUM_CLASSES)], 1)


def check_losses(losses: dict) -> Case:
    """``check`` of many losses at once: each is given the logits of a head of its own, and the columns above."""

    def loss(z, y):
        total = 0
        for logits, f in zip(z.split(NUM_CLASSES, 1), losses.values(), strict=True):
            total = total + f(logits, y).mean()
        return total

    model = Heads(dict.fromkeys(losses, lambda m, b, h: h), out=NUM_CLASSES)
    return check(model, loss=loss, graph=small_graph(labels()))


def classes(**options):
    return lambda z, y: F.cross_entropy(z, y[:, 0].long(), **options)


def some(**options):
    return lambda z, y: F.cross_entropy(z, y[:, 1].long(), **options)


def soft(loss, **options):
    return lambda z, y: loss(z, y[:, 4:], **options)


def bits(z, y, **options):
    return F.cross_entropy(z.reshape(-1, 2, 2), y[:, 2:4].long(), **options)


def log_likelihood(column: int = 0, **options):
    return lambda z, y: F.nll_loss(z.log_softmax(1), y[:, column].long(), **options)


def sign(y):
    return y[:, 2] * 2 - 1


def test_cross_entropy():
    check_losses({
        "mean": classes(), "sum": classes(reduction="sum"), "none": classes(reduction="none"),
        "weight": classes(weight=W), "weight, sum": classes(weight=W, reduction="sum"),
        "weight, none": classes(weight=W, reduction="none"),
        "smoothing": classes(label_smoothing=0.1), "smoothing, weight": classes(label_smoothing=0.1, weight=W),
        "ignore": some(), "ignore 2": classes(ignore_index=2), "ignore, weight": some(weight=W),
        "ignore, smoothing": some(label_smoothing=0.1, weight=W), "ignore, sum": some(reduction="sum"),
        "ignore, none": some(reduction="none"),
        "two tasks": bits, "two tasks, sum": lambda z, y: bits(z, y, reduction="sum"),
        "flat": lambda z, y: F.cross_entropy(z.reshape(-1, 2), y[:, 2:4].long().reshape(-1)),
        "nll": log_likelihood(), "nll, weight": log_likelihood(weight=W),
        "nll, ignore": log_likelihood(1, reduction="sum"), "nll, none": log_likelihood(reduction="none"),
        "module": lambda z, y: nn.CrossEntropyLoss(weight=W, label_smoothing=0.1)(z, y[:, 0].long()),
    })  # fmt: skip


def pairs(z):
    """How alike rows are, of unit length."""
    z = F.normalize(z, dim=1)
    return z @ z.T / 0.3


def own(z):
    return torch.arange(z.shape[0])


def test_every_row_is_a_class():
    """Contrastive losses: a row is to be told from all others of the batch."""
    check_losses({
        "mean": lambda z, y: F.cross_entropy(pairs(z), own(z)),
        "sum": lambda z, y: F.cross_entropy(pairs(z), own(z), reduction="sum"),
        "none": lambda z, y: F.cross_entropy(pairs(z), own(z), reduction="none"),
        "both ways": lambda z, y: F.cross_entropy(pairs(z).T, own(z)) + F.cross_entropy(pairs(z), own(z)),
        "weight": lambda z, y: F.cross_entropy(pairs(z), own(z), weight=y[:, 4]),
        "weight, sum": lambda z, y: F.cross_entropy(pairs(z), own(z), weight=y[:, 4], reduction="sum"),
        "two views": lambda z, y: F.cross_entropy(z @ z.tanh().T, own(z)),
        "fixed columns": lambda z, y: F.cross_entropy(z, own(z) % NUM_CLASSES),
        "ignored": lambda z, y: F.cross_entropy(pairs(z), torch.where(y[:, 2] > 0, own(z), -100)),
        "columns alone": lambda z, y: F.cross_entropy(z.T, torch.arange(NUM_CLASSES) % 3),
    })  # fmt: skip


def test_probabilities():
    check_losses({
        "mean": soft(F.cross_entropy), "sum": soft(F.cross_entropy, reduction="sum"),
        "none": soft(F.cross_entropy, reduction="none"),
        "weight": soft(F.cross_entropy, weight=W, label_smoothing=0.2),
        "two tasks": lambda z, y: F.cross_entropy(z.reshape(-1, 2, 2), y[:, 4:].reshape(-1, 2, 2)),
        "binary": lambda z, y: F.binary_cross_entropy(z.sigmoid(), y[:, 4:], weight=W),
    })  # fmt: skip


def gaussian(**options):
    return lambda z, y: F.gaussian_nll_loss(z[:, :2], y[:, 4:6], F.softplus(z[:, 2:]), **options)


def test_gaussian_likelihood():
    """PyTorch's own code asks the host for the sign of variances, and clamps them in place."""
    check_losses({
        "mean": gaussian(), "sum": gaussian(reduction="sum"), "none": gaussian(reduction="none"),
        "full": gaussian(full=True), "some are clamped": gaussian(eps=0.7),
        "one column": lambda z, y: F.gaussian_nll_loss(z[:, 0], y[:, 4], z[:, 1].exp()),
        "a variance per row": lambda z, y: F.gaussian_nll_loss(z, y[:, 4:], z[:, 1].exp()),
        "a column of variances": lambda z, y: F.gaussian_nll_loss(z, y[:, 4:], z[:, 1:2].exp()),
        "a row of variances": lambda z, y: F.gaussian_nll_loss(z, y[:, 4:], W[None]),
        "a number": lambda z, y: F.gaussian_nll_loss(z, y[:, 4:], 0.3),
        "module": lambda z, y: nn.GaussianNLLLoss(full=True)(z, y[:, 4:], F.softplus(z)),
    })  # fmt: skip


def test_negative_variances():
    """PyTorch asks the host for their sign."""

    def loss(z, y):
        return F.gaussian_nll_loss(z, y[:, 4:], torch.where(y[:, 2:3] > 0, -1.0, 1.0) * torch.ones_like(z))

    case = Case(Heads({"rows": lambda m, b, h: h}, out=NUM_CLASSES), loss=loss, graph=small_graph(labels()))
    with pytest.raises(ValueError, match="var has negative"):
        case.eager(case.seeds(), 0)
    for execution in (case.exact, case.padded):
        with pytest.raises(DomainError, match=r"expects variances of at least 0; got -1 at "):
            execution(case.seeds(), 0)


@pytest.mark.fuzz
def test_per_entry():
    logits = F.binary_cross_entropy_with_logits
    check_losses({
        "bce": soft(logits), "bce, sum": soft(logits, reduction="sum"), "bce, none": soft(logits, reduction="none"),
        "bce, pos_weight": soft(logits, pos_weight=W), "bce, weight": soft(logits, weight=W),
        "bce, weight of rows": lambda z, y: logits(z, y[:, 4:], weight=y[:, 4:].sum(1, keepdim=True)),
        "bce of one column": lambda z, y: logits(z[:, 0], y[:, 4]),
        "normal": lambda z, y: -Normal(z[:, 0], z[:, 1].exp()).log_prob(y[:, 4]).mean(),
        "poisson of log rates": lambda z, y: -Poisson(z.exp()).log_prob((y[:, 4:] > 0.5).double()).sum(),
        "categorical": lambda z, y: -Categorical(probs=z.softmax(1)).log_prob((y[:, 4] > 0.5).long()).mean(),
        "bce of probabilities": lambda z, y: F.binary_cross_entropy(z.sigmoid(), y[:, 4:]),
        "mse": soft(F.mse_loss), "mse, sum": soft(F.mse_loss, reduction="sum"),
        "mse, none": soft(F.mse_loss, reduction="none"),
        "mse, weight": lambda z, y: F.mse_loss(z, y[:, 4:], weight=y[:, 4:]),
        "mse of sums": lambda z, y: F.mse_loss(z.T @ z, y[:, 4:].T @ y[:, 4:]),
        "mse of means": lambda z, y: F.mse_loss(z.mean(0), y[:, 4:].mean(0)),
        "l1": soft(F.l1_loss), "l1, sum": soft(F.l1_loss, reduction="sum"),
        "l1, transposed": lambda z, y: F.l1_loss(z.t(), y[:, 4:].t()),
        "huber": soft(F.huber_loss, delta=0.3), "smooth l1": soft(F.smooth_l1_loss, beta=0.3, reduction="sum"),
        "kl": lambda z, y: F.kl_div(z.log_softmax(1), y[:, 4:], reduction="batchmean"),
        "kl of logs": lambda z, y: F.kl_div(z.log_softmax(1), y[:, 4:].log(), reduction="sum", log_target=True),
        "poisson": soft(F.poisson_nll_loss, full=True),
        "soft margin": lambda z, y: F.soft_margin_loss(z, y[:, 4:].round() * 2 - 1),
        "multi-label": soft(F.multilabel_soft_margin_loss),
        "multi margin": lambda z, y: F.multi_margin_loss(z, y[:, 0].long()),
        "cosine": lambda z, y: F.cosine_embedding_loss(z, z.relu(), sign(y)),
        "ranking": lambda z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], sign(y), reduction="sum"),
        "hinge": lambda z, y: F.hinge_embedding_loss(z[:, 0], sign(y)),
        "triplet": lambda z, y: F.triplet_margin_loss(z, z.relu(), z.tanh()),
    })  # fmt: skip


def one_hot(y):
    return F.one_hot(y[:, 0].long(), NUM_CLASSES)


def supervised_contrast(z, y):
    same_class = (y[:, None, 0] == y[None, :, 0]).double()
    return -((z @ z.T).softmax(1) * same_class).sum(1).log().mean()


def test_own_losses():
    check_losses({
        "gather": lambda z, y: -z.log_softmax(1).gather(1, y[:, :1].long()).mean(),
        "index": lambda z, y: -z.log_softmax(1)[torch.arange(z.shape[0]), y[:, 0].long()].mean(),
        "one_hot": lambda z, y: -(z.log_softmax(1) * one_hot(y)).sum(1).mean(),
        "focal": lambda z, y: (lambda p: -((1 - p.exp()) ** 2 * p).mean())((z.log_softmax(1) * one_hot(y)).sum(1)),
        "weighted": lambda z, y: (classes(reduction="none")(z, y) * (y[:, 0] + 1)).sum() / (y[:, 0] + 1).sum(),
        "known": lambda z, y: (lambda k: ((z - y[:, 4:]) ** 2 * k).sum() / k.sum())((y[:, 1:2] >= 0).double()),
        "worst": lambda z, y: classes(reduction="none")(z, y).max(),
        "accuracy": lambda z, y: classes()(z, y) * (z.argmax(1) == y[:, 0]).double().mean(),
        "class means": lambda z, y: z.new_zeros(4, 4).index_add(0, y[:, 0].long(), z).square().mean(),
        "covariance": lambda z, y: ((z - z.mean(0)).T @ (z - z.mean(0)) / (z.shape[0] - 1)).pow(2).sum(),
        "contrast": supervised_contrast,
        "where": lambda z, y: torch.where(y[:, 4:] > 0.5, (z - y[:, 4:]) ** 2, 0).sum() / (y[:, 4:] > 0.5).sum(),
    })  # fmt: skip


def test_divided_by_the_size():
    """Which a quick trace cannot follow: Python's ``len`` gives a number."""
    with cheaper(real):
        check_losses({"": lambda z, y: classes(reduction="sum")(z, y) / len(y) + z.sum() / z.shape[0]})


def test_unreduced_loss_is_averaged():
    check(Rows(lambda m, b, h: h), loss=nn.CrossEntropyLoss(reduction="none", weight=W))
    check(Rows(lambda m, b, h: h), loss=lambda z, y: F.mse_loss(z, y, reduction="none"), graph=small_graph(targets(4)))


def test_refused_losses():
    assert_refused({
        "[n, 1] and [n]": (lambda m, b, h: h + F.mse_loss(h[:, :1], h[:, 0]), "one of them [n] and the other [n, 1]?"),
        "unknown": (lambda m, b, h: h + F.mse_loss(h, h * 0, reduction="none").take(ONE), "has no rule"),
        "smoothed over rows": (lambda m, b, h: h + F.cross_entropy(h @ h.T, own(h), label_smoothing=0.1),
                               "takes padded rows for classes"),
        "a row of probabilities": (lambda m, b, h: h + F.cross_entropy(h @ h.T, (h @ h.T).softmax(1)),
                                   "works across padded rows" if OLDER else "takes padded rows for classes"),
        "margins to rows": (lambda m, b, h: h + F.multi_margin_loss(h @ h.T, own(h)), "takes padded rows for columns"),
        "each margin": (lambda m, b, h: h + F.multi_margin_loss(h @ h.T, own(h), reduction="none")[:, None],
                        "takes padded rows for columns"),
        "sets of rows": (lambda m, b, h: h + F.multilabel_margin_loss(h @ h.T, (h @ h.T).long() * 0), "padded rows"),
        "cosines": (lambda m, b, h: h + F.cosine_embedding_loss(h @ h.T, h @ h.T + 1, own(h)), "padded rows"),
        "triplets": (lambda m, b, h: h + F.triplet_margin_loss(h @ h.T, h @ h.T + 1, h @ h.T - 1), "padded rows"),
        "worst two": (lambda m, b, h: h + F.mse_loss(h, h * 0, reduction="none").sum(1).topk(2)[0].mean(),
                      "works across padded rows"),
    }, "test_padding_losses.py")  # fmt: skip
