"""Attention of PyG in several layers: cut down to hops and one op at once, and what it gives stays PyG's."""

import random
from unittest import mock

import pytest
import torch
from captures import cheaper, cheapest
from lowering.harness import seeded
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.utils import softmax

import joestar
from joestar.fusion.context import PassContext
from joestar.fusion.sampling.union_rows import FINITE
from pyg.common import toy_graph
from pyg.test_trim import BATCHES, compare, results

pytestmark = [pytest.mark.usefixtures("cheapest_captures"), pytest.mark.every(3)]

EDGES = ("edge_attr",)
SOFTMAX, ATTENTION = "softmax-aggregate", "attention"


def gen(**options):
    return gnn.GENConv(8, 8, aggr="softmax", norm=None, learn_t=True, **options)


CONVS = {
    "GATv2Conv": (lambda: gnn.GATv2Conv(8, 4, heads=2, edge_dim=4, add_self_loops=False), EDGES, SOFTMAX),
    "GATv2Conv, loops": (lambda: gnn.GATv2Conv(8, 4, heads=2), (), SOFTMAX),
    "GATConv": (lambda: gnn.GATConv(8, 4, heads=2, edge_dim=4), EDGES, ATTENTION),
    "GATConv, no edge data": (lambda: gnn.GATConv(8, 4, heads=2), (), ATTENTION),
    "TransformerConv": (lambda: gnn.TransformerConv(8, 4, heads=2, edge_dim=4, beta=True), EDGES, SOFTMAX),
    "TransformerConv, no edge data": (lambda: gnn.TransformerConv(8, 8), (), SOFTMAX),
    "GENConv": (lambda: gen(edge_dim=4), EDGES, SOFTMAX),
    "GENConv, no edge data": (gen, (), SOFTMAX),
    "SAGEConv": (lambda: gnn.SAGEConv(8, 8, aggr=gnn.SoftmaxAggregation(learn=True)), (), SOFTMAX),
}
"""Name -> (what makes a convolution, its edge data, the pass that makes it one op)."""
OFTEN = {("GATv2Conv", 2), ("GATConv", 2), ("TransformerConv", 3), ("GENConv", 2)}


class Layers(nn.Module):
    """Convolutions, with skips."""

    def __init__(self, make, layers: int):
        super().__init__()
        self.convs, self.last = nn.ModuleList([make() for _ in range(layers)]), nn.Linear(8, 4)

    def run(self, x, *edges):
        for conv in self.convs:
            x = conv(x, *edges).tanh() + x
        return self.last(x)


class Plain(Layers):
    def forward(self, x, edge_index):
        return self.run(x, edge_index)


class WithEdges(Layers):
    def forward(self, x, edge_index, edge_attr):
        return self.run(x, edge_index, edge_attr)


class Inverse(gnn.MessagePassing):
    """Scores that are infinite where rows are 0, as those of edges are that nobody reads."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.factor = nn.Parameter(torch.rand(8))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, z=x.sigmoid())

    def message(self, x_j, z_i, z_j, index, ptr, size_i):
        score = (z_i * z_j * (self.factor.square() + 0.5)).sum(-1)
        return x_j * softmax(score.reciprocal(), index, ptr, size_i)[:, None]


class Normed(gnn.MessagePassing):
    """Norms of rows of edges, which are 0 / 0 with an ``eps`` of 0 where nobody reads the rows."""

    def __init__(self, norm, eps: float):
        super().__init__(aggr="add", node_dim=0)
        self.norm, self.eps, self.factor = norm, eps, nn.Parameter(torch.rand(8))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, z=x.sigmoid())

    def message(self, x_j, z_i, z_j, index, ptr, size_i):
        rows = self.norm(x_j, (8,), eps=self.eps) * self.factor
        return rows * softmax((z_i * z_j).sum(-1), index, ptr, size_i)[:, None]


STEPS = {
    "leaky": lambda _, m: nn.functional.leaky_relu(m), "vector": lambda conv, m: m * conv.vector,
    "half": lambda _, m: m * 0.5 + 0.1, "inverse": lambda _, m: 1 / (1.5 + m.tanh()), "pole": lambda _, m: 1 / m.exp(),
    "root": lambda _, m: m.abs().sqrt(), "softmax": lambda _, m: m.softmax(1), "all": lambda _, m: m - m.mean(0),
    "norm": lambda _, m: nn.functional.layer_norm(m, (8,)), "linear": lambda conv, m: conv.query(m).sigmoid(),
    "heads": lambda _, m: m.view(-1, 2, 4).flip(2).flatten(1),
}  # fmt: skip
"""What a layer may compute per edge."""


class Message(gnn.MessagePassing):
    """Steps per edge at random, some of which are infinite at 0 or look at all edges; a softmax or another sum."""

    def __init__(self, draw: random.Random):
        super().__init__(aggr=draw.choice(["sum", "mean", "max"]), node_dim=0)
        self.key, self.query, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.of_data, self.vector = nn.Linear(4, 8), nn.Parameter(torch.rand(8))
        self.steps = draw.sample(list(STEPS), draw.randint(1, 3))
        self.weighs, self.reads, self.joins = (draw.random() < chance for chance in (0.8, 0.7, 0.3))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, k=self.key(x), q=self.query(x), edge_attr=edge_attr)

    def message(self, x_j, k_j, q_i, edge_attr, index, ptr, size_i):
        score = self.mix(torch.cat([k_j, q_i], 1)) if self.joins else k_j + q_i
        score = score + self.of_data(edge_attr) if self.reads else score
        for step in self.steps:
            score = STEPS[step](self, score)
        if not self.weighs:
            return x_j * score
        return x_j.view(-1, 2, 4).mul(softmax(score.view(-1, 2, 4).sum(-1), index, ptr, size_i)[..., None]).flatten(1)


class Told(nn.Module):
    """The model reads the coefficients of all edges."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (gnn.GATv2Conv(8, 4, heads=2, add_self_loops=False) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        y, (_, coefficients) = self.second(x, edge_index, return_attention_weights=True)
        return y + coefficients.square().sum()


