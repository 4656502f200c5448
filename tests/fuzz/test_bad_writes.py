"""In-place writes to what outlives a call or is shared: the results of plain Python, or an error with line and remedy.

Writes to intermediate values are in ``tests/lowering/test_in_place.py``.
"""

import pytest
import torch
import torch.nn.functional as F

from joestar import fn
from joestar.errors import CaptureError, PaddingError

from .worlds import World, refused, worlds_apart

pytestmark = pytest.mark.usefixtures("shared_captures")


def features(m, b, h):
    b.graph.ndata["x"].mul_(1.1)
    return h


def features_read_again(m, b, h):
    rows = b.graph.ndata["h"]
    rows += 1
    return h + rows[b.srcs]


def edge_data(m, b, h):
    b.graph.edata["w"].mul_(0.5)
    return h + b.edata["w"].sum()


def gathered_data(m, b, h):
    weight = b.edata["w"]
    weight.mul_(2)
    b.srcdata["h"].add_(1)
    return h + b.pull(fn.u_mul_e(h, b.edata["w"]), "sum").sum(0) + b.srcdata["h"]


def block_sources(m, b, h):
    b.srcs.clamp_(max=20)
    return h + b.graph_degrees("src")[:, None]


def block_indices(m, b, h):
    b.indices.zero_()
    return h + b.pull(fn.copy_u(h), "sum").sum(0)


def block_offsets(m, b, h):
    b.indptr.zero_()
    return h + b.pull(fn.copy_u(h), "sum").sum(0)


def given_rows(m, b, h):
    h.relu_()
    return h


def averaged_weight(m, b, h):
    z = F.linear(h, m.table[:8] + m.average)
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        m.table.add_(0.1)
    return z + m.average


def read_between_writes(m, b, h):
    m.average.add_(1)
    first = h * m.average.clone()
    m.average.mul_(2)
    return first + F.linear(h, m.table[:8] + m.average)


def history(m, b, h):
    m.table.index_add_(0, b.srcs.long(), h.detach())
    return h + m.table.mean(0)


def without_gradient(m, b, h):
    torch.set_grad_enabled(False)
    total = h.sum(0)
    torch.set_grad_enabled(True)
    return h * total


def view_of_the_block(m, b, h):
    b.graph.cache = h
    return b.graph.cache * 2


def written_out(m, b, h):
    z = F.linear(h, m.table[:8], m.average)
    torch.add(m.average, 1, out=m.average)
    first = h.tanh() + m.average
    torch.mean(h.detach(), 0, out=m.average)
    return z + first + m.average


CORRECT = [
    features, features_read_again, edge_data, gathered_data, block_sources, block_indices, block_offsets, given_rows,
    averaged_weight, read_between_writes, history, without_gradient, view_of_the_block,
    written_out,
]  # fmt: skip


@pytest.mark.parametrize("operation", CORRECT, ids=lambda operation: operation.__name__)
@pytest.mark.every(3)
def test_writes_are_those_of_plain_python(operation):
    """Several steps, each in a world of its own: losses, gradients, and every shared tensor afterwards."""
    assert worlds_apart(operation=operation) == {"exact": [], "padded": []}


def one_row(m, b, h):
    before = m.table.sum(0)
    m.table[3].copy_(h.detach().mean(0))
    return h + before * 0.5 + m.table.sum(0)


def view_read_before_and_after(m, b, h):
    row, (first, *_) = m.table[3], m.table.split(2)
    weight = m.table[:8].clone()
    z = F.linear(h, weight, row) + first[0]
    m.table.mul_(1.5)
    y = F.linear(h, weight, row)
    m.table.add_(0.1)
    return z + y + row + first[1]


@pytest.mark.parametrize("operation", [one_row, view_read_before_and_after], ids=lambda operation: operation.__name__)
def test_what_is_read_before_and_after_a_write(operation):
    assert worlds_apart(("exact",), operation=operation) == {"exact": []}


def seeds_changed(m, b, h):
    b.dsts.add_(1)
    return h


def parameter(m, b, h):
    with torch.no_grad():
        m.first.weight.mul_(0.9)
    return h


def hidden_parameter(m, b, h):
    m.first.weight.data.mul_(0.9)
    return h


def exchanged(m, b, h):
    m.average.set_(torch.ones(8, dtype=torch.float64))
    return h


def resized(m, b, h):
    m.average.resize_(4)
    return h


def written_view(m, b, h):
    h = h * 1
    h.t().add_(1)
    return h


WRITES = {
    seeds_changed: ("the seeds of the step",), parameter: ("writes to a parameter", "registered buffer"),
    hidden_parameter: ("hidden from the trace",), exchanged: ("registered buffer (copy_)",),
    resized: ("registered buffer (copy_)",),
}  # fmt: skip


@pytest.mark.parametrize("operation", WRITES, ids=lambda operation: operation.__name__)
def test_writes_that_are_refused(operation):
    refused(operation, *WRITES[operation])


def test_written_view():
    with pytest.raises(CaptureError, match=r"shares memory.*test_bad_writes\.py:.* in written_view.*Write the out-of-"):
        World.of(written_view).trace()


def sampler_writes_the_graph(self, graph, seeds):
    graph.edata["w"].mul_(0.9)
    return [graph[:, seeds].individual_sample(3)]


def sampler_writes_itself(self, graph, seeds):
    self.weight.mul_(0.9)
    return [graph[:, seeds].individual_sample(3, probs=graph.edata["w"].float())]


def sampler_writes_seeds(self, graph, seeds):
    seeds.add_(1)
    return [graph[:, seeds].individual_sample(3)]


SAMPLERS = [sampler_writes_the_graph, sampler_writes_itself, sampler_writes_seeds]


@pytest.mark.parametrize("draw", SAMPLERS, ids=lambda draw: draw.__name__)
def test_samplers_that_write(draw):
    """A sampler runs more than once per step, where sizes are found first."""
    refused(None, "in-place aten", function=draw, draw=draw)


PARTS_OF_BUFFERS = {
    "one row": lambda m, b, h: (m.table[3].copy_(h.detach().mean(0)), h)[1],
    "rows": lambda m, b, h: (m.table.index_copy_(0, b.srcs.long(), h.detach()), h)[1],
    "entries": lambda m, b, h: (
        h + torch.zeros(9, 8, dtype=h.dtype).index_put((b.in_degrees() % 9,), h[: b.num_dst]).sum()
    ),
    "mask": lambda m, b, h: torch.where(h > 0, h, 0).masked_scatter(h > 0, torch.ones(5000, dtype=h.dtype)),
}


@pytest.mark.parametrize("name", PARTS_OF_BUFFERS)
def test_writes_of_padded_rows(name):
    instead = "Assign the whole buffer|Use row-wise operations|Use torch.where on whole tensors"
    with pytest.raises(PaddingError, match=rf"test_bad_writes\.py:.*({instead})"):
        World.of(PARTS_OF_BUFFERS[name]).steps("padded")
