"""Layers over types of edges, and others that cut out edges or nodes by a mask, against PyG on the same subgraphs."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index
from torch_geometric.utils import remove_self_loops

import joestar
from joestar.errors import CaptureError, ConfigError, DomainError, JoestarError
from joestar.pyg import layers
from pyg.common import expected, neighbour_batch, toy_graph
from pyg.conv_table import _results

pytestmark = pytest.mark.every(3)

TYPES = ("edge_type",)
FULL, LONELY, ONE = torch.tensor([3, 17, 40, 5, 22, 8]), torch.tensor([51, 53]), torch.tensor([59])
RELATIONS = 5
"""Of these no edge is of type 3, and one of type 4, into node 59; types of some edges are no relations at all."""


def typed_graph(data=TYPES) -> joestar.Graph:
    """Types that no edge has, that one has, and that are beyond those of the layers."""
    graph = toy_graph(data)
    types = graph.edata["edge_type"]
    pair = torch.stack([torch.cat([_ends(graph)[0], torch.tensor([7])]), torch.cat([_ends(graph)[1], ONE])])
    types = torch.cat([types, torch.tensor([4])])
    types[5:60:7], types[2:50:11] = 5, -1
    return joestar.Graph.from_edge_index(pair, graph.num_nodes, dict(graph.ndata), {"edge_type": types})


def _ends(graph) -> tuple[torch.Tensor, torch.Tensor]:
    dst = torch.ops.joestar.edge_dst(graph.indptr, graph.num_edges, graph.indices)
    return graph.indices.long(), dst.long()


class Layers(nn.Module):
    """Layers one after the other, each called with what the model is."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index, edge_type):
        for layer in self.layers[:-1]:
            x = layer(x, edge_index, edge_type).relu()
        return self.layers[-1](x, edge_index, edge_type)


def rgcn(first: int = RELATIONS, second: int = RELATIONS, kind=gnn.RGCNConv, **options) -> nn.Module:
    torch.manual_seed(0)
    return Layers(kind(8, 8, first, **options), kind(8, 4, second, **options)).double()


def one_layer() -> nn.Module:
    return Layers(gnn.RGCNConv(8, 4, RELATIONS)).double()


FORMS = {
    "mean": {},
    "sum": {"aggr": "sum"},
    "max": {"aggr": "max"},
    "bases": {"num_bases": 2},
    "blocks": {"num_blocks": 2},
    "blocks, sum, no root": {"num_blocks": 4, "aggr": "add", "root_weight": False, "bias": False},
    "fewer types in the first": {"first": 2},
    "fewer types in the last": {"second": 1},
    "fast": {"kind": gnn.FastRGCNConv},
    "fast, sum of bases": {"kind": gnn.FastRGCNConv, "num_bases": 2, "aggr": "sum"},
    "fast blocks": {"kind": gnn.FastRGCNConv, "num_blocks": 2},
}
OFTEN = ("mean", "blocks", "fast")


