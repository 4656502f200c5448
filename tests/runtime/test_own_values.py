"""Samplers that set values of edges and nodes, through ``joestar.compile``, against plain PyTorch in float64."""

import copy
import functools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SEEDS = torch.arange(0, 90)


def _graph():
    graph = planted_graph(nodes=420, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
    graph.edata["p"] = torch.rand(graph.num_edges, generator=generator)
    return graph


class Net(nn.Module):
    """Weighted sums over blocks, with loops, and a value of the sources; ``scale`` belongs to the sampler as well."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)]).double()

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=True):
            h = layer(x) * block.add_self_loops().srcdata["q"][:, None]
            x = torch.tanh(block.pull(fn.u_mul_e(h, block.edata["w"]), "sum") + h[: block.num_dst])
        return x


def _reference(net, blocks, graph):
    """The net in plain PyTorch, of values computed from the edges' positions in the graph."""
    x = graph.ndata["x"][blocks[0].srcs]
    for layer, block in zip(net.layers, blocks, strict=True):
        row = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff())
        h = layer(x) * (0.5 + graph.ndata["y"][block.srcs]).double()[:, None]
        weight = net.scale * graph.edata["w"][block.eids] + 1
        messages = h[block.indices] * weight[:, None]
        x = torch.tanh(torch.zeros(block.num_dst, h.shape[1]).double().index_add(0, row, messages) + h[: block.num_dst])
    return x


class Reweighting:
    """Weights of the picks are those of the graph, times a parameter; set in slices and blocks, in front of others."""

    seed = 7

    def __init__(self, graph, net, pick):
        self.graph, self.net, self.pick = graph, net, pick

    def sample(self, graph, seeds):
        blocks, dsts = [], seeds
        for _ in range(2):
            columns = graph[:, dsts]
            columns.edata["w"] = self.net.scale * columns.edata["w"]
            block = self.pick(columns)
            block.edata["w"] = block.edata["w"] + 1
            block.srcdata["q"] = 0.5 + block.srcdata["y"].double()
            block = block.remove_self_loops()
            blocks.append(block.keep_edges(block.edata["p"] > 0.1))
            dsts = block.srcs
        return blocks[::-1]


PICKS = {
    "uniform": lambda columns: columns.individual_sample(3),
    "weighted": lambda columns: columns.individual_sample(3, edge_probs="p"),
    "some sources": lambda columns: columns[columns.dsts, :].compact(),
    "together": lambda columns: columns.collective_sample(30),
}


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("pick", PICKS)
def test_values_of_the_sampler_are_those_of_plain_pytorch(pick, execution):
    graph = _graph()
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    sampler, theirs = (Reweighting(graph, each, PICKS[pick]) for each in (net, plain))
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, plain))
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, execution=execution, backend="eager")
    for number, (loss, seeds) in enumerate(step.epoch(SEEDS, 30, with_seeds=True)):
        with torch.no_grad():
            blocks = theirs.sample(graph.keyed(7, 0, number), seeds)
        wanted = F.cross_entropy(_reference(plain, blocks, graph), graph.ndata["y"][seeds])
        other.zero_grad()
        wanted.backward()
        other.step()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    for ours, mine in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, mine, rtol=1e-9, atol=1e-9)
    assert net.scale.item() != 1.5


class Masking:
    """Hides columns of what the model reads: rows of its own in the place of the graph's."""

    def __init__(self, graph):
        self.graph = graph

    def sample(self, graph, seeds):
        block = graph[:, seeds].individual_sample(3)
        block.srcdata["x"] = block.srcdata["x"] * (torch.arange(FEATURES) % 2)
        return [block]


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_features_that_the_sampler_sets_are_those_of_the_model(execution):
    graph = _graph()
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=1, out_channels=CLASSES).double()
    ours = joestar.compile(net, Masking(graph), backend="eager", execution=execution, slack=0.5)(SEEDS[:30])
    (block,) = Masking(graph).sample(graph.keyed(0, 0, 1), SEEDS[:30])
    rows = graph.ndata["x"][block.srcs] * (torch.arange(FEATURES) % 2)
    torch.testing.assert_close(ours, net([block], rows))
    assert not torch.equal(ours, net([block], graph.ndata["x"][block.srcs]))


# --- what a sampler may be, and what it may not draw from ---


def _two(graph, seeds, k=2):
    near = graph[:, seeds].individual_sample(k)
    return [graph[:, near.srcs].individual_sample(k), near]


class _Call:
    def __call__(self, graph, seeds):
        return _two(graph, seeds)


class _Holder:
    """Whose ``sample`` is an attribute of the instance."""

    def __init__(self, graph, sample):
        self.graph, self.sample = graph, sample


