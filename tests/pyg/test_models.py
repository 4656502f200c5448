"""Models of PyG, unmodified, against PyG itself on the same sampled subgraphs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as gnn
from torch_geometric.utils import add_self_loops, degree

import joestar
from joestar.errors import ConfigError, GraphError
from joestar.pyg import takes_edge_index
from pyg.common import expected, neighbour_batch, toy_graph

pytestmark = pytest.mark.every(3)

DATA = ("edge_weight", "edge_attr")
BATCHES = [[3, 17, 40, 5, 59, 8], [51, 53], [22, 31, 22, 0, 44, 12]]  # full, nearly without edges, a node twice


class Own(torch.nn.Module):
    """Loops with weights, batch norm, attention with edge data, extrema, a layer of one's own with raw scatters."""

    def __init__(self):
        super().__init__()
        self.first = gnn.GCNConv(8, 8)
        self.norm = gnn.BatchNorm(8)
        self.second = gnn.GATConv(8, 4, heads=2, edge_dim=4)
        self.third = gnn.SAGEConv(8, 8, aggr=["mean", "max"])
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x, edge_index, edge_weight, edge_attr):
        x = self.norm(self.first(x, edge_index, edge_weight)).relu()
        x = self.second(x, edge_index, edge_attr)
        x = x + self.third(x, edge_index)
        looped, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        out = torch.zeros_like(x)
        out.index_add_(0, looped[1], x[looped[0]])
        out = out / degree(looped[1], x.size(0), dtype=x.dtype).view(-1, 1)
        back = x.new_zeros(x.shape).scatter_reduce(
            0, edge_index[0].view(-1, 1).expand(-1, 8), x[edge_index[1]], "amin", include_self=False
        )
        return self.last(out + 0.1 * back)


@pytest.fixture(scope="module")
def graph():
    return toy_graph(DATA)


def _trained(graph, passes: tuple[str, ...]):
    """(losses, state) of steps in Joestar, and in PyTorch and PyG."""
    torch.manual_seed(0)
    model = Own().double()
    other = copy.deepcopy(model)
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=2)
    sgd, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, other))
    step = joestar.compile(model, sampler, F.cross_entropy, sgd, backend="eager", warm_up=4, disable_passes=passes)
    losses = []
    for number, batch in enumerate(BATCHES, 1):
        seeds = torch.tensor(batch)
        ours = float(step(seeds))
        theirs.zero_grad()
        loss = F.cross_entropy(expected(other, sampler, seeds, (2, -1 - number, 0), DATA), graph.ndata["y"][seeds])
        loss.backward()
        theirs.step()
        losses.append((ours, loss.item()))
    return losses, model.state_dict(), other.state_dict(), step


@pytest.mark.parametrize(
    "passes", [pytest.param((), id="segments"), pytest.param(("segments",), id="scatters", marks=pytest.mark.fuzz)]
)
def test_training_is_that_of_pyg(graph, passes):
    losses, ours, theirs, step = _trained(graph, passes)
    for one, other in losses:
        assert one == pytest.approx(other, rel=1e-9)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=name)
    program = step.report().programs[0]
    fired = {place.pattern for place in program.places if place.fired}
    text = program.graph_after
    if passes:
        assert "scatter_add" in text and "segments" not in fired
    else:
        assert "segments" in fired
        assert text.count("aten.scatter") == 1 and "aten.index_add" not in text  # that against the edges
    assert step.counters.steps == len(BATCHES)


def test_prediction_over_the_whole_graph_is_the_model_itself(graph):
    model = gnn.Sequential(
        "x, edge_index, edge_weight", [(gnn.GraphConv(8, 4), "x, edge_index, edge_weight -> x"), torch.nn.ReLU()]
    ).double()
    sampler = joestar.NeighborSampler(graph, [-1])
    idx = torch.tensor([4, 50, 7])
    step = joestar.compile(model, sampler, backend="eager", warm_up=2)
    dst = torch.ops.joestar.edge_dst(graph.indptr, graph.num_edges, graph.indices)
    edge_index = torch.stack([graph.indices, dst]).long()
    wanted = model(graph.ndata["x"], edge_index, graph.edata["edge_weight"])[idx]
    torch.testing.assert_close(step.predict(idx, full=True), wanted)
    torch.testing.assert_close(joestar.inference(model, graph, idx), wanted)
    torch.testing.assert_close(step.predict(idx), wanted)  # one layer, every neighbour
    with pytest.raises(ConfigError, match="leave out batch_size"):
        joestar.inference(model, graph, batch_size=10)


