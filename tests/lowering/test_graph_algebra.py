"""Samplers over the graph algebra, and models that read edge data: plain, exact and padded execution agree."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar import LayerDependentSampler, NeighborSampler, fn

from .harness import NUM_CLASSES, NUM_FEATURES, WIDTH, check, raises, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")

BATCHES = ((9, 3, 22, 1, 40, 2, 17), (9, 5, 47))
DOUBLE = torch.float64


def _graph():
    """The small graph with node and edge data: weights (some 0), features, types."""
    graph = small_graph(isolated=3)
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(graph.num_edges, generator=generator)
    weight[::7] = 0
    graph.edata["w"] = weight
    graph.edata["f"] = torch.randn(graph.num_edges, 3, generator=generator, dtype=DOUBLE)
    graph.edata["type"] = torch.randint(0, 5, (graph.num_edges,), generator=generator)
    graph.ndata["q"] = torch.rand(graph.num_nodes, generator=generator)
    graph.ndata["kind"] = torch.randint(0, 5, (graph.num_nodes,), generator=generator)
    return graph


GRAPH = _graph()


class Layer(nn.Module):
    """Edge data as weights and in functions of edges, node data of either end, tensors put into a block's frames."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.edge, self.types, self.drop = nn.Linear(3, WIDTH), nn.Embedding(5, WIDTH), drop

    def message(self, edges):
        """Types of edges and sources, gates from edge features, both ends' rows."""
        gate = F.dropout(self.edge(edges.data["f"]), self.drop).sigmoid()
        kinds = self.types(edges.data["type"]) + self.types(edges.src["kind"])
        return {"m": (edges.src["h"] * gate + edges.dst["own"]).relu(), "kinds": kinds}

    def forward(self, block, h):
        own = h[: block.num_dst]
        weighted = block.pull(fn.u_mul_e(h, block.edata["w"].to(DOUBLE)), "sum")
        added = block.pull(fn.u_add_e(h, self.edge(block.edata["f"])), "max")
        made = block.pull(self.message, "mean", src={"h": h}, dst={"own": own})
        block.srcdata["h"], block.dstdata["h"] = h, own
        pushed = block.push(lambda e: e.src["h"] / (1 + e.dst["h"] ** 2) + e.dst["x"].sum(1, keepdim=True), "sum")
        node = block.apply_nodes(lambda nodes: nodes.data["h"].tanh() * nodes.data["q"][:, None].to(DOUBLE))
        return (own + weighted + added + made["m"] + made["kinds"] + 0.1 * pushed + node).tanh()


class Net(nn.Module):
    """A linear layer, ``layers`` layers, a linear layer."""

    def __init__(self, layers: int, drop: float = 0.0):
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(layers))

    def forward(self, blocks, x):
        h = self.first(x)
        for layer, block in zip(self.layers, blocks, strict=True):
            h = layer(block, h)
        return self.last(h)


class Picks:
    """One hop for each fanout, drawn by ``draw(self, graph, dsts, k)``."""

    def __init__(self, draw, fanouts=(3,)):
        self.graph, self.draw, self.fanouts = GRAPH, draw, fanouts
        self.rows = torch.arange(0, 48, 2, dtype=torch.int32)

    def sample(self, graph, seeds):
        blocks, dsts = [], seeds
        for k in self.fanouts:
            block = self.draw(self, graph, dsts, k)
            blocks.append(block)
            dsts = block.srcs
        return blocks[::-1]


def computed_bias(self, graph, dsts, k):
    columns = graph[:, dsts]
    bias = columns.edata["w"] * columns.srcdata["q"].index_select(0, columns.indices)
    return columns.individual_sample(k, probs=bias)


def attention_bias(self, graph, dsts, k):
    columns = graph[:, dsts]
    scores = columns.apply_edges(fn.u_add_v(columns.srcdata["q"], columns.dstdata["q"]))
    return columns.individual_sample(k, probs=columns.edge_softmax(scores))


def computed_importance(self, graph, dsts, k):
    columns = graph[:, dsts]
    return columns.collective_sample(3 * k, node_probs=columns.out_degrees().to(torch.float32) ** 2)


def slice_read_before(self, graph, dsts, k):
    columns = graph[:, dsts]
    columns.edata["w"]
    return columns.individual_sample(k)


def said_of_the_slice(self, graph, dsts, k):
    columns = graph[:, dsts]
    return columns.individual_sample(k, slice_probs=columns.edata["w"] * columns.edata["w"])


def said_of_the_graph(self, graph, dsts, k):
    columns = graph[:, dsts]
    columns.in_degrees()
    return columns.individual_sample(k, edge_probs=self.weight)


@pytest.mark.parametrize("draw", [said_of_the_slice, said_of_the_graph])
def test_weights_where_every_node_is_a_seed(draw):
    """In another order: plain Python, exact and padded execution read the same weights."""
    sampler = Picks(draw)
    sampler.weight = GRAPH.edata["w"].clone()
    order = torch.randperm(GRAPH.num_nodes, generator=torch.Generator().manual_seed(0)).tolist()
    check(Net(1), (order, order[::-1], order[:9]), graph=GRAPH, sampler=sampler)