@pytest.fixture
def any_type(monkeypatch):
    """PyG leaves out edges of types beyond those of a layer, where it does not count them to choose a product."""
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.fuzz) for n in FORMS])
def test_typed_edges_are_those_of_pyg(name):
    """Values and gradients, in both executions: also without an edge, with one, and of types that nobody knows."""
    graph, model = typed_graph(), rgcn(**FORMS[name])
    if FORMS[name].get("kind"):  # looks up all types: PyG raises for others
        graph.edata["edge_type"] = graph.edata["edge_type"].clamp(0, RELATIONS - 1)
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=1)
    step = joestar.compile(model, sampler, backend="eager", warm_up=3)
    for call, seeds in enumerate((FULL, LONELY, ONE, torch.tensor([22, 31, 22, 0, 44, 12])), 1):
        found = step(seeds)
        other = copy.deepcopy(model)
        wanted = _results(expected(other, sampler, seeds, (1, 0, call), TYPES), other)
        program = step._executor("logits").program
        (exact,), _ = program.exact(seeds.to(graph.indices.dtype), torch.tensor([1, 0, call]))
        for output in (found, exact):
            for one, two in zip(_results(output, model), wanted, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    text = step.report().programs[0].graph_after
    assert "aten.scatter_" not in text and "joestar.spmm" in text
    assert "joestar.first_rows" in text  # cut down to the rows that are read
    assert step.counters.fallbacks <= 1  # the edges of the last batch may be too many


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize(
    "name", ["mean", *(pytest.param(name, marks=pytest.mark.fuzz) for name in ("blocks", "max", "fast"))]
)
def test_padding_is_left_out(name):
    """There is much of it, and whatever it looks up outside of the batch is no number, or of a type that counts."""
    seeds, graph, model = torch.tensor([59, 3]), typed_graph(), rgcn(**FORMS[name])
    sampler = joestar.NeighborSampler(graph, [2, 2], seed=1)
    nodes, _, eids = neighbour_batch(sampler.sample(graph.keyed(1, 0, 1), seeds.int()))
    outside, other_edges = torch.ones(60, dtype=torch.bool), torch.ones(graph.num_edges, dtype=torch.bool)
    outside[nodes], other_edges[eids] = False, False
    assert outside[0] and other_edges[0]
    graph.edata["edge_type"] = torch.where(other_edges, 1, graph.edata["edge_type"].clamp(0, RELATIONS - 1))
    graph.ndata["x"][outside] = torch.nan
    step = joestar.compile(model, sampler, backend="eager", warm_up=3, slack=3.0)
    found, other = step(seeds), copy.deepcopy(model)
    wanted = _results(expected(other, sampler, seeds, (1, 0, 1), TYPES), other)
    for one, two in zip(_results(found, model), wanted, strict=True):
        assert two.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert step.counters.fallbacks == 0


@pytest.mark.fuzz
def test_what_is_fused():
    """A sum per type, of the rows that somebody reads, by the first layer out of the features."""
    graph, model = known_types(), rgcn()
    step = joestar.compile(model, joestar.NeighborSampler(graph, [4, 3]), backend="eager", warm_up=2)
    step(FULL)
    program = step.report().programs[0]
    fired = [place.pattern for place in program.places if place.fired]
    assert fired.count("trim") == 2 * RELATIONS
    assert fired.count("gather-aggregate") == RELATIONS
    assert program.graph_after.count("joestar.spmm") == 2 * RELATIONS
    assert program.graph_after.count("torch.ops.joestar.expect.default(") == 1  # of the types


def known_types() -> joestar.Graph:
    graph = typed_graph()
    graph.edata["edge_type"] = graph.edata["edge_type"].clamp(0, RELATIONS - 1)
    return graph


def test_types_beyond_those_of_a_layer_are_refused_as_in_pyg():
    graph, sampler = typed_graph(), joestar.NeighborSampler(typed_graph(), [3])
    with pytest.raises(ConfigError, match="types from -1 to 5, and an RGCNConv knows those from 0 to 4"):
        joestar.compile(rgcn(), sampler, backend="eager")
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        rgcn()(graph.ndata["x"], torch.stack(_ends(graph)), graph.edata["edge_type"])


@pytest.mark.fuzz
@pytest.mark.parametrize("execution", [None, pytest.param("exact", marks=pytest.mark.fuzz)])
def test_types_that_turn_up_later_are_errors(execution):
    graph = known_types()
    options = {} if execution is None else {"execution": execution}
    step = joestar.compile(one_layer(), joestar.NeighborSampler(graph, [3]), backend="eager", warm_up=2, **options)
    step(FULL)
    graph.edata["edge_type"].fill_(RELATIONS)
    with pytest.raises(
        DomainError, match=f"of type 5 in edata\\['edge_type'\\], and an RGCNConv knows 0 to {RELATIONS - 1}"
    ):
        step(FULL)


@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("bases", [None, pytest.param(2, marks=pytest.mark.fuzz)])
def test_training_is_that_of_pyg(execution, bases):
    """Losses, gradients' moments and weights of steps, with one batch that does not fit what was compiled."""
    graph = known_types()
    model = rgcn(num_bases=bases)
    other = copy.deepcopy(model)
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=2)
    adam, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, other))
    options = {"execution": "exact"} if execution == "exact" else {"warm_up": 2}
    step = joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", **options)
    batches = [FULL, LONELY, ONE, torch.arange(0, 60, 5), FULL]
    for number, seeds in enumerate(batches, 1):
        ours = float(step(seeds))
        theirs.zero_grad()
        loss = F.cross_entropy(expected(other, sampler, seeds, (2, -1 - number, 0), TYPES), graph.ndata["y"][seeds])
        loss.backward()
        theirs.step()
        assert ours == pytest.approx(loss.item(), rel=1e-9)
    assert step.counters.steps == len(batches)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(adam.state[one][name], theirs.state[two][name], rtol=1e-8, atol=1e-10)


