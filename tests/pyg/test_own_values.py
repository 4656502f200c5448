"""What a sampler sets in its blocks reaches models of ``(x, edge_index)``, or is refused, as in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import CaptureError, SamplerError
from joestar.graph_api import SamplingContext
from joestar.graph_api.subgraph import Subgraph
from pyg.common import neighbour_batch, toy_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SEEDS = torch.tensor([3, 17, 40, 5, 51])


class Own:
    """Two hops, each handed to ``change(number, block)``."""

    def __init__(self, graph, change):
        self.graph, self.change = graph, change

    def sample(self, graph, seeds):
        near = self.change(1, graph[:, seeds].individual_sample(3))
        return [self.change(0, graph[:, near.srcs].individual_sample(4)), near]


class Model(nn.Module):
    """Weighted sums, twice, and what else it is given of nodes."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8).double()

    def forward(self, x, edge_index, edge_weight=None, edge_attr=None, age=None):
        for _ in range(2):
            h = self.lin(x)
            messages = h[edge_index[0]]
            messages = messages if edge_weight is None else messages * edge_weight[:, None]
            messages = messages if edge_attr is None else messages * edge_attr.sum(1)[:, None]
            x = torch.tanh(h + torch.zeros_like(h).index_add(0, edge_index[1], messages))
            x = x if age is None else x * age[:, None]
        return x


def _numbered(factor, names=("edge_weight",)):
    """Values that tell in which hop an edge was found: its number in the graph, times ``factor``, plus the hop's."""

    def change(hop, block):
        if "edge_weight" in names:
            block.edata["edge_weight"] = 1 / (1 + block.eids.double()) * factor + hop
        if "edge_attr" in names:
            block.edata["edge_attr"] = torch.stack([block.eids.double().cos(), torch.full_like(block.eids, hop)], 1)
        return block

    return change


def _expected(model, sampler, **nodes):
    """The model on the batch of step (0, 0, 1), put together in plain Python; values of edges as ``_numbered`` has."""
    blocks = sampler.sample(sampler.graph.keyed(0, 0, 1), SEEDS.to(sampler.graph.indices.dtype))
    batch, edge_index, eids = neighbour_batch(blocks)
    hop = (edge_index[1] < len(SEEDS)).double()
    x = nodes.pop("x", sampler.graph.ndata["x"])[batch]
    return lambda make: model(x, edge_index, **make(eids.double(), hop), **{k: v[batch] for k, v in nodes.items()})[
        : len(SEEDS)
    ]


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("of_graph", [(), ("edge_weight",)], ids=["new", "in the graph as well"])
def test_values_of_edges(execution, of_graph):
    torch.manual_seed(0)
    model, sampler = Model(), Own(toy_graph(of_graph), _numbered(5, ("edge_weight", "edge_attr")))
    step = joestar.compile(model, sampler, backend="eager", execution=execution)
    wanted = _expected(model, sampler)(
        lambda n, hop: {"edge_weight": 5 / (1 + n) + hop, "edge_attr": torch.stack([n.cos(), hop], 1)}
    )
    ours = step(SEEDS)
    torch.testing.assert_close(ours, wanted)
    found, other = (torch.autograd.grad(y.square().sum(), model.lin.weight)[0] for y in (ours, wanted))
    torch.testing.assert_close(found, other)


def test_values_set_in_one_block_where_the_graph_has_others():
    """The other block's are the graph's, as they are for a model of blocks."""
    graph = toy_graph(("edge_weight",))
    sampler = Own(graph, lambda hop, block: _numbered(5)(hop, block) if hop else block)
    model = Model()
    wanted = _expected(model, sampler)(
        lambda n, hop: {"edge_weight": torch.where(hop == 1, 5 / (1 + n) + 1, graph.edata["edge_weight"][n.long()])}
    )
    torch.testing.assert_close(joestar.compile(model, sampler, backend="eager")(SEEDS), wanted)


def _set(frame, key, blocks=(0,)):
    def change(hop, block):
        if hop in blocks:
            values = getattr(block, frame)
            nodes = block.srcs if frame == "srcdata" else block.dsts
            values[key] = torch.cos(block.graph.ndata["x"][nodes]) if key == "x" else nodes.double()
        return block

    return change


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("key", ["x", "age"])
def test_values_of_nodes(key, execution):
    graph, model = toy_graph(), Model()
    sampler = Own(graph, _set("srcdata", key))
    nodes = {"x": torch.cos(graph.ndata["x"])} if key == "x" else {"age": torch.arange(60.0, dtype=torch.float64)}
    wanted = _expected(model, sampler, **nodes)(lambda n, hop: {})
    step = joestar.compile(model, sampler, backend="eager", execution=execution)
    torch.testing.assert_close(step(SEEDS), wanted)


LACKING = {
    "one block": (
        lambda hop, block: _numbered(5)(hop, block) if hop else block,
        r"sets edata\['edge_weight'\] in some blocks, and block 0 of 2 has no such values",
    ),
    "inner sources": (
        _set("srcdata", "age", (1,)),
        r"sets block 1.srcdata\['age'\], .* set srcdata\['age'\] of block 0",
    ),
    "both": (_set("srcdata", "x", (0, 1)), r"sets block 1.srcdata\['x'\]"),
    "destinations": (_set("dstdata", "age"), r"sets block 0.dstdata\['age'\]"),
    "widths": (
        lambda hop, block: (
            block.edata.__setitem__("edge_attr", torch.ones(block.num_edges, 2 + hop, dtype=torch.float64)) or block
        ),
        r"edata\['edge_attr'\] differs in dtype or width .* \['num_edges', 2\], torch.float64 \['num_edges', 3\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), LACKING.values(), ids=LACKING)
def test_values_that_the_union_has_not(change, message):
    step = joestar.compile(Model(), Own(toy_graph(), change), backend="eager")
    with pytest.raises((SamplerError, CaptureError), match=message):
        step(SEEDS)


class Plain(nn.Module):
    def forward(self, x, edge_index):
        return 2 * x


def test_values_that_nobody_reads_are_no_error():
    graph = toy_graph()
    step = joestar.compile(Plain(), Own(graph, _set("dstdata", "age")), backend="eager")
    assert torch.equal(step(SEEDS), 2 * graph.ndata["x"][SEEDS])


def test_training_reads_them_in_every_step():
    graph = toy_graph()
    losses = []
    for execution in ("padded", "exact"):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sampler = Own(graph, _numbered(5, ("edge_weight", "edge_attr")))
        step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", execution=execution)
        losses.append([loss.item() for _ in range(2) for loss in step.epoch(torch.arange(60), 20)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10) and losses[0][-1] < losses[0][0]


def test_padded_hops():
    """Bounds beyond what there is: valid entries are those of exact execution."""
    graph = toy_graph()
    exact = SamplingContext(torch.tensor([0, 0, 1]))
    sampler = Own(graph, _numbered(5, ("edge_weight", "edge_attr")))
    wanted = Subgraph.of(sampler.sample(graph.with_context(exact), SEEDS.int()))
    padded = SamplingContext(torch.tensor([0, 0, 1]), [size + 16 for size in exact.recorded])
    found = Subgraph.of(sampler.sample(graph.with_context(padded), SEEDS.int()))
    for name in ("edge_weight", "edge_attr"):
        assert torch.equal(found.edata[name][: wanted.num_edges], wanted.edata[name])