def fused(**choices):
    """Attention is one op on a CPU, too, of rows that were multiplied before; other ``choices``: kind -> option."""
    choose, choices = PassContext.choose, {"softmax": "fused", "order": "update-first", **choices}

    def chosen(self, kind, name, options, default, node):
        found = choices.get(kind, choose(self, kind, name, options, default, node))
        assert found in options
        return found

    return mock.patch.object(PassContext, "choose", chosen)


def rewrites(program) -> dict[str, int]:
    return {record.name: record.rewrites for record in program.passes}


def cases():
    for name in CONVS:
        for layers in (2, 3):
            marks = () if (name, layers) in OFTEN else pytest.mark.fuzz
            yield pytest.param(name, layers, marks=marks, id=f"{name}-{layers}")


@pytest.mark.parametrize(("name", "layers"), list(cases()))
def test_gives_what_pyg_gives(name, layers):
    make, data, pattern = CONVS[name]
    with fused():
        program = compare((WithEdges if data else Plain)(make, layers), data)
    found = rewrites(program)
    assert found[pattern] == layers
    # a loop's data are a mean over the edges of its node, which is cut down as well, once for all layers
    assert found["trim"] == layers + (name == "GATConv")


@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.fuzz) for number in range(2, 30))])
def test_random_messages_give_what_pyg_gives(number):
    draw = random.Random(number)
    with fused():
        compare(WithEdges(lambda: Message(draw), draw.randint(2, 3)), EDGES)


@pytest.mark.fuzz
def test_dropout_of_coefficients_is_the_same():
    """The mask of an edge is that of (its destination, its place in the row)."""
    model = seeded(WithEdges(lambda: gnn.GATv2Conv(8, 4, heads=2, edge_dim=4, add_self_loops=False, dropout=0.4), 2))
    model, graph = model.double().train(), toy_graph(EDGES)
    found = []
    for disabled in ((), ("trim",), ("trim", SOFTMAX)):
        sampler = joestar.NeighborSampler(graph, [4, 3], seed=1)
        step = joestar.compile(model, sampler, backend="eager", warm_up=3, disable_passes=disabled)
        with cheaper(cheapest), fused():
            found.append([results(step(seeds), model) for seeds in BATCHES])
        passes = rewrites(step._executor("logits").program)
        assert (passes["trim"], passes[SOFTMAX]) == (2 * ("trim" not in disabled), 2 * (SOFTMAX not in disabled))
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], found[2], rtol=1e-9, atol=1e-9)


def test_scores_that_could_be_infinite_are_those_of_all_edges():
    with fused():
        program = compare(Plain(Inverse, 2), ())
    assert (rewrites(program)["trim"], rewrites(program)[SOFTMAX]) == (1, 2)


@pytest.mark.parametrize(("eps", "smaller"), [(0.0, 1), (1e-300, 1), (1e-5, 2)])
@pytest.mark.parametrize("norm", [nn.functional.layer_norm, nn.functional.rms_norm], ids=["layer_norm", "rms_norm"])
@pytest.mark.every(3)
def test_norms_of_edges_that_nobody_reads_are_finite(norm, eps, smaller):
    program = compare(Plain(lambda: Normed(norm, eps), 2), ())
    assert rewrites(program)["trim"] == smaller


@pytest.mark.parametrize("name", sorted(FINITE))
def test_pointwise_ops_of_edges_are_finite_at_zero(name):
    """In value and derivative, whatever numbers other operands have."""
    packet = getattr(torch.ops.aten, name)
    op = next(getattr(packet, kind) for kind in ("Tensor", "self", "default") if hasattr(packet, kind))
    needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    for number in (0.0, 1.0, -2.0):
        given = [operand(argument, number) for argument in needed]
        given += [torch.full((3,), number)] if name in ("clamp", "clip") else []  # a bound is needed
        found = op(*given)
        found = found if isinstance(found, torch.Tensor) else found[0]
        assert found.isfinite().all()
        if found.requires_grad:
            grads = torch.autograd.grad(found.sum(), [x for x in given if getattr(x, "requires_grad", False)])
            assert all(grad.isfinite().all() for grad in grads)


def operand(argument, number: float):
    """Zeros for the first rows; ``number``, as a scalar, a vector or a mask, for everything else."""
    if str(argument.type) != "Tensor":
        return number
    if argument.name in ("mask", "condition"):
        return torch.tensor([True, False, True])
    if argument.name in ("self", "input"):
        return torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    shape = () if argument.name == "value" else (3,)
    return torch.full(shape, number, dtype=torch.float64, requires_grad=argument.name != "value")


def test_coefficients_that_the_model_reads_are_those_of_all_edges():
    with fused():
        program = compare(Told(), ())
    (softmax_of_all,) = {
        node.args[0]
        for node in program.captured.gm.graph.nodes
        if node.target is torch.ops.joestar.edge_softmax.default
    }
    assert softmax_of_all.args[0].target is torch.ops.joestar.merge_hops.default


@pytest.mark.fuzz
def test_features_are_read_in_place():
    """The first layer reads rows of the outermost hop from the features, as in a model of blocks."""
    with fused(order="aggregate-first", attention="in-place"):
        program = compare(gnn.GAT(8, 8, 2, 4, heads=2), ())
    found = rewrites(program)
    assert (found["trim"], found["gather-attention"], found[ATTENTION]) == (2, 1, 1)