@pytest.mark.fuzz
def test_what_stood_in_is_gone_afterwards():
    own = gnn.RGCNConv.forward, gnn.ChebConv.__norm__, gnn.MFConv.forward
    step = joestar.compile(one_layer(), joestar.NeighborSampler(known_types(), [3]), backend="eager", warm_up=2)
    step(FULL)
    assert own == (gnn.RGCNConv.forward, gnn.ChebConv.__norm__, gnn.MFConv.forward)
    assert torch_geometric.backend.use_segment_matmul is None
    model, graph = rgcn(), known_types()
    edges = torch.stack(_ends(graph))
    wanted = model(graph.ndata["x"], edges, graph.edata["edge_type"])
    torch.testing.assert_close(joestar.inference(model, graph), wanted)


class OtherTypes(Layers):
    """Types that are computed, by which the sample is not told apart."""

    def forward(self, x, edge_index, edge_type):
        return super().forward(x, edge_index, edge_type.remainder(2))


class WithoutLoops(Layers):
    def forward(self, x, edge_index, edge_type):
        return super().forward(x, *remove_self_loops(edge_index, edge_type))


class OwnMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(8, 4)

    def forward(self, x, edge_index, edge_type):
        return self.conv(x, masked_edge_index(edge_index, edge_type == 1))


class CutsMore(gnn.RGCNConv):
    """Asks for other edges in between: those of type 0 would be given for those of type 2."""

    def propagate(self, edge_index, **given):
        x = given["x"]
        return super().propagate(masked_edge_index(self.all[0], self.all[1] == 2), **given) + 0 * x

    def forward(self, x, edge_index, edge_type=None):
        self.all = (edge_index, edge_type)
        out = super().forward(x, edge_index, edge_type)
        self.all = None
        return out


