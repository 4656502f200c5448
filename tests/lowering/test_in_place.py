"""In-place ops on intermediate values become functional; those on views are refused with the line."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar import fn
from joestar.errors import CaptureError
from joestar.lowering.functional import is_in_place

from .harness import BATCHES, NUM_CLASSES, NUM_FEATURES, WIDTH, Case, Heads, Rows, check_rows, raises, same


def changed(*steps):
    """Applies in-place steps to a copy of the rows, and returns it (not what they return)."""

    def operation(m, b, h):
        h = h * 1
        for step in steps:
            step(b, h)
        return h

    return operation


def filled(m, b, h):
    out = torch.empty(b.num_src, WIDTH, dtype=h.dtype)
    out.fill_(2.0)
    return h * out


def copied(m, b, h):
    out = torch.zeros(b.num_src, WIDTH, dtype=h.dtype)
    out.copy_(h)
    return out


def aliased(m, b, h):
    h = h * 1
    other = h
    h.mul_(2)
    return other + h


def accumulated(m, b, h):
    out = torch.zeros_like(h)
    out.index_add_(0, b.indices, h[b.indices])
    return h + out


def sum_before(m, b, h):
    h = h * 1
    before = h[: b.num_dst].sum(0)
    h.relu_()
    return h + before + h[: b.num_dst].sum(0)


def identity_dropout(m, b, h):
    """Without dropping, dropout returns its very argument."""
    h = h * 1
    other = F.dropout(h, 0.5, training=False)
    other.add_(1)
    return h


def converted(m, b, h):
    """What has the dtype already is the very tensor: one of both is written, the other read."""
    out = torch.zeros(b.num_src, WIDTH, dtype=h.dtype)
    same = out.to(h.dtype).type_as(h).to(h).to(h.device)
    same.index_add_(0, b.indices, h[b.indices])
    other = out.to(h.dtype, copy=True).mul_(2)
    return out + other


def of_a_buffer(m, b, h):
    """What is converted is a new tensor, also of a parameter."""
    weight = m.last.weight.to(torch.float16 if h.dtype != torch.float16 else torch.float32)
    return h * weight.mul_(0.5).sum().to(h.dtype)


def promoted(m, b, h):
    degree = b.graph_degrees("src").float() * 1
    degree.mul_(h[:, 0].detach())
    assert degree.dtype == torch.float32
    return h * degree[:, None]


IN_PLACE = {
    "relu_": changed(lambda b, h: h.relu_()),
    "+=": changed(lambda b, h: h.add_(h.mean(0)), lambda b, h: h.mul_(2)),
    "size": changed(lambda b, h: h.sub_(b.num_src).div_(b.num_src)),
    "clamp_": changed(lambda b, h: h.clamp_(min=-0.5)),
    "masked_fill_": changed(lambda b, h: h.masked_fill_(h < 0, 0.5)),
    "zero_": changed(lambda b, h: h.zero_()),
    "cumsum_": changed(lambda b, h: h.cumsum_(0)),
    "division": changed(lambda b, h: h.div_(b.graph_degrees("src").add_(1)[:, None])),
    "inplace=True": lambda m, b, h: F.leaky_relu(F.relu(h * 1, inplace=True) - 1, inplace=True),
    "module": lambda m, b, h: nn.ReLU(inplace=True)(h * 1),
    "fill_": filled,
    "copy_": copied,
    "alias": aliased,
    "index_add_": accumulated,
    "read before and after": sum_before,
    "dropout of nothing": identity_dropout,
    "type promotion": promoted,
    "converted": converted,
    "converted, of a parameter": of_a_buffer,
}


def test_intermediate_values():
    case = check_rows(IN_PLACE)
    assert not [node for node in case.program.captured.gm.graph.nodes if is_in_place(node)]


def test_dropout_in_place():
    check_rows({"dropout_": lambda m, b, h: F.dropout(h * 1, 0.5, inplace=True)}, plain=False)


def column(m, b, h):
    h = h * 1
    h[:, 0] = 0
    return h


def part(m, b, h):
    h = h * 1
    h[:, 0].mul_(2)
    return h


def view_read_later(m, b, h):
    h = h * 1
    view = h.view(-1, 2, 4)
    h.relu_()
    return view.reshape(-1, WIDTH)


def write_through(m, b, h):
    h = h * 1
    h.reshape(-1, WIDTH).add_(1)
    return h


def detached(m, b, h):
    h.detach().mul_(2)
    return h


def chunk(m, b, h):
    degree = b.graph_degrees("src")[:, None].repeat(1, 4)
    degree.chunk(2, 1)[0].add_(5)
    return h * degree.sum(1, keepdim=True)


@pytest.mark.every(2)
@pytest.mark.parametrize("operation", [column, part, view_read_later, write_through, detached, chunk])
def test_views_are_refused(operation):
    with pytest.raises(CaptureError, match=rf"test_in_place\.py.* in {operation.__name__}") as caught:
        Case(Rows(operation)).trace()
    assert "shares memory with another" in str(caught.value)
    assert "x = x + y instead of x[...] += y" in str(caught.value)


def several(m, b, h):
    with torch.no_grad():
        torch._foreach_lerp_([m.one], [m.one * 2], 0.5)
    return h * m.one


def of_another_dtype(m, b, h):
    torch.sum(h.detach().float(), 0, out=m.one)
    return h * m.one


@pytest.mark.parametrize("operation", [several, of_another_dtype])
def test_writes_to_what_is_no_first_operand_are_refused(operation):
    with pytest.raises(CaptureError, match=r"(?s)test_in_place\.py.* writes to several tensors, or .*tensor.copy_"):
        Case(Rows(operation, one=torch.ones(WIDTH))).trace()


class Late(nn.Module):
    """A pass moves the bias, which is a view of a buffer, behind the aggregation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, WIDTH, bias=False), nn.Linear(WIDTH, NUM_CLASSES)
        self.register_buffer("stats", torch.ones(2, WIDTH))

    def forward(self, blocks, x):
        mean = self.stats[0]
        h = F.linear(x, self.first.weight, mean)
        self.stats.mul_(1.5)
        return self.last(blocks[0].pull(fn.copy_u(h), "mean") + mean)


def test_a_view_of_a_buffer_is_read_as_it_was_before_a_write():
    case = Case(Late())
    for number, batch in enumerate(BATCHES):
        seeds = case.seeds(batch)
        same(case.exact(seeds, number), case.eager(seeds, number), 1e-12)


def test_data_is_refused():
    with raises(CaptureError, "hidden from the trace"):
        Case(Rows(changed(lambda b, h: h.data.mul_(2)))).trace()


def test_capture_leaves_the_model_alone():
    """Neither capture nor a padded or exact run changes parameters; capture changes no buffers and modes."""
    model = Heads({"norm": lambda m, b, h: m.norm(h).relu_()}, norm=nn.BatchNorm1d(WIDTH)).eval()
    case = Case(model)
    before = copy.deepcopy(model.state_dict())
    case.trace()
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
