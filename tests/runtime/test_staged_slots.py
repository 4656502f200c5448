"""What user code may do with node ids over macro-batches: the whole graph's results, or an error before any step."""

import math

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest
from torch import nn

import joestar
from joestar.errors import JoestarError
from joestar.graph_api import fn
from tests.runtime.staged_plans import BATCH, EDGES, NODES, Whole, plans


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    src = (torch.rand(EDGES) ** 2 * NODES).long()
    made = joestar.Graph.from_edge_index(torch.stack([src, torch.randint(0, NODES, (EDGES,))]), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    made.ndata["group"] = torch.randint(0, 5, (NODES,))
    made.edata["w"] = torch.rand(EDGES)
    made.train_idx = torch.randperm(NODES)[:100]
    return made


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    fix = plans(monkeypatch)
    fix(cold=400)
    return fix


@pytest.fixture(autouse=True)
def cheap():
    with cheaper(cheapest):
        yield


class Net(nn.Module):
    """GraphSAGE over features to which ``more(net, blocks, x)`` adds something, one row per source."""

    def __init__(self, more):
        super().__init__()
        self.net, self.more = joestar.nn.GraphSAGE(8, 6, 2, 4), more
        self.table, self.groups = nn.Embedding(NODES, 8), nn.Embedding(5, 8)
        self.register_buffer("seen", torch.zeros(NODES))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, blocks, x):
        added = self.more(self, blocks, x)
        added = added[:, None] if added.dim() == 1 else added
        return self.net(blocks, x + added.float() * self.scale)


def step_of(graph, staged, more=None, sampler=None, loss=F.cross_entropy, execution="padded"):
    torch.manual_seed(1)
    net = joestar.nn.GraphSAGE(8, 6, 2, 4) if more is None else Net(more)
    sampler = joestar.NeighborSampler(graph, [3, 3], seed=5) if sampler is None else sampler(graph)
    stage = {"memory": "1GiB", "first_stage": Whole(48)} if staged else {}
    adam = torch.optim.Adam(net.parameters(), 0.01)
    return joestar.compile(net, sampler, loss, adam, backend="eager", warm_up=4, execution=execution, **stage)


def trained(step, graph, predicts):
    losses = [x.item() for x in step.epoch(graph.train_idx, BATCH)]
    logits = step.predict(graph.train_idx, 20) if predicts else torch.zeros(())
    return losses, logits, dict(step.model.state_dict())


def check_right(graph, tolerance=0.0, predicts=True, **given):
    losses, logits, state = trained(step_of(graph, False, **given), graph, predicts)
    found = trained(step_of(graph, True, **given), graph, predicts)
    assert found[0] == pytest.approx(losses, rel=tolerance, abs=0)
    assert torch.allclose(found[1], logits, rtol=tolerance, atol=tolerance)
    for name, value in found[2].items():
        assert torch.allclose(value, state[name], rtol=tolerance, atol=tolerance), name


def check_refused(graph, text, **given):
    step_of(graph, False, **given)
    with pytest.raises(JoestarError, match=text):  # noqa: PT012
        step = step_of(graph, True, **given)
        before = {name: value.clone() for name, value in step.model.state_dict().items()}
        try:
            next(step.epoch(graph.train_idx, BATCH))
        finally:
            for name, value in step.model.state_dict().items():
                assert torch.equal(value, before[name]), name


def seen_in_buffer(net, blocks, x):
    net.seen.index_add_(0, blocks[0].srcs.long(), torch.ones_like(blocks[0].srcs, dtype=torch.float32))
    return net.seen[blocks[0].srcs.long()].clone()


def summed_by_node(net, blocks, x):
    block = blocks[0]
    sums = torch.zeros(block.graph.num_nodes, 8).index_add(0, block.srcs, x)
    return sums[block.srcs.long()]


def summed_like_data(net, blocks, x):
    block = blocks[0]
    sums = torch.zeros_like(block.graph.ndata["x"]).index_add(0, block.srcs, x)
    return sums[block.srcs.long()]