def _compiled(model, graph, **options):
    return joestar.compile(model.double(), joestar.NeighborSampler(graph, [3]), backend="eager", warm_up=2, **options)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(8, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.mark.parametrize("what", ["message_forward_hook", "aggregate_forward_pre_hook", "propagate_forward_hook"])
def test_hooks_of_message_passing_are_refused(graph, what):
    """PyG skips them while it is compiled: they would change nothing."""
    model = Plain()
    getattr(model.conv, f"register_{what}")(lambda module, *values: None)
    with pytest.raises(ConfigError, match=f"conv has {what}s"):
        _compiled(model, graph)


def test_a_batch_without_room_is_redone_and_later_hooks_are_refused(graph):
    model, seeds = Plain(), torch.tensor(BATCHES[0])
    step = _compiled(model, graph, disable_passes=("trim",))  # with it, a single layer stores no edges
    torch.testing.assert_close(step(seeds), expected(model, step.sampler.sampler, seeds, (0, 0, 1), ()))
    program = step._executor("logits").program
    labels = program.captured.labels
    tight = [16 if label == "sample" else bound for bound, label in zip(program.bounds, labels, strict=True)]
    step._executor("logits").compile(tight, program.batch)
    seeds = torch.tensor(BATCHES[2])  # 18 edges
    torch.testing.assert_close(step(seeds), expected(model, step.sampler.sampler, seeds, (0, 0, 2), ()))
    assert step.counters.fallbacks == 1
    model.conv.register_message_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(joestar.errors.JoestarError, match="hook"):
        step(seeds)


class CountsNodes(torch.nn.Module):
    def forward(self, x, edge_index):
        nodes = int(edge_index.max()) + 1  # this line
        return x.new_zeros(nodes, 8).index_add(0, edge_index[1], x[edge_index[0]])


class WritesInPlace(torch.nn.Module):
    def forward(self, x, edge_index):
        out = torch.zeros_like(x)
        out[edge_index[1]] += x[edge_index[0]]  # this line
        return out


class Masks(torch.nn.Module):
    def forward(self, x, edge_index):
        kept = edge_index[:, x[edge_index[0], 0] > 0]  # this line
        return torch.zeros_like(x).index_add(0, kept[1], x[kept[0]])


class WritesEdges(torch.nn.Module):
    """The edges without loops, to which loops are added, would be those of before."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.GCNConv(8, 4)

    def forward(self, x, edge_index):
        edge_index.clamp_(max=3)  # this line
        return self.conv(x, edge_index)


def test_edges_that_are_written_in_place_are_refused(graph):
    with pytest.raises(joestar.errors.CaptureError, match="writes into edge_index in place") as caught:
        _compiled(WritesEdges(), graph)(torch.tensor([3, 4]))
    assert "this line" in str(caught.value)


@pytest.mark.parametrize("kind", [CountsNodes, WritesInPlace, Masks])
def test_what_depends_on_data_is_refused_with_its_line(graph, kind):
    with pytest.raises(joestar.errors.JoestarError, match=r"test_models\.py") as caught:
        _compiled(kind(), graph)(torch.tensor([3, 4]))
    assert "this line" in str(caught.value)


class OfOneRow(torch.nn.Module):
    """What a layer of PyG's asks itself: it takes running statistics where there is one row."""

    def __init__(self):
        super().__init__()
        self.norm = gnn.BatchNorm(8, allow_single_element=True)

    def forward(self, x, edge_index):
        return self.norm(x)  # this line


def test_layers_that_ask_for_one_row_are_refused(graph):
    with pytest.raises(joestar.errors.CaptureError, match=r"num_src .* > 1") as caught:
        _compiled(OfOneRow(), graph)(torch.tensor([3, 4]))
    assert "this line" in str(caught.value)


class LoopsOfSome(torch.nn.Module):
    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=5)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


def test_loops_of_some_nodes_are_not_those_of_all(graph):
    """PyG would give a loop to the first five nodes of the batch: refused, as no set of known size is that."""
    with pytest.raises(joestar.errors.JoestarError, match="only for some sizes of sampled sets"):
        _compiled(LoopsOfSome(), graph)(torch.tensor([3, 4]))


