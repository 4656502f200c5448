"""What people write in models, losses and loops, as in plain PyTorch over the same samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import joestar
from tests.runtime.common import CLASSES, FEATURES, RunningLoss, planted_graph
from tests.runtime.plain import PlainLoop

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(2, 182)


class Model(nn.Module):
    """Two layers and a head; ``form`` says what else."""

    def __init__(self, form=""):
        super().__init__()
        self.first, self.second = (joestar.nn.SAGEConv(width, 8).double() for width in (FEATURES, 8))
        self.head, self.form = nn.Linear(8, CLASSES).double(), form
        self.other = nn.Linear(8, CLASSES).double()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        if form == "orthogonal":
            parametrizations.orthogonal(self.head)

    def forward(self, blocks, x):
        h = self.second(blocks[1], self.first(blocks[0], x).relu())
        if self.form == "lerp":
            self.mean.lerp_(h.detach().mean(0), 0.1)
            return self.head(h - self.mean)
        if self.form == "tied":
            return self.head(F.linear(F.linear(h, self.other.weight).tanh(), self.other.weight.t()))
        if self.form == "reversal":
            return self.head(h), self.other(2 * h.detach() - h)
        return self.head(h)


def focal(z, y):
    each = F.cross_entropy(z, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def centres(z, y):
    own = F.one_hot(y, CLASSES).double()
    middle = own.t() @ z / own.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(z, y) + ((z - middle[y]) ** 2).mean()


def balanced(z, y):
    counts = F.one_hot(y, CLASSES).double().sum(0)
    return F.cross_entropy(z, y, weight=counts.sum() / (counts.clamp(min=1) * CLASSES))


def hard(z, y):
    each = F.cross_entropy(z, y, reduction="none")
    kept = each >= each.mean()
    return (each * kept).sum() / kept.sum()


def both(outputs, y):
    return F.cross_entropy(outputs[0], y) + 0.1 * F.cross_entropy(outputs[1], y % 2)


def clipping(model, optimizer):
    """Hooks that clip gradients."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return lambda loss: None


def shrinking(model, optimizer):
    """Weights in a ball, a history and a best score on the model."""
    model.history = []

    def between(loss):
        model.history.append(loss)
        model.best = min(getattr(model, "best", loss), loss)
        with torch.no_grad():
            model.head.weight.copy_(model.head.weight.renorm(2, 0, 0.5))

    return between


def plateau(model, optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5).step


class Queue(nn.Module):
    """Logits against those of the batches before."""

    def __init__(self, model):
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, CLASSES, dtype=torch.float64))

    def forward(self, z, y):
        loss = F.cross_entropy(z, y) + 0.01 * (z @ self.queue.clone().t()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[1:], z.mean(0, keepdim=True)]))
        return loss


class Centres(nn.Module):
    """Learnt centres of the classes, behind a BatchNorm, which are trained as parts of the model."""

    def __init__(self, model):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES).double()
        self.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES, dtype=torch.float64))
        model.criterion = self

    def forward(self, z, y):
        z = self.norm(z)
        return F.cross_entropy(z, y) + 0.1 * ((z - self.centres[y]) ** 2).mean()


class Teacher(nn.Module):
    """A head that follows the model's slowly."""

    def __init__(self, model):
        super().__init__()
        self.teacher, self.student = copy.deepcopy(model.head).requires_grad_(False), [model.head]

    def forward(self, z, y):
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), self.student[0].parameters(), strict=True):
                mean.lerp_(now, 0.1)
        return F.cross_entropy(z, y) + 0.01 * self.teacher.weight.square().sum() * z.mean()


HABITS = {
    "focal loss": ("", focal, None), "class centres": ("", centres, None), "balanced": ("", balanced, None),
    "hard examples": ("", hard, None), "gradient reversal": ("reversal", both, None), "tied": ("tied", focal, None),
    "statistics": ("lerp", F.cross_entropy, None), "orthogonal": ("orthogonal", F.cross_entropy, None),
    "hooks": ("", F.cross_entropy, clipping), "constraints": ("", F.cross_entropy, shrinking),
    "plateau": ("", F.cross_entropy, plateau), "running loss": ("", RunningLoss(0.9), None), "queue": ("", Queue, None),
    "loss that learns": ("", Centres, None), "teacher": ("", Teacher, None),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", HABITS)
def test_as_in_plain_pytorch(name):
    form, loss, between = HABITS[name]
    graph = planted_graph(dtype=torch.float64, nodes=600)
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=7)
    torch.manual_seed(0)
    ours = Model(form)
    plain = copy.deepcopy(ours)
    losses = [loss(model) if isinstance(loss, type) else copy.deepcopy(loss) for model in (ours, plain)]
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (ours, plain)]
    step = joestar.compile(ours, sampler, losses[0], optimizers[0], backend="eager")
    loop = PlainLoop(plain, sampler, optimizers[1], losses[1])
    follow = [between(*of) if between else lambda loss: None for of in zip((ours, plain), optimizers, strict=True)]
    for _ in range(2):
        for mine, other in zip(step.epoch(IDX, 60), loop.epoch(IDX, 60), strict=True):
            assert float(mine) == pytest.approx(other, rel=1e-9)
            follow[0](float(mine))
            follow[1](other)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-7, atol=1e-9)
    for mine, other in zip(*(getattr(loss, "buffers", list)() for loss in losses), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)