def of_each_row(net, blocks, x):
    table = F.normalize(torch.relu(blocks[0].graph.ndata["x"]) * 2 + 1, dim=1)
    table = torch.cat([table[:, :4], table.softmax(-1)[:, 4:]], 1) @ net.net.convs[0].lin_l.weight.t()
    return table[blocks[0].srcs.long()].sum(1)


def ends_of_edges(net, blocks, x):
    """How many edges lead to a node with a smaller number, and to the node itself."""
    block = blocks[0]
    to = torch.ops.joestar.edge_dst(block.indptr, block.num_edges, block.indices)
    src, dst = block.srcs[block.indices.long()], block.dsts[to.long()]
    return block.reverse().pull(fn.copy_e((dst < src).float() + 2 * (dst == src).float()), "sum")


RIGHT = {
    "parity": lambda net, blocks, x: blocks[0].srcs % 2,
    "embedding": lambda net, blocks, x: net.table(blocks[0].srcs),
    "embedding of ids times two": lambda net, blocks, x: net.table(blocks[0].srcs * 2 % NODES),
    "hash": lambda net, blocks, x: (blocks[0].srcs.long() * 2654435761 >> 7) % 64 / 64,
    "buffer by node": lambda net, blocks, x: net.seen[blocks[0].srcs.long()],
    "share of the graph": lambda net, blocks, x: blocks[0].srcs / blocks[0].graph.num_nodes,
    "edges of the graph": lambda net, blocks, x: x * blocks[0].graph.num_edges / 1000,
    "every node's number": lambda net, blocks, x: blocks[0].graph.nodes[blocks[0].srcs.long()] % 3,
    "smaller of two": lambda net, blocks, x: torch.minimum(blocks[0].srcs, blocks[0].srcs * 3 % 100) % 3,
    "two dimensions": lambda net, blocks, x: net.table(torch.stack([blocks[0].srcs, blocks[0].srcs], 1)).sum(1),
    "group's embedding": lambda net, blocks, x: net.groups(blocks[0].graph.ndata["group"])[blocks[0].srcs.long()],
    "degrees": lambda net, blocks, x: blocks[0].graph.in_degrees()[blocks[0].srcs.long()].float().rsqrt().clamp(max=1),
    "degrees of all": lambda net, blocks, x: torch.log1p(blocks[0].graph.in_degrees().float())[blocks[0].srcs.long()],
    "degrees of some": lambda net, blocks, x: blocks[0].graph.in_degrees_of(blocks[0].srcs),
    "data of edges": lambda net, blocks, x: blocks[0].reverse().pull(fn.copy_e(blocks[0].edata["w"]), "sum"),
    "counter in a buffer": seen_in_buffer,
    "sums by node": summed_by_node,
    "sums like data": summed_like_data,
    "of each row": of_each_row,
    "ends of edges": ends_of_edges,
}  # fmt: skip


ROUNDED = {"group's embedding": 1e-5, "of each row": 1e-5, "all": 1e-5}
"""Sums over all slots have another order than sums over all nodes."""


def all_of_them(net, blocks, x):
    added = (more(net, blocks, x).float() for more in RIGHT.values())
    return sum(rows[:, None] if rows.dim() == 1 else rows for rows in added) / 10


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.fuzz) for name in RIGHT)])
def test_models_that_read_ids_train_as_over_the_whole_graph(graph, name):
    more = all_of_them if name == "all" else RIGHT[name]
    check_right(graph, ROUNDED.get(name, 0.0), name != "all", more=more)


EXACT = "counter in a buffer", "ends of edges"


def test_in_exact_execution_too_and_with_ids_of_the_graphs_own(graph):
    graph.ids = torch.randperm(NODES).int() * 3 + 5
    try:
        check_right(graph, more=lambda *given: sum(RIGHT[name](*given) for name in EXACT), execution="exact")
    finally:
        graph.ids = None


