"""Operands in float64 beside float32: what PyTorch computes in float64 stays what it is, and its readers with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from joestar.sampling import NeighborSampler

from .edge_layers import graph

pytestmark = pytest.mark.usefixtures("quick_captures")


class WideCount(nn.Module):
    """A mean by hand, whose count is float64."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4).double()

    def forward(self, x, edge_index):
        h, dst = self.first(x), edge_index[1]
        total = h.new_zeros(h.shape).index_add(0, dst, h[edge_index[0]])
        ones = torch.ones(dst.shape[0], dtype=torch.float64)
        count = torch.zeros(h.shape[0], dtype=torch.float64).index_add(0, dst, ones)
        return self.last(total / count.clamp(1).unsqueeze(1))


class WideScore(nn.Module):
    """Scores of edges and nodes by a vector in float64."""

    def __init__(self):
        super().__init__()
        self.edge, self.node, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.vector = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, blocks, x):
        (block,) = blocks
        h = self.node(x)
        weight = (self.edge(block.edata["f"]) * self.vector).sum(-1).sigmoid().float()
        scores = (h * self.vector).sum(-1).float()
        return self.last(block.pull(fn.u_mul_e(h * scores[:, None], weight), "sum"))


@pytest.mark.parametrize("kind", [WideCount, WideScore])
def test_they_train_as_without_passes(kind):
    data = graph()
    data.ndata["x"], data.edata["f"] = data.ndata["x"].float(), data.edata["f"].float()
    found = []
    for passes in ((), ("segments", "linear-scores", "spmm-gemm-order", "factor-aggregate")):
        torch.manual_seed(0)
        model = kind()
        sampler, sgd = NeighborSampler(data, [3], seed=1), torch.optim.SGD(model.parameters(), 0.1)
        step = joestar.compile(
            model, sampler, lambda z, y: F.cross_entropy(z.float(), y), sgd, backend="eager", disable_passes=passes
        )
        found.append([float(step(torch.arange(7))) for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