ORDERS = {
    "put beside": lambda edges, looped, w, n: (edges, torch.cat([w, w.new_ones(n)])),
    "padded": lambda edges, looped, w, n: (edges, F.pad(w, (0, n), value=1.0)),
    "rolled": lambda edges, looped, w, n: (edges, looped.roll(1)),
    "split by places": lambda edges, looped, w, n: (edges, looped * looped.tensor_split([w.numel()])[0].mean()),
    "cut": lambda edges, looped, w, n: (edges, looped * looped[w.numel() :].mean()),
    "split": lambda edges, looped, w, n: (edges, looped * looped.split([w.numel(), n])[0].mean()),
    "turned around": lambda edges, looped, w, n: (edges, looped.flip(0)),
    "numbered": lambda edges, looped, w, n: (edges, looped * (torch.arange(looped.numel()) >= w.numel())),
    "numbered from 1": lambda edges, looped, w, n: (edges, looped * torch.arange(1, looped.numel() + 1)),
    "written": lambda edges, looped, w, n: (edges, torch.ones_like(looped).index_add(0, torch.arange(w.numel()), w)),
    "added up": lambda edges, looped, w, n: (edges, looped.cumsum(0)),
    "edges cut": lambda edges, looped, w, n: (edges[:, : w.numel()], w),
}
"""Edges and their weights as they are where loops stand behind all ``w`` edges."""


class Ordered(torch.nn.Module):
    def __init__(self, order):
        super().__init__()
        self.order = order

    def forward(self, x, edge_index, edge_weight):
        looped = add_self_loops(edge_index, edge_weight, 1.0, x.size(0))
        edges, weight = self.order(*looped, edge_weight, x.size(0))
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weight[:, None])


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.every(6)
def test_the_place_of_added_loops_is_nothing_to_rely_on(graph, name):
    """The capture says so, of which there is one for both executions."""
    step = _compiled(Ordered(ORDERS[name]), graph)
    with pytest.raises(
        joestar.errors.CaptureError, match=r"add_self_loops\(edge_index, values, fill_value, num_nodes\)"
    ):
        step(torch.tensor([3, 4]))


def test_values_given_to_add_self_loops_are_those_of_pyg(graph):
    model, sampler, seeds = (
        Ordered(lambda edges, looped, w, n: (edges, looped)),
        joestar.NeighborSampler(graph, [3]),
        torch.tensor([3, 4]),
    )
    step = joestar.compile(model, sampler, backend="eager", execution="exact")
    for call in (1, 2):  # what stood in for PyG's functions is gone by the second one
        found = step(seeds)
        torch.testing.assert_close(found, expected(model, sampler, seeds, (0, 0, call), ("edge_weight",)))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_attention_without_loops(graph, flow):
    """Its own code asks whether there is an edge at all, and does the same either way."""
    torch.manual_seed(0)
    model = gnn.GATConv(8, 4, heads=2, add_self_loops=False, flow=flow).double()
    sampler = joestar.NeighborSampler(graph, [3])
    step = joestar.compile(model, sampler, backend="eager", execution="exact")
    lonely = torch.nonzero(graph.in_degrees() == 0).flatten()[:2]
    assert lonely.numel()
    for call, seeds in enumerate((torch.tensor([3, 4]), lonely), 1):
        torch.testing.assert_close(step(seeds), expected(model, sampler, seeds, (0, 0, call), ()))


class PositionsFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, pos, x, edge_index):
        return torch.cat([pos, x], 1) * self.scale


def test_features_are_what_is_called_so():
    """Also behind others, which are tensors of the graph by their names."""
    graph, seeds = toy_graph(()), torch.tensor([3, 4])
    graph.ndata["pos"] = -graph.ndata["x"]
    step = joestar.compile(
        PositionsFirst().double(), joestar.NeighborSampler(graph, [3]), backend="eager", execution="exact"
    )
    x = graph.ndata["x"][seeds]
    torch.testing.assert_close(step(seeds), torch.cat([-x, x], 1))
    del graph.ndata["pos"]
    with pytest.raises(ConfigError, match="takes pos, and the graph has no such tensor"):
        joestar.compile(PositionsFirst().double(), joestar.NeighborSampler(graph, [3]), backend="eager")


class NamedOnly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, pos, edge_index):
        return pos * self.scale


class PositionalOnly(NamedOnly):
    def forward(self, pos, /, edge_index):
        return pos * self.scale


@pytest.mark.parametrize("kind", [NamedOnly, PositionalOnly])
def test_a_tensor_named_as_the_first_parameter_is_given(kind):
    """Features were, without a word, where they had as many columns."""
    graph, seeds = toy_graph(()), torch.tensor([3, 4])
    graph.ndata["pos"] = -graph.ndata["x"]
    step = joestar.compile(kind().double(), joestar.NeighborSampler(graph, [3]), backend="eager", execution="exact")
    torch.testing.assert_close(step(seeds), graph.ndata["pos"][seeds])
    del graph.ndata["pos"]
    step = joestar.compile(kind().double(), joestar.NeighborSampler(graph, [3]), backend="eager", execution="exact")
    torch.testing.assert_close(step(seeds), graph.ndata["x"][seeds])