REFUSED = {
    "types that are computed": lambda: OtherTypes(gnn.RGCNConv(8, 4, RELATIONS)),
    "edges without loops": lambda: WithoutLoops(gnn.RGCNConv(8, 4, RELATIONS)),
    "a mask of one's own": OwnMask,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(name):
    """With the line, and what to write there."""
    step = joestar.compile(
        REFUSED[name]().double(), joestar.NeighborSampler(known_types(), [3]), backend="eager", warm_up=2
    )
    with pytest.raises(JoestarError, match=r"test_typed\.py:\d+ in forward") as caught:
        step(FULL)
    assert "torch.where(mask" in str(caught.value)


class Rewrites(Layers):
    """Types are changed in place before they are used: the very tensor, or rows of it."""

    def __init__(self, rows: bool, *layers):
        super().__init__(*layers)
        self.rows = rows

    def forward(self, x, edge_index, edge_type):
        if self.rows:
            edge_type.view(-1, 1).mul_(0)
        else:
            edge_type.mul_(0)
        return super().forward(x, edge_index, edge_type)


@pytest.mark.fuzz
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_types_that_are_written_in_place_are_refused(rows, counted, monkeypatch):
    """The sets are those of the types as they were."""
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", None if counted else False)
    model = Rewrites(rows, gnn.RGCNConv(8, 4, RELATIONS)).double()
    step = joestar.compile(model, joestar.NeighborSampler(known_types(), [3]), backend="eager", warm_up=2)
    with pytest.raises(CaptureError, match="that is not edge_type == i"):
        step(FULL)


@pytest.mark.fuzz
def test_another_mask_than_that_of_the_set_is_refused():
    """Whatever it is that a layer of PyG's, or what was made of it, asks for."""
    layer = CutsMore(8, 4, RELATIONS).double()
    layer.all = None
    step = joestar.compile(layer, joestar.NeighborSampler(known_types(), [3]), backend="eager", warm_up=2)
    with pytest.raises(CaptureError, match="that is not edge_type == i"):
        step(FULL)


OTHERS = {
    "Chebyshev": lambda: gnn.ChebConv(8, 4, K=3),
    "Chebyshev, random walk": lambda: gnn.ChebConv(8, 4, K=2, normalization="rw"),
    "Chebyshev, as it is": lambda: gnn.ChebConv(8, 4, K=3, normalization=None),
    "clusters": lambda: gnn.ClusterGCNConv(8, 4, diag_lambda=0.3),
    "by degree": lambda: gnn.MFConv(8, 4, max_degree=2),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [n if "," not in n else pytest.param(n, marks=pytest.mark.fuzz) for n in OTHERS])
def test_layers_that_choose_by_a_mask_are_those_of_pyg(name):
    torch.manual_seed(0)
    graph, model = toy_graph(), OTHERS[name]().double()
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=1)
    step = joestar.compile(model, sampler, backend="eager", warm_up=3)
    for call, seeds in enumerate((FULL, LONELY, ONE), 1):
        found, other = step(seeds), copy.deepcopy(model)
        wanted = _results(expected(other, sampler, seeds, (1, 0, call), ()), other)
        (exact,), _ = step._executor("logits").program.exact(seeds.to(graph.indices.dtype), torch.tensor([1, 0, call]))
        for output in (found, exact):
            for one, two in zip(_results(output, model), wanted, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_clusters_without_added_loops_are_refused():
    """PyG adds a number per node at the loops there are, of which there may be fewer."""
    model = gnn.ClusterGCNConv(8, 4, diag_lambda=0.3, add_self_loops=False).double()
    step = joestar.compile(model, joestar.NeighborSampler(toy_graph(), [3]), backend="eager", warm_up=2)
    with pytest.raises(JoestarError, match="fails in plain PyTorch, too"):
        step(FULL)


def test_code_of_another_version_is_traced_as_it_is(monkeypatch):
    """Its form here is that of one version: whatever another one does, it is not replaced by what this one did."""
    assert {name for _, name, _ in layers.attributes()} >= {"__norm__", "forward"}
    changed = gnn.MFConv.forward

    def forward(self, x, edge_index, size=None):
        return changed(self, x, edge_index, size) * 2

    monkeypatch.setattr(gnn.MFConv, "forward", forward)
    replaced = [owner for owner, _, _ in layers.attributes()]
    assert gnn.MFConv not in replaced and gnn.ChebConv in replaced and gnn.RGCNConv in replaced


def test_classes_that_another_version_lacks_are_left_alone(monkeypatch):
    monkeypatch.delattr(gnn.MFConv, "forward")
    monkeypatch.delattr(torch_geometric.nn.conv.cheb_conv, "ChebConv")
    monkeypatch.delattr(torch_geometric.backend, "use_segment_matmul")
    assert {name for _, name, _ in layers.attributes()} == {"forward"}
