"""Two inputs of a program over one memory, one of them written: refused, in every execution."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import CaptureError, PaddingError
from tests.runtime.common import CLASSES, FEATURES, planted_graph


class Net(nn.Module):
    def __init__(self, form, graph):
        super().__init__()
        self.form, self.lin = form, nn.Linear(FEATURES, CLASSES)
        form.prepare(self, graph)

    def forward(self, blocks, x):
        return self.form.scaled(self, blocks[0], self.lin(x)[: blocks[0].num_dst])


class Part:
    """Of one block of state."""

    def prepare(self, graph):
        self.register_buffer("state", torch.ones(3))
        self.register_buffer("scale", self.state[:1])

    def scaled(self, block, h):
        self.scale.mul_(0.9)
        return h * self.state.sum()


class Whole(Part):
    def scaled(self, block, h):
        self.state.mul_(0.9)
        return h * self.scale


class Twice:
    """Two tensors."""

    def prepare(self, graph):
        self.register_buffer("one", torch.ones(CLASSES))
        self.register_buffer("other", self.one.detach())

    def scaled(self, block, h):
        self.one.mul_(0.9)
        return h * self.other


class Weight:
    """A parameter's."""

    def prepare(self, graph):
        self.register_buffer("clamped", self.lin.weight.data)

    def scaled(self, block, h):
        self.clamped.clamp_(-0.1, 0.1)
        return h


class Data:
    """The graph's."""

    def prepare(self, graph):
        graph.ndata["s"] = torch.ones(graph.num_nodes)
        self.register_buffer("s", graph.ndata["s"].view(-1))

    def scaled(self, block, h):
        self.s.mul_(0.9)
        return h * block.dstdata["s"][:, None]


class Statistics:
    """A norm's, which trains."""

    def prepare(self, graph):
        self.norm = nn.BatchNorm1d(CLASSES)
        self.register_buffer("mean", self.norm.running_mean.detach())

    def scaled(self, block, h):
        return self.norm(h) + 5 * self.mean.clone()


def step_of(form, execution="padded"):
    graph = planted_graph()
    model = Net(form, graph)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = joestar.NeighborSampler(graph, [3])
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", execution=execution)


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("form", [Part, Whole, Twice, Weight, Data, Statistics], ids=lambda form: form.__name__)
@pytest.mark.each("form")
def test_is_refused_with_names_and_line(form, execution):
    step = step_of(form, execution)
    with pytest.raises(
        CaptureError, match=r"writes to \w+, whose memory is also that of \w+, at .*test_shared_memory.py"
    ):
        next(step.epoch(torch.arange(50), 25))


class Apart:
    """Rows of one block that do not overlap, and the same tensor under two names."""

    def prepare(self, graph):
        block = torch.ones(2, CLASSES)
        self.register_buffer("one", block[0])
        self.register_buffer("other", block[1])
        self.again = nn.Module()
        self.again.register_buffer("one", self.one)

    def scaled(self, block, h):
        self.one.mul_(0.9)
        return (h + self.other) * self.again.one


class Interleaved(Apart):
    """Columns of one block."""

    def prepare(self, graph):
        block = torch.ones(CLASSES, 2)
        self.register_buffer("one", block[:, 0])
        self.register_buffer("other", block[:, 1])
        self.again = nn.Module()
        self.again.register_buffer("one", self.one)


class Frozen(Apart):
    """Statistics that are read alone, and two norms with the same ones."""

    def prepare(self, graph):
        self.norm = nn.BatchNorm1d(CLASSES).eval()
        self.register_buffer("one", torch.ones(CLASSES))
        self.register_buffer("other", torch.ones(CLASSES))
        self.register_buffer("mean", self.norm.running_mean.detach())

    def scaled(self, block, h):
        self.norm.eval()
        self.one.mul_(0.9)
        return self.norm(h + self.other) + self.mean


@pytest.mark.parametrize("form", [Apart, Interleaved, Frozen], ids=lambda form: form.__name__)
def test_what_does_not_overlap_is_not(form):
    step = step_of(form)
    next(step.epoch(torch.arange(50), 50))
    assert step.model.one[0].item() == pytest.approx(0.9) and step.model.other[0].item() == 1


class Element:
    def prepare(self, graph):
        self.register_buffer("t", torch.ones(3))

    def scaled(self, block, h):
        self.t[0] += 1
        return h * self.t[0]


def test_an_element_that_is_counted_up_and_read_has_its_own_words():
    step = step_of(Element)
    with pytest.raises(PaddingError, match=r"writes in place to part of a buffer\. Assign the whole buffer with copy_"):
        next(step.epoch(torch.arange(50), 25))
    exact = step_of(Element, "exact")
    next(exact.epoch(torch.arange(50), 50))
    assert exact.model.t[0].item() == 2
