"""Training on a graph whose nodes lie in other slots, known by their ids: the same bits as on the graph itself."""

import pytest
import torch
import torch.nn.functional as F
from relabelling import relabelled

import joestar
from joestar import fn
from joestar.errors import ChangedAfterCompileError
from joestar.fusion import PASSES
from joestar.graph_api import Graph
from joestar.lowering.rules.arguments import argument

from .common import planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")
NODES, SLOTS, CLASSES, FEATURES = 300, 420, 4, 12


@pytest.fixture(scope="module")
def graph() -> Graph:
    graph = planted_graph(nodes=NODES + 100, degree=5, dtype=torch.float64)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(4))
    return graph


@pytest.fixture(scope="module")
def copy(graph):
    return relabelled(graph, SLOTS)


class Noisy(torch.nn.Module):
    """Dropout of features, of every edge's message, and of hidden rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, CLASSES)

    def forward(self, blocks, x):
        h = F.dropout(self.first(F.dropout(x, 0.2, self.training)), 0.3, self.training)
        for block in blocks:
            weight = F.dropout(block.edata["w"].double(), 0.4, self.training)
            h = torch.relu(block.pull(fn.u_mul_e(h, weight), "sum")) + h[: block.num_dst]
        return self.last(h)


def weighted(z, y, seeds):
    """A loss that looks at the ids of its nodes."""
    return (F.cross_entropy(z, y, reduction="none") * (1 + seeds % 3)).mean()


def _net(name: str, **options):
    return getattr(joestar.nn, name)(FEATURES, 16, num_layers=2, out_channels=CLASSES, dropout=0.4, **options)


DRAWN = {
    "sage": {"extract-select", "sample-gather-aggregate", "aggregate-update"},
    "gin": {"extract-select", "sample-gather-aggregate", "own-aggregate"},
    "gcn": {"extract-select", "sample-structural"},
}
"""Passes that put one draw in place of another: they fire on a graph with ids, and carry them along."""
UNIFORM = {"fanouts": [4, 3]}
CASES = {
    "sage": (lambda: _net("GraphSAGE"), UNIFORM, {}),
    "sage, exact": (lambda: _net("GraphSAGE", norm="batch_norm"), UNIFORM, {"execution": "exact"}),
    "gcn": (lambda: _net("GCN"), UNIFORM, {}),
    "gin": (lambda: _net("GIN"), {"fanouts": [3, 2], "replace": True}, {}),
    "gat": (lambda: _net("GAT", heads=2), UNIFORM, {}),
    "by weight": (lambda: _net("GraphSAGE"), {"fanouts": [4, 3], "probs": "w"}, {}),
    "layers": (lambda: _net("GraphSAGE"), None, {}),
    "every neighbour": (Noisy, {"fanouts": [-1, -1]}, {}),
    "noisy": (Noisy, UNIFORM, {}),
    "noisy, no passes": (Noisy, UNIFORM, {"disable_passes": "all"}),
    "embedded": (lambda: joestar.nn.NodeEmbedding(NODES + 100, FEATURES, _net("GraphSAGE")), UNIFORM, {}),
}


def _step(case: str, graph: Graph, loss=weighted):
    make, sampling, options = CASES[case]
    options = dict(options)
    if case == "embedded":
        graph = _without_features(graph)
    if options.get("disable_passes") == "all":
        options["disable_passes"] = tuple(spec.name for spec in PASSES)
    torch.manual_seed(0)
    net = make().double()
    if sampling is None:
        sampler = joestar.LayerDependentSampler(graph, [30, 40], seed=7)
    else:
        sampler = joestar.NeighborSampler(graph, seed=7, **sampling)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    return joestar.compile(net, sampler, loss, optimizer, backend="eager", warm_up=3, **options)


def _without_features(graph: Graph) -> Graph:
    bare = Graph.from_csc(graph.indptr, graph.indices, {"y": graph.ndata["y"]})
    bare.ids = graph.ids
    return bare


def _passes(step) -> dict:
    """Rewrites by every pass; ids of rows are looked up once per dropout, and then merged."""
    passes = step._runner.executor.program.passes
    return {record.name: record.rewrites for record in passes if record.name != "cse"}


SELDOM = ("gcn", "gin", "by weight")
"""Cases of ``make fuzz``."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.fuzz) if c in SELDOM else c for c in CASES])
def test_training_has_the_same_bits(case, graph, copy):
    other, slot, _ = copy
    ours, theirs = _step(case, other), _step(case, graph)
    idx = torch.arange(0, NODES, 2)
    losses = [float(loss) for loss in theirs.epoch(idx, 40)]
    assert [float(loss) for loss in ours.epoch(slot[idx], 40)] == losses
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[name]), name
    assert _passes(ours) == _passes(theirs)
    assert len(set(losses)) == len(losses)
    if case == "sage":
        test = torch.arange(1, NODES, 7)
        assert torch.equal(ours.predict(slot[test]), theirs.predict(test))
    program = ours._runner.executor.program
    assert {name for name, count in _passes(ours).items() if count} >= DRAWN.get(case, set())
    draws = [node for node in program.captured.gm.graph.nodes if "sample" in str(node.target)]
    assert all(argument(node, "node_ids") is not None for node in draws if argument(node, "k") != -1)


def test_ids_written_in_place_count_at_once(graph, copy):
    """Other nodes move into the slots between two steps, as another part of a graph does."""
    first, slot, _ = copy
    second, other_slot, _ = relabelled(graph, SLOTS, seed=5)
    place = Graph.from_csc(first.indptr.clone(), first.indices.clone())
    place.ndata.update({name: value.clone() for name, value in first.ndata.items()})
    place.ids = first.ids.clone()
    ours, theirs = _step("gcn", place), _step("gcn", graph)
    idx = torch.arange(0, NODES, 3)
    losses = [float(loss) for loss in theirs.epoch(idx, 40)] + [float(loss) for loss in theirs.epoch(idx, 40)]
    found = [float(loss) for loss in ours.epoch(slot[idx], 40)]
    for name in ("indptr", "indices", "ids"):
        getattr(place, name).copy_(getattr(second, name))
    for name, value in second.ndata.items():
        place.ndata[name].copy_(value)
    assert found + [float(loss) for loss in ours.epoch(other_slot[idx], 40)] == losses


def test_other_ids_than_at_compile_are_refused(graph):
    place, slot, _ = relabelled(graph, SLOTS)
    step = _step("sage", place)
    list(step.epoch(slot[:80], 40))
    place.ids = place.ids.clone()
    with pytest.raises(ChangedAfterCompileError, match=r"graph\.ids was replaced by another tensor"):
        list(step.epoch(slot[:80], 40))
    place.ids = None
    with pytest.raises(ChangedAfterCompileError, match=r"graph\.ids was removed"):
        list(step.epoch(slot[:80], 40))