SAMPLERS = {
    "uniform": NeighborSampler(GRAPH, [3, 2]),
    "uniform, replaced": NeighborSampler(GRAPH, [3], replace=True),
    "every edge": NeighborSampler(GRAPH, [-1]),
    "weighted by name": NeighborSampler(GRAPH, [3, 2], probs="w"),
    "weighted by tensor, replaced": NeighborSampler(GRAPH, [3], probs=GRAPH.edata["w"], replace=True),
    "every edge of positive weight": NeighborSampler(GRAPH, [-1], probs="w"),
    "layers": LayerDependentSampler(GRAPH, [6, 9]),
    "layers, fixed importance": LayerDependentSampler(GRAPH, [60], "q"),
    "computed importance": Picks(computed_importance),
    "computed bias": Picks(computed_bias, (3, 2)),
    "attention": Picks(attention_bias),
    "slice read before": Picks(slice_read_before),
    "from some sources": Picks(lambda s, graph, dsts, k: graph[s.rows, dsts].individual_sample(k)),
    "from some sources, weighted": Picks(
        lambda s, graph, dsts, k: graph[s.rows, dsts].individual_sample(k, probs="w", replace=True)
    ),
    "all from some sources": Picks(lambda s, graph, dsts, k: graph[:, dsts][s.rows, :].compact()),
    "without loops": Picks(lambda s, graph, dsts, k: graph[:, dsts].individual_sample(k).remove_self_loops()),
    "kept edges": Picks(
        lambda s, graph, dsts, k: (lambda block: block.keep_edges(block.edata["w"] > 0.3))(graph[:, dsts].compact())
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.every(3)
def test_executions_agree(name):
    sampler = SAMPLERS[name]
    hops = getattr(sampler, "fanouts", None) or sampler.layer_sizes
    check(Net(len(hops)), BATCHES, graph=GRAPH, sampler=sampler)


def test_dropout_of_edge_values_agrees():
    check(Net(2, drop=0.4), BATCHES, graph=GRAPH, sampler=SAMPLERS["weighted by name"], plain=False)


def test_tight_bounds():
    check(Net(2), BATCHES, graph=GRAPH, sampler=SAMPLERS["computed bias"], factor=1.0, extra=0, tight=True)


def test_a_graph_without_edges():
    graph = _graph()
    graph = graph - graph
    check(Net(1), BATCHES, graph=graph, sampler=NeighborSampler(graph, [3], probs="w"))


class Attentive(nn.Module):
    """Aggregation at the destinations and back at the sources, softmax over either side."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, blocks, x):
        (block,) = blocks
        h = self.first(x)
        back = block.reverse()
        scores = block.apply_edges(fn.u_dot_v(h, h[: block.num_dst])).tanh()
        there = block.pull(fn.u_mul_e(h, block.edge_softmax(scores)), "sum")
        again = back.pull(fn.u_mul_e(there, back.edge_softmax(scores)), "sum") + back.pull(fn.copy_u(there), "max")
        mean = back.pull(lambda edges: edges.src["t"] * edges.data["f"][:, :1], "mean", src={"t": there})
        return self.last((h + again + mean)[: block.num_dst])


def test_reversed_blocks_agree():
    check(Attentive(), BATCHES, graph=GRAPH, sampler=NeighborSampler(GRAPH, [4]))


# --- fusion ---------------------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Mean of the neighbours' features; reads edge data if told to."""

    def __init__(self, reads: bool):
        super().__init__()
        self.reads, self.last = reads, nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, blocks, x):
        (block,) = blocks
        h = block.pull(fn.copy_u(x), "mean")
        if self.reads:
            h = h + block.pull(fn.copy_e(block.edata["f"]), "sum").sum(1, keepdim=True)
        return self.last(h)


def test_edge_data_that_nobody_reads_cost_nothing():
    unread = check(Reads(False), BATCHES, graph=GRAPH, fanouts=(3,))
    fired = [place.pattern for place in unread.program.places if place.fired]
    assert fired == ["extract-select", "sample-gather-aggregate"]
    targets = {str(node.target) for node in unread.program.captured.gm.graph.nodes}
    assert not {target for target in targets if "eids" in target or "compact" in target}


def test_edge_data_that_are_read_are_sampled_again():
    read = check(Reads(True), BATCHES, graph=GRAPH, fanouts=(3,))
    targets = [str(node.target) for node in read.program.captured.gm.graph.nodes]
    assert targets.count("joestar.sample_eids.default") == 1


# --- errors ---------------------------------------------------------------------------------------------------------


def test_bad_weights_are_found_before_capture():
    from joestar.errors import SamplerError

    graph = _graph()
    sampler = NeighborSampler(graph, [3], probs="w")
    graph.edata["w"][5] = -1.0
    with raises(SamplerError, "probs[5] = -1.0"):
        check(Reads(False), BATCHES, graph=graph, sampler=sampler)


def test_unknown_edge_data_name_what_there_is():
    class Wrong(Reads):
        def forward(self, blocks, x):
            return self.last(blocks[0].pull(fn.u_mul_e(x, blocks[0].edata["weight"]), "sum"))

    from joestar.graph_api import Graph

    plain = Graph.from_csc(GRAPH.indptr, GRAPH.indices, dict(GRAPH.ndata), {"w": GRAPH.edata["w"]})
    with pytest.raises(Exception, match=r"edata\['weight'\]: neither graph nor block has such a tensor; there is: w"):
        check(Wrong(True), BATCHES, graph=plain, fanouts=(3,), plain=False)
