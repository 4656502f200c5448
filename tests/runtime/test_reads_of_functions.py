"""What functions that were put into a model read of it: no method of its class names that."""

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

IDX = torch.arange(100)
ONES = torch.ones(CLASSES, dtype=torch.float64)


class Model(nn.Module):
    """A layer, and a function that is given the model."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, CLASSES).double()
        self.rule = scaled
        self.tensor, self.array, self.number, self.single = ONES.clone(), np.ones(CLASSES), np.float64(1), np.float32(1)
        self.activation, self.builtin, self.op = F.relu, torch.tanh, torch.ops.aten.relu
        self.held = [ONES.clone()]

    def forward(self, blocks, x):
        return self.rule(self, self.conv(blocks[0], x))


def scaled(owner, h):
    h = h * owner.tensor * torch.as_tensor(owner.array) * owner.number * owner.single * owner.held[0]
    return owner.op(owner.builtin(owner.activation(h)))


def forward(self, blocks, x):
    return scaled(self, self.conv(blocks[0], x))


def compiled(model: Model):
    sampler = joestar.NeighborSampler(planted_graph(dtype=torch.float64), [3], seed=1)
    step = joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), backend="eager")
    next(step.epoch(IDX, 50))
    return step


@pytest.fixture(scope="module", params=["a function held", "another forward"])
def step(request):
    """Trained for a step: a capture takes a second."""
    model = Model()
    if request.param == "another forward":
        model.forward = types.MethodType(forward, model)
    return compiled(model)


REPLACED = {
    "tensor": (2 * ONES, r"model.tensor is another tensor than .* at .*in scaled: h = h .*\.copy_\(\)"),
    "array": (2 * np.ones(CLASSES), r"model.array is another array than .*array\[:\]"),
    "number": (np.float64(2), r"model.number was np.float64\(1.0\) when .* is np.float64\(2.0\) now.* into a buffer"),
    "single": (np.float32(2), r"model.single was np.float32\(1.0\) when .* is np.float32\(2.0\) now"),
    "activation": (F.gelu, r"model.activation was a function relu when .* a function gelu now"),
    "builtin": (torch.sigmoid, r"model.builtin was a function tanh when .* a function sigmoid now"),
    "op": (torch.ops.aten.silu, r"model.op was a function relu when .* a function silu now"),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.each("name")
def test_what_is_replaced(step, name, monkeypatch):
    value, message = REPLACED[name]
    next(step.epoch(IDX, 50))
    with monkeypatch.context() as patch:
        patch.setattr(step.model, name, value)
        for use in (lambda: next(step.epoch(IDX, 50)), lambda: step(IDX), lambda: step.predict(IDX)):
            with pytest.raises(ChangedAfterCompileError, match=message):
                use()
    next(step.epoch(IDX, 50))


def test_in_containers_and_in_memory(step):
    model = step.model
    (known,) = model.held
    model.held[0] = 2 * ONES
    with pytest.raises(ChangedAfterCompileError, match=r"model.held\[0\] is another tensor"):
        next(step.epoch(IDX, 50))
    model.held[0] = known
    data, known.data = known.data, 2 * ONES
    with pytest.raises(ChangedAfterCompileError, match=r"model.held\[0\] is another tensor"):
        next(step.epoch(IDX, 50))
    known.data = data
    next(step.epoch(IDX, 50))


@pytest.mark.parametrize("name", ["tensor", "array"])
def test_what_is_written_into_is_followed(step, name):
    value = getattr(step.model, name)
    before = step(IDX)
    value[:] = 0
    assert step(IDX) == pytest.approx(torch.tensor(float(CLASSES)).log().item())
    value[:] = 1
    assert abs(step(IDX) - before) < 0.5
