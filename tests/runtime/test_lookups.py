"""Ids that data of edges hold, or that come by way of edges, and lookups of exact inference: in range, or an error."""

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError, LabelError, PaddingError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, KINDS = torch.arange(2, 302), 5
WAYS = {
    "embedding": (lambda m, b: m.table(b.edata["kind"])[:, 0], "edge"),
    "rows": (lambda m, b: m.table.weight[b.edata["kind"], 0], "edge"),
    "pairs": (lambda m, b: m.table.weight.flatten()[b.edata["kind"] * FEATURES + 1], "edge"),
    "one_hot": (lambda m, b: F.one_hot(b.edata["kind"], KINDS).double() @ m.table.weight[:, 0], "edge"),
    "of sources": (lambda m, b: m.table.weight[b.srcdata["kind"][b.indices.long()], 0], "node"),
}


class Typed(nn.Module):
    """Edges weighed by what a table has for their kinds."""

    def __init__(self, way):
        super().__init__()
        self.table, self.head = nn.Embedding(KINDS, FEATURES).double(), nn.Linear(FEATURES, CLASSES).double()
        self.way = way

    def forward(self, blocks, x):
        return self.head(blocks[0].pull(fn.u_mul_e(x, self.way(self, blocks[0])), "mean"))


def _graph():
    graph = planted_graph(dtype=torch.float64)
    graph.edata["kind"] = torch.arange(graph.num_edges) % KINDS
    graph.ndata["kind"] = torch.arange(graph.num_nodes) % KINDS
    return graph


def _step(way, graph, **options):
    model = Typed(WAYS[way][0])
    sampler = joestar.NeighborSampler(graph, [3], seed=7, **options)
    return joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), backend="eager")


@pytest.mark.parametrize("way", WAYS)
def test_ids_without_a_row(way):
    graph = _graph()
    step = _step(way, graph)
    assert len(list(step.epoch(IDX, 100))) == 3
    joestar.inference(step.model, graph, layers=1)
    data, one = (graph.edata, graph.num_edges - 3) if WAYS[way][1] == "edge" else (graph.ndata, 17)
    data["kind"][one] = 9
    what = "edata" if data is graph.edata else "ndata"
    message = rf"graph.{what}\['kind'\] gives \d+ for {WAYS[way][1]} {one}, which is out of range at .*: .* ids in \["
    for use in (
        lambda: next(_step(way, graph).epoch(IDX, 100)), lambda: _step(way, graph).predict(IDX),
        lambda: joestar.inference(step.model, graph, layers=1),
    ):  # fmt: skip
        with pytest.raises(LabelError, match=message):
            use()


def test_edges_that_are_never_picked_may_have_any():
    graph = _graph()
    graph.edata["weight"] = torch.ones(graph.num_edges)
    graph.edata["kind"][5] = -1
    graph.edata["weight"][5] = 0.0
    assert len(list(_step("embedding", graph, probs="weight").epoch(IDX, 100))) == 3
    graph.edata["kind"][9] = -1
    with pytest.raises(LabelError, match=r"graph.edata\['kind'\] gives -1 for edge 9, which is out of range"):
        next(_step("embedding", graph, probs="weight").epoch(IDX, 100))


def test_sources_of_no_edge_may_have_any():
    graph = _graph()
    graph.ndata["kind"][0] = -9  # node 0 is isolated
    assert len(list(_step("of sources", graph).epoch(IDX, 100))) == 3
    assert len(joestar.inference(Typed(WAYS["of sources"][0]), graph, layers=1)) == graph.num_nodes


class OfSeeds(nn.Module):
    """A table beside the seeds' rows."""

    def __init__(self):
        super().__init__()
        self.conv, self.table = joestar.nn.SAGEConv(FEATURES, CLASSES).double(), nn.Embedding(KINDS, CLASSES).double()

    def forward(self, blocks, x):
        return self.conv(blocks[0], x) + self.table(blocks[0].dstdata["kind"])


def test_seeds_of_predictions_and_calls():
    graph = _graph()
    graph.ndata["kind"][17] = 9
    step = joestar.compile(OfSeeds(), joestar.NeighborSampler(graph, [3], seed=7), backend="eager")
    for use in (step, step.predict):
        with pytest.raises(LabelError, match=r"graph.ndata\['kind'\] gives 9 for node 17"):
            use(IDX)
        assert len(use(IDX[20:])) == len(IDX) - 20
    with pytest.raises(LabelError, match=r"graph.ndata\['kind'\] gives 9 for node 17"):
        joestar.inference(step.model, graph, layers=1)


@pytest.mark.parametrize("frozen", [False, True], ids=["learnt", "frozen"])
def test_tables_with_a_largest_norm_name_what_can_be_compiled(frozen):
    """Plain PyTorch scales rows while they are looked up; what is named scales all of them."""
    graph = _graph()
    model = Typed(WAYS["embedding"][0])
    model.table.max_norm = 1.0
    model.table.requires_grad_(not frozen)
    scaled = model.table.weight.detach().renorm(model.table.norm_type, 0, 1.0)
    step = joestar.compile(model, joestar.NeighborSampler(graph, [3]), backend="eager")
    remedy = r"table.weight.copy_\(table.weight.renorm\(norm_type, 0, max_norm\)\)"
    with cheaper(real), pytest.raises((CaptureError, PaddingError), match=remedy):
        step(IDX[:50])
    torch.testing.assert_close(model.table(torch.arange(KINDS)), scaled, rtol=0, atol=1e-12)
