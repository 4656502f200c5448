"""Gradients stop where the user's ``torch.no_grad`` says so, and nowhere else, whatever is fused with it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError

from .plain import plain_epoch

pytestmark = pytest.mark.usefixtures("shared_captures")  # of both executions


class Layer(nn.Module):
    def __init__(self, fan_in: int, fan_out: int):
        super().__init__()
        self.own, self.near = nn.Linear(fan_in, fan_out), nn.Linear(fan_in, fan_out, bias=False)

    def forward(self, block, x):
        return self.own(x[: block.num_dst]) + self.near(block.pull(fn.copy_u(x), "mean"))


class Net(nn.Module):
    """Two layers; ``combine(self, blocks, x)`` gives the hidden rows from a student and a teacher of one form."""

    def __init__(self, combine):
        super().__init__()
        self.student, self.teacher, self.last = Layer(6, 8), Layer(6, 8), Layer(8, 4)
        self.register_buffer("average", torch.zeros(8))
        self.combine = combine

    def forward(self, blocks, x):
        return self.last(blocks[1], self.combine(self, blocks, x))


def beside(m, blocks, x):
    with torch.no_grad():
        target = m.teacher(blocks[0], x)
    return m.student(blocks[0], x).relu() + target


def in_front(m, blocks, x):
    h = m.student(blocks[0], x)
    with torch.no_grad():
        target = m.teacher(blocks[0], x)
    return h.relu() + target


def of_the_same(m, blocks, x):
    """The same parameters with and without gradients."""
    h = m.student(blocks[0], x)
    with torch.no_grad():
        frozen = m.student(blocks[0], x)
    return h + (frozen.sign() * frozen - h * h)


def nested(m, blocks, x):
    with torch.no_grad():
        h = m.student(blocks[0], x)
        with torch.enable_grad():
            more = m.teacher(blocks[0], x) * h
        return_to = more * 2
    return more + return_to


@torch.no_grad()
def taught(m, blocks, x):
    return m.teacher(blocks[0], x)


def decorated(m, blocks, x):
    return m.student(blocks[0], x) + taught(m, blocks, x)


def statistics(m, blocks, x):
    h = m.student(blocks[0], x)
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.average


def between_writes(m, blocks, x):
    h = m.student(blocks[0], x)
    with torch.no_grad():
        before = h.abs().sum(1, keepdim=True)
    h = h + 1
    h.mul_(2)
    with torch.no_grad():
        after = h.abs().sum(1, keepdim=True)
    return h * before / (after + 1)


def own_labels(z, y):
    """A loss that teaches the model what it says, where it is sure."""
    with torch.no_grad():
        sure, label = z.softmax(1).max(1)
    return F.cross_entropy(z, y) + (F.cross_entropy(z, label, reduction="none") * sure).mean()


def inferred(m, blocks, x):
    """Inference mode is no_grad here; within it nothing else counts, behind it what was before."""
    h = m.student(blocks[0], x)
    with torch.inference_mode():
        with torch.enable_grad():
            frozen = m.student(blocks[0], x)
        with torch.inference_mode(False):
            near = m.student(blocks[0], x)
        far = m.teacher(blocks[0], x)
    with torch.no_grad():
        with torch.inference_mode():
            deep = m.student(blocks[0], x)
        low = m.student(blocks[0], x)
    return h.relu() + (frozen + far + deep).clone() + near.tanh() + low


COMBINE = [beside, in_front, of_the_same, nested, decorated, statistics, between_writes, inferred]


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(0, 48, (2, 170), generator=generator)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    return joestar.Graph.from_edge_index(edges, 48, {"x": x, "y": torch.randint(0, 4, (48,), generator=generator)})


def trained(graph, combine, execution: str, loss=F.cross_entropy):
    """Differences to plain PyTorch after an epoch: (of the losses, of the state)."""
    torch.manual_seed(0)
    model = Net(combine).double()
    plain = copy.deepcopy(model)
    sampler, nodes = joestar.NeighborSampler(graph, [3, 3]), torch.arange(33)
    adam = [torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (model, plain)]
    step = joestar.compile(model, sampler, loss, adam[0], backend="eager", execution=execution, warm_up=2)
    losses = torch.stack(list(step.epoch(nodes, 8, shuffle=False)))
    expected = plain_epoch(plain, sampler, loss, adam[1], nodes, 8)
    state = plain.state_dict()
    return (losses - torch.tensor(expected, dtype=torch.float64)).abs().max(), max(
        (value - state[name]).abs().max() for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("execution", ["exact", "padded"])
@pytest.mark.parametrize("combine", COMBINE, ids=lambda combine: combine.__name__)
@pytest.mark.each("combine")
def test_training_is_plain_pytorchs(graph, combine, execution):
    losses, state = trained(graph, combine, execution)
    assert losses < 1e-12
    assert state < 1e-12


def test_labels_of_the_models_own(graph):
    losses, state = trained(graph, in_front, "padded", own_labels)
    assert losses < 1e-12
    assert state < 1e-12


def test_a_write_without_gradient_to_a_value_that_has_one_is_refused(graph):
    def clamped(m, blocks, x):
        h = m.student(blocks[0], x)
        with torch.no_grad():
            h.clamp_(max=0.5)
        return h

    with pytest.raises(CaptureError, match=r"clamp_.* at .*h\.clamp_\(max=0\.5\).*gradients flow through.*Write inst"):
        trained(graph, clamped, "exact")


def test_predictions_detach_nothing(graph):
    """They run without gradients as a whole: an op for every parameter would be for nothing."""
    torch.manual_seed(0)
    model = Net(nested).double()
    step = joestar.compile(model, joestar.NeighborSampler(graph, [3, 3]), backend="eager")
    step.predict(torch.arange(9), 5)
    (program,) = step.report().programs
    assert "aten.linear" in program.graph_before and "detach" not in program.graph_before