SAMPLERS = {
    "namespace": lambda graph: types.SimpleNamespace(graph=graph, sample=_two),
    "lambda": lambda graph: _Holder(graph, lambda view, seeds: _two(view, seeds)),
    "partial": lambda graph: _Holder(graph, functools.partial(_two, k=2)),
    "object": lambda graph: _Holder(graph, _Call()),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sample_may_be_an_attribute(sampler):
    graph = _graph()
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=2, out_channels=CLASSES).double()
    with cheaper(real):
        ours = joestar.compile(net, SAMPLERS[sampler](graph), backend="eager")(SEEDS[:30])
    blocks = _two(graph.keyed(0, 0, 1), SEEDS[:30])
    torch.testing.assert_close(ours, net(blocks, graph.ndata["x"][blocks[0].srcs]))


def _counting(self, graph, seeds):
    self.count.add_(1)
    return _two(graph, seeds)


class Counting:
    def __init__(self, graph, decorate):
        self.graph, self.count = graph, torch.zeros(())
        self.sample = functools.partial(decorate(_counting), self)


@pytest.mark.parametrize("decorate", [lambda f: f, torch.no_grad()], ids=["plain", "no_grad"])
def test_writes_of_a_sampler_are_refused_with_their_line_wherever_its_code_is(decorate):
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=2, out_channels=CLASSES).double()
    step = joestar.compile(net, Counting(_graph(), decorate), backend="eager")
    with pytest.raises(CaptureError, match="that outlives the call, in a sampler, which runs more than once per step"):
        step(SEEDS[:30])


class Refused:
    def __init__(self, graph, draw):
        self.graph, self.other, self.draw = graph, graph.reverse(), draw
        self.fanouts, self.k = np.array([2, 3]), np.int64(2)

    def sample(self, graph, seeds):
        return [self.draw(self, graph, seeds)]


def _of_twin(self, graph, seeds):
    one, other = graph[:, seeds], graph[:, seeds]
    return one.individual_sample(2, slice_probs=other.edata["p"])


def _mask_of_twin(self, graph, seeds):
    return graph[:, seeds].compact().keep_edges(graph[:, seeds].compact().edata["p"] > 0.5)


def _value_of_twin(self, graph, seeds):
    one, other = graph[:, seeds].compact(), graph[:, seeds].compact()
    one.edata["v"] = other.edata["w"]
    return one


GIVEN = "Draw from the graph that sample.graph, seeds. is given, .* other.with_context.graph.context."
REFUSED = {
    "own graph": (lambda s, g, d: s.graph[:, d].individual_sample(2), GIVEN),
    "second graph": (lambda s, g, d: s.other[:, d].compact(), GIVEN),
    "weights of a twin": (_of_twin, "slice_probs has the entries of another set, .* the very slice that is sampled"),
    "mask of a twin": (_mask_of_twin, "keep_edges needs .* got one of another set, which may have as many in one"),
    "value of a twin": (_value_of_twin, r"edata\['v'\] needs a tensor whose rows are those of the block or slice"),
}


@pytest.mark.parametrize(("draw", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_traced_sampler_may_not_do_is_named(draw, message):
    graph = _graph()
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=1, out_channels=CLASSES).double()
    step = joestar.compile(net, Refused(graph, draw), backend="eager")
    with pytest.raises(CaptureError, match=message):
        step(SEEDS[:30])


def test_a_second_graph_is_drawn_from_under_the_context_of_the_first():
    graph = _graph()
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=1, out_channels=CLASSES).double()
    sampler = Refused(graph, lambda s, g, d: s.other.with_context(g.context)[:, d].individual_sample(2))
    blocks = sampler.sample(graph.keyed(0, 0, 1), SEEDS[:30])
    wanted = net(blocks, graph.ndata["x"][blocks[0].srcs])
    torch.testing.assert_close(joestar.compile(net, sampler, backend="eager")(SEEDS[:30]), wanted)


NUMBERS = {
    "scalar": lambda s, g, d: g[:, d].individual_sample(s.k),
    "entry": lambda s, g, d: g[:, d].individual_sample(s.fanouts[0]),
    "read": lambda s, g, d: g[:, d].collective_sample(int(s.fanouts[0])),
}


@pytest.mark.parametrize("draw", NUMBERS)
def test_numbers_of_numpy_are_refused_with_their_line(draw):
    graph = _graph()
    assert NUMBERS[draw](Refused(graph, None), graph, SEEDS).num_dst == len(SEEDS)  # in plain Python they are numbers
    sampler = Refused(graph, NUMBERS[draw])
    net = joestar.nn.GraphSAGE(FEATURES, 8, num_layers=1, out_channels=CLASSES).double()
    step = joestar.compile(net, sampler, backend="eager")
    words = r"_sample: k is a number of NumPy's or PyTorch's, .* self.fanouts = fanouts.tolist\(\)"
    with pytest.raises(CaptureError, match=words):
        step(SEEDS[:30])
