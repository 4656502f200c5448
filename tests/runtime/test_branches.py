"""Code that asks whether it is compiled is named: the branch for compiled code is what a program is made of."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import JoestarWarning
from tests.runtime.common import CLASSES, FEATURES, Asking, planted_graph


def _is_compiled():
    return torch.compiler.is_compiling()


class Plain(nn.Module):
    """Asks nothing; joestar.nn's layers and PyTorch's may."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, CLASSES).double()

    def forward(self, blocks, x):
        return F.dropout(self.conv(blocks[0], x), 0.1, self.training)


def _compile(model):
    graph = planted_graph(dtype=torch.float64, nodes=600)
    return joestar.compile(model, joestar.NeighborSampler(graph, [3], seed=1), backend="eager")


def test_lines_that_ask_are_named():
    message = r"test_branches.py:\d+ in _is_compiled asks whether it is compiled: .*both must give the same results"
    with pytest.warns(JoestarWarning, match=message):
        step = _compile(Asking(_is_compiled))
    out = step(torch.arange(10))
    other = _quiet(Asking(lambda: False), step)
    torch.testing.assert_close(out, 3 * other, rtol=1e-12, atol=0)
    with pytest.warns(JoestarWarning, match=message):
        joestar.inference(step.model, step.graph, layers=1)


def _quiet(model, like):
    model.load_state_dict(like.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoestarWarning)
        return joestar.compile(model, like.sampler, backend="eager")(torch.arange(10))


def test_others_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", JoestarWarning)
        step = _compile(Plain())
        joestar.inference(step.model, step.graph, layers=1)