def test_captured_in_the_real_way(graph):
    from captures import real

    def more(net, blocks, x):
        return net.table(blocks[0].srcs) + (blocks[0].srcs % 2)[:, None] / blocks[0].graph.num_nodes

    with cheaper(real):
        check_right(graph, predicts=False, more=more)


def x_of(blocks):
    return blocks[0].graph.ndata["x"]


def nodes(blocks):
    return blocks[0].srcs.long()


REFUSED = {
    "sum of features": (lambda net, blocks, x: x - x_of(blocks).mean(0), r"graph\.ndata\['x'\] of all nodes"),
    "edges of all": (lambda net, blocks, x: x * blocks[0].graph.edata["w"].sum(), r"graph\.edata\['w'\] of all edges"),
    "propagation": (
        lambda net, blocks, x: blocks[0].graph.pull(fn.copy_u(x_of(blocks)), "mean")[nodes(blocks)],
        "structure of the whole graph"),
    "out-degrees": (
        lambda net, blocks, x: blocks[0].graph.out_degrees()[nodes(blocks)], "structure of the whole graph"),
    "offsets": (
        lambda net, blocks, x: (blocks[0].graph.indptr[1:] - blocks[0].graph.indptr[:-1])[nodes(blocks)],
        "structure of the whole graph"),
    "number of edges": (lambda net, blocks, x: x * blocks[0].graph.indices.float().mean(), "structure of the whole"),
    "positions of edges": (
        lambda net, blocks, x: blocks[0].reverse().pull(fn.copy_e((blocks[0].eids % 2).float()), "sum"),
        "positions of edges"),
    "one node's features": (lambda net, blocks, x: x + x_of(blocks)[7], "of all nodes at once"),
    "some nodes' features": (
        lambda net, blocks, x: x + x_of(blocks)[torch.tensor([1, 2])].sum(0), "neither|not the seeds"),
    "next node's features": (
        lambda net, blocks, x: x_of(blocks)[(nodes(blocks) + 1) % NODES], "not the seeds"),
    "slots": (
        lambda net, blocks, x: torch.zeros(x_of(blocks).shape[0]).index_add(
            0, blocks[0].srcs, x[:, 0])[nodes(blocks)],
        "rows, as graph.ndata has on the device"),
    "size of the data": (lambda net, blocks, x: x / x_of(blocks).shape[0], r"with \d+: the slots on the device"),
    "mean of sums": (
        lambda net, blocks, x: blocks[0].srcs / math.log(x_of(blocks).shape[0]), r"use graph\.num_nodes"),
    "rank": (lambda net, blocks, x: x_of(blocks).argsort(0)[nodes(blocks)], "of all nodes at once"),
    "all out-neighbours": (lambda net, blocks, x: x * blocks[0].graph.csr()[0][-1], "needs all edges of the graph"),
}  # fmt: skip


OFTEN = "size of the data", "sum of features", "propagation", "positions of edges", "next node's features", "slots"
OTHERS = [
    pytest.param(*found, id=name, marks=() if name in OFTEN else pytest.mark.fuzz) for name, found in REFUSED.items()
]


@pytest.mark.parametrize(("more", "text"), OTHERS)
def test_models_that_read_the_whole_graph_are_refused_before_any_step(graph, more, text):
    check_refused(graph, text, more=more)


def writes_data(net, blocks, x):
    blocks[0].graph.ndata["x"].index_fill_(0, blocks[0].srcs.long(), 0.0)
    return x


def test_writes_to_rows_that_are_copies_are_refused(graph):
    check_refused(graph, "its rows on the device are copies", more=writes_data)


class Sampling:
    """A sampler that does something of its own with a hop: ``hop(graph, seeds) -> Block``."""

    def __init__(self, hop):
        self.hop = hop

    def __call__(self, graph):
        made = Sampling(self.hop)
        made.graph = graph
        return made

    def sample(self, graph, seeds):
        first = self.hop(graph, seeds)
        return [self.hop(graph, first.srcs), first]


def by_parity(graph, seeds):
    block = graph[:, seeds].individual_sample(4)
    even = torch.index_select(block.srcs % 2 == 0, 0, block.indices)
    return block.keep_edges(even)


