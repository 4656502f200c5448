"""Tables with sparse gradients in a loop of one's own: the words of the error lead to what works."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError, JoestarError, OptimizerError
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


class OfEdges(nn.Module):
    """Rows of a table by edges' numbers, their kinds, or degrees: padded entries read rows that no batch need have."""

    def __init__(self, graph, what):
        super().__init__()
        torch.manual_seed(0)
        degrees = int(graph.indptr.diff().max()) + 1
        rows = {"number": graph.num_edges, "kind": 5, "degree": degrees}[what]
        self.table, self.last, self.what = nn.Embedding(rows, 8, sparse=True), nn.Linear(8, CLASSES), what

    def forward(self, blocks, x):
        block = blocks[0]
        if self.what == "degree":
            return self.last(self.table(block.in_degrees() - 1 + (block.in_degrees() < 1)))
        return self.last(block.pull(fn.copy_e(self.table(block.edata[self.what])), "sum"))


@pytest.mark.parametrize("what", ["number", "kind", "degree"])
def test_rows_outside_of_a_batch_stay_as_they_are(what):
    """SparseAdam moves every row that is in the gradient, if only by 0; also in batches without an edge."""
    graph = planted_graph()
    graph.edata["number"] = torch.arange(graph.num_edges)
    graph.edata["kind"] = torch.arange(graph.num_edges) % 5
    model, sampler = OfEdges(graph, what), joestar.NeighborSampler(graph, [-1], seed=7)
    twin = copy.deepcopy(model)
    step = joestar.compile(model, sampler, backend="eager", batch_size=6)
    optimizers = [torch.optim.SparseAdam([net.table.weight], 0.1) for net in (model, twin)]
    first = graph.indptr.diff().nonzero()[0].item()  # whose edge is the graph's first
    batches = [torch.tensor([first, 9, 30])] * 2 + list(torch.arange(20, 44).split(6)) + [torch.tensor([0])]
    assert graph.indptr[1] == 0
    for call, seeds in enumerate(batches, 1):
        outputs = step(seeds), plain_logits(twin, sampler, seeds, 0, call)
        for out, net, optimizer in zip(outputs, (model, twin), optimizers, strict=True):
            net.zero_grad()
            F.cross_entropy(out, graph.ndata["y"][seeds]).backward()
            optimizer.step()
        torch.testing.assert_close(model.table.weight, twin.table.weight, rtol=1e-6, atol=1e-6)


def test_bags_of_a_sparse_table_are_refused():
    """Padded bags are behind all others, and would read a row."""

    class Bags(Table):
        def forward(self, blocks, x):
            ids = blocks[0].srcs
            starts = torch.arange(ids.shape[0])
            return self.conv(blocks[0], F.embedding_bag(ids.long(), self.table.weight, starts, mode="sum", sparse=True))

    graph = planted_graph()
    model = Bags(graph)
    with pytest.raises(JoestarError, match=r"embedding_bag.*sparse=True"):
        joestar.compile(model, joestar.NeighborSampler(graph, [3]), backend="eager")(torch.arange(40))


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
