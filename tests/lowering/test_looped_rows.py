"""Edges with self-loops that were added: entries that are left over at the end are never read or counted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError
from joestar.graph_api import Graph
from joestar.sampling import NeighborSampler

from .harness import NUM_NODES, WIDTH, Rows, check_rows, small_graph

pytestmark = [pytest.mark.usefixtures("quick_captures"), pytest.mark.every(3)]


def looped(f):
    """``f`` of a block with loops and the values of its edges."""

    def operation(m, b, h):
        b = b.add_self_loops()
        return h * f(m, b, b.apply_edges(fn.copy_u(h)), h)

    return operation


COUNTED = {
    "edges": lambda m, b, e, h: b.num_edges / b.num_dst,
    "rows": lambda m, b, e, h: e.shape[0] / b.num_dst + 0 * b.pull(fn.copy_e(e), "sum").sum(0),
    "entries": lambda m, b, e, h: torch.full((), e.numel(), dtype=h.dtype) + 0 * b.pull(fn.copy_e(e), "sum").sum(0),
    "of a batch": lambda m, b, e, h: b.pull(lambda edges: edges.src["h"] * edges.num_edges, "sum", src={"h": h}).sum(0),
    "as a tensor": lambda m, b, e, h: torch.tensor(b.num_edges, dtype=h.dtype),
}
READ = {
    "mean": lambda m, b, e, h: e.mean(0),
    "var": lambda m, b, e, h: e.var(0),
    "sum": lambda m, b, e, h: (e + 1).sum(0),
    "max": lambda m, b, e, h: e.amax(0),
    "softmax": lambda m, b, e, h: b.pull(fn.copy_e(e.softmax(0)), "sum").sum(0),
    "norm": lambda m, b, e, h: b.pull(fn.copy_e(m.norm(e)), "sum").sum(0),
    "sources": lambda m, b, e, h: h[b.indices.long()].mean(0),
    "sorted": lambda m, b, e, h: e.sort(0)[0][:3].sum(0),
    "flat": lambda m, b, e, h: e.flatten().mean(),
    "loss": lambda m, b, e, h: F.mse_loss(e, e.relu()),
    "product": lambda m, b, e, h: (e.t() @ e).sum(0),
}


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", COUNTED | READ)
def test_what_reads_or_counts_all_entries_is_refused_in_any_execution(name, execution):
    model = Rows(looped((COUNTED | READ)[name]), norm=nn.BatchNorm1d(WIDTH)).double()
    sgd, sampler = torch.optim.SGD(model.parameters(), 0.1), NeighborSampler(small_graph(), [3], seed=1)
    step = joestar.compile(model, sampler, F.cross_entropy, sgd, backend="eager", execution=execution)
    with pytest.raises(CaptureError, match=r"(?s)with self-loops that were added.*test_looped_rows\.py"):
        step(torch.arange(7))


def test_what_ends_where_offsets_say_is_not():
    def without(m, b, h):
        looped = b.add_self_loops()
        return h * (b.num_edges / b.num_dst) + looped.pull(fn.copy_u(h), "sum").sum(0)

    check_rows({
        "aggregated": looped(lambda m, b, e, h: b.pull(fn.copy_e(m.linear(e).exp()), "mean").sum(0)),
        "attention": looped(lambda m, b, e, h: b.pull(fn.copy_e(b.edge_softmax(e.sum(1))[:, None] * e), "sum").sum(0)),
        "degrees": looped(lambda m, b, e, h: b.in_degrees().sum() / b.num_dst),
        "edges before": without,
    }, linear=nn.Linear(WIDTH, WIDTH))  # fmt: skip


def test_outside_of_programs_there_are_none():
    edges = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]])
    graph = Graph.from_edge_index(edges, 3, ndata={"x": torch.arange(1.0, 4.0)[:, None]})
    block = graph[:, torch.tensor([0, 1])].individual_sample(5).add_self_loops()
    assert block.num_edges == int(block.indptr[-1]) == 5
    assert sorted(block.apply_edges(fn.copy_u(block.srcdata["x"])).flatten().tolist()) == [1, 1, 2, 2, 3]
    whole = small_graph()
    looped = whole[:, torch.arange(NUM_NODES)].individual_sample(999).add_self_loops()
    loops = int((whole.indices.long() == torch.repeat_interleave(torch.arange(NUM_NODES), whole.in_degrees())).sum())
    assert loops and looped.num_edges == whole.num_edges - loops + NUM_NODES