def by_share(graph, seeds):
    columns = graph[:, seeds]
    return columns.individual_sample(3, slice_probs=(columns.indices + 1) / graph.num_nodes)


def by_something_like_ids(graph, seeds):
    """Nothing of the ids but their number and dtype."""
    columns = graph[:, seeds]
    ones = torch.ones_like(columns.indices, dtype=torch.float32)
    return columns.individual_sample(3, slice_probs=ones * graph.ndata["x"].new_full((), 2.0).type_as(graph.ndata["x"]))


def by_group(graph, seeds):
    block = graph[:, seeds].individual_sample(4)
    return block.keep_edges(torch.index_select(graph.ndata["group"][block.srcs.long()] < 3, 0, block.indices))


def by_degree(graph, seeds):
    columns = graph[:, seeds]
    degrees = torch.index_select(graph.in_degrees(), 0, columns.indices)
    return columns.individual_sample(3, slice_probs=1 / (1.0 + degrees))


def with_an_anchor(graph, seeds):
    return graph[:, torch.cat([seeds[:-1], torch.zeros(1, dtype=seeds.dtype)])].individual_sample(3)


def of_others(graph, seeds):
    return graph[:, (seeds * 7 + 1) % graph.num_nodes].individual_sample(3)


def from_above(graph, seeds):
    return graph[graph.nodes[10:], seeds].individual_sample(3)


def by_a_mask(graph, seeds):
    mask = torch.arange(graph.num_nodes) % 3 == 0
    block = graph[:, seeds].individual_sample(4)
    return block.keep_edges(torch.index_select(mask[block.srcs.long()], 0, block.indices))


@pytest.mark.parametrize(
    "hop", [by_group, *(pytest.param(h, marks=pytest.mark.fuzz) for h in (by_degree, by_something_like_ids))]
)
def test_samplers_that_read_data_and_degrees(graph, hop):
    check_right(graph, sampler=Sampling(hop))


@pytest.mark.parametrize(
    "hop",
    [
        by_parity,
        with_an_anchor,
        *(pytest.param(h, marks=pytest.mark.fuzz) for h in (by_share, of_others, from_above, by_a_mask)),
    ],
)
def test_samplers_that_compute_with_ids_are_refused(graph, hop):
    """Rows of other nodes than the seeds are refused as such."""
    others = hop in (with_an_anchor, of_others)
    check_refused(graph, "must begin with the seeds" if others else r"graph\.ndata", sampler=Sampling(hop))


class ByIds(joestar.NeighborSampler):
    """Hands something computed with ids to the model."""

    def sample(self, graph, seeds):
        blocks = super().sample(graph, seeds)
        blocks[0].srcdata["parity"] = (blocks[0].srcs % 2).float()
        return blocks


def test_what_a_sampler_computes_for_the_model(graph):
    check_right(
        graph, sampler=lambda g: ByIds(g, [3, 3], seed=5), more=lambda net, blocks, x: blocks[0].srcdata["parity"]
    )


def test_loading_is_no_write_to_what_a_running_step_has_saved(graph):
    """Between forward and backward the next macro-batch may be loaded: into other slots of the same tensors."""
    step = step_of(graph, True)
    arena = step.arena
    tensors = [arena.graph.positions, arena.graph.ids, arena.graph.whole_degrees, *arena.graph.ndata.values()]
    embedded = nn.Embedding(5, 8)(arena.graph.ndata["group"])
    macro = step.first_stage.sample(graph, step.sampler, graph.train_idx[:48], (0, 0, 0))
    before = [tensor._version for tensor in tensors], [tensor.clone() for tensor in tensors]
    loaded = arena.load(arena.prepare(macro))
    assert [tensor._version for tensor in tensors] == before[0]
    assert not all(map(torch.equal, tensors, before[1]))
    embedded.sum().backward()
    arena.show(loaded)
    assert all(tensor._version > was for tensor, was in zip(tensors, before[0], strict=True))
