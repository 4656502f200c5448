"""Tables with sparse gradients in a loop of one's own: the words of the error lead to what works."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import CaptureError, OptimizerError
from tests.runtime.common import CLASSES, planted_graph
from tests.runtime.plain import plain_logits


class Table(nn.Module):
    def __init__(self, graph):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(graph.num_nodes, 8, sparse=True)
        self.conv = joestar.nn.SAGEConv(8, CLASSES)

    def forward(self, blocks, x):
        return self.conv(blocks[0], self.table(blocks[0].srcs))


def test_the_remedies_work():
    graph, seeds = planted_graph(), torch.arange(40)
    model, sampler = Table(graph), joestar.NeighborSampler(graph, [3], seed=7)
    with pytest.raises(OptimizerError, match=re.escape("joestar.compile(model, sampler, backend='eager')")):
        joestar.compile(model, sampler, F.cross_entropy, torch.optim.Adam(model.parameters()))
    with pytest.raises(CaptureError, match=r"sparse=True.*Compile with backend='eager'"):
        joestar.compile(model, sampler)(seeds)
    model.zero_grad()
    step = joestar.compile(model, sampler, backend="eager")
    F.cross_entropy(step(seeds), graph.ndata["y"][seeds]).backward()
    ours, model.table.weight.grad = model.table.weight.grad, None
    F.cross_entropy(plain_logits(model, sampler, seeds, 0, 1), graph.ndata["y"][seeds]).backward()
    assert ours.is_sparse and model.table.weight.grad.is_sparse
    torch.testing.assert_close(ours.to_dense(), model.table.weight.grad.to_dense())
    torch.optim.SparseAdam([model.table.weight]).step()


class Frozen(Table):
    def __init__(self, graph):
        super().__init__(graph)
        self.table.weight.requires_grad_(False)


@pytest.mark.fuzz
def test_a_table_that_is_not_trained_needs_no_remedy():
    graph = planted_graph()
    model = Frozen(graph)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    step = joestar.compile(model, joestar.NeighborSampler(graph, [3]), F.cross_entropy, optimizer)
    assert next(step.epoch(torch.arange(40), 40)).isfinite()