class OrLearnt(torch.nn.Module):
    """Features where there are some, else a learnt row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row, self.lin, self.conv = torch.nn.Parameter(torch.randn(8)), torch.nn.Linear(8, 8), gnn.SAGEConv(8, 4)

    def forward(self, n_id, edge_index, x=None):
        h = self.row.expand(n_id.size(0), 8) if x is None else self.lin(x)
        return self.conv(h, edge_index)


class FeaturesFirst(OrLearnt):
    def forward(self, x=None, edge_index=None):
        return self.conv(self.lin(x), edge_index)


class FeaturesLast(OrLearnt):
    def forward(self, edge_index, *, x=None):
        return self.conv(self.lin(x), edge_index)


@pytest.mark.parametrize("kind", [OrLearnt, FeaturesFirst, FeaturesLast])
def test_a_default_of_x_is_for_graphs_without_features(kind):
    full, model = toy_graph(), kind().double()
    full.ndata["n_id"] = torch.arange(60)
    ends, idx = torch.stack([end.long() for end in full.coo()[:2]]), torch.tensor([3, 40])
    names = {"n_id": full.ndata["n_id"]} if kind is OrLearnt else {}
    with torch.no_grad():
        wanted = model(x=full.ndata["x"], edge_index=ends, **names)
    step = joestar.compile(model, joestar.NeighborSampler(full, [-1]), backend="eager")
    torch.testing.assert_close(step(idx), wanted[idx])
    torch.testing.assert_close(step.predict(idx, full=True), wanted[idx])
    torch.testing.assert_close(joestar.inference(model, full), wanted)
    if kind is OrLearnt:
        del full.ndata["x"]
        with torch.no_grad():
            torch.testing.assert_close(joestar.inference(model, full), model(full.ndata["n_id"], ends))


class OfIds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.conv = torch.nn.Embedding(60, 8), gnn.SAGEConv(8, 4)

    def forward(self, n_id, edge_index):
        return self.conv(self.table(n_id), edge_index)


def test_a_model_of_ids_alone_needs_no_features():
    graph, seeds = toy_graph(()), torch.tensor([3, 4, 20])
    graph.ndata["n_id"] = torch.arange(60)
    del graph.ndata["x"]
    model, sampler = OfIds().double(), joestar.NeighborSampler(graph, [3])
    step = joestar.compile(model, sampler, backend="eager")
    nodes, edge_index, _ = neighbour_batch(sampler.sample(graph.keyed(0, 0, 1), seeds.to(graph.indices.dtype)))
    torch.testing.assert_close(step(seeds), model(nodes, edge_index)[:3])
    with pytest.raises(GraphError, match=r"has no features, and TakesX\.forward takes x"):
        joestar.compile(TakesX(), sampler, backend="eager")


class TakesX(torch.nn.Module):
    def forward(self, x, edge_index):
        return x


class Cuts(torch.nn.Module):
    def forward(self, x, edge_index, batch_size):
        return x[:batch_size]


def test_models_that_cut_batches_themselves_are_told(graph):
    with pytest.raises(ConfigError, match=r"Cuts\.forward takes batch_size: Joestar trims .* by itself"):
        joestar.compile(Cuts(), joestar.NeighborSampler(graph, [3]), backend="eager")


class TakesSparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(8, 4)

    def forward(self, x, adj_t):
        return self.conv(x, adj_t)


class TakesData(TakesSparse):
    def forward(self, data):
        return self.conv(data.x, data.edge_index)


class TakesMore(TakesSparse):
    def forward(self, x, edge_index, times):
        return self.conv(x, edge_index)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(TakesSparse, "forward\\(self, x, edge_index\\)"), (TakesData, "Data object"), (TakesMore, "edata\\['times'\\]")],
)
def test_what_a_batch_has_not_is_said_at_once(graph, kind, words):
    with pytest.raises(ConfigError, match=words):
        _compiled(kind(), graph)


def test_a_budget_of_memory_needs_blocks(graph):
    with pytest.raises(ConfigError, match="need blocks"):
        _compiled(Plain(), graph, memory="1GiB")


def test_models_of_blocks_are_called_as_ever():
    assert not takes_edge_index(joestar.nn.GraphSAGE(8, 8, 2, 4))
    assert takes_edge_index(gnn.GraphSAGE(8, 8, 2, 4)) and takes_edge_index(Plain())
    assert not takes_edge_index(torch.nn.Linear(2, 2))
