"""Draws that steps repeat: edges are as likely as in the whole graph, whatever the first stage has drawn for a node."""

import bisect
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import joestar
from joestar import fn
from joestar.errors import StageError
from joestar.staged.step import borders
from joestar.stages import LargeBatch
from joestar.stages.union import FirstStageContext
from tests.runtime.device_book import book_on_device
from tests.runtime.staged_plans import BATCH, EDGES, NODES, plans

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SEEDS = 48


def random_graph():
    torch.manual_seed(0)
    src = (torch.rand(EDGES * 3) ** 2 * NODES).long()
    made = joestar.Graph.from_edge_index(torch.stack([src, torch.randint(0, NODES, (EDGES * 3,))]), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 8, dtype=torch.float64), torch.randint(0, 4, (NODES,))
    made.edata["w"] = torch.rand(EDGES * 3)
    made.train_idx = torch.randperm(NODES)[:150]
    return made


@pytest.fixture(scope="module")
def graph():
    return random_graph()


@pytest.fixture
def planned(monkeypatch):
    plans(monkeypatch)(seeds=SEEDS, edges=3 * EDGES)


class Hops(joestar.NeighborSampler):
    """A user's sampler, a block per hop; ``block(graph, seeds, fanout)`` says how it draws."""

    def __init__(self, graph, block):
        super().__init__(graph, [3, 2], seed=5)
        self.block = block

    def sample(self, graph, seeds):
        blocks = []
        for fanout in self.fanouts:
            blocks.append(self.block(graph, seeds, fanout))
            seeds = blocks[-1].srcs
        return blocks[::-1]


def squares(graph, seeds, fanout):
    columns = graph[:, seeds]
    return columns.individual_sample(fanout, slice_probs=columns.edata["w"] ** 2)


def shares(graph, seeds, fanout):
    """What the weights are divided by is another number among fewer edges."""
    columns = graph[:, seeds]
    return columns.individual_sample(fanout, slice_probs=columns.edge_softmax(3 * columns.edata["w"][:, None])[:, 0])


def with_values(graph, seeds, fanout):
    columns = graph[:, seeds]
    columns.edata["half"] = columns.edata["w"] / 2
    return columns.individual_sample(fanout, "half")


def heavy_ones(graph, seeds, fanout):
    """Picks that are dropped take the places of others in both stages."""
    block = graph[:, seeds].individual_sample(fanout + 1, "w")
    return block.keep_edges(block.edata["w"] > 0.6)


def two_calls(graph, seeds, fanout):
    near = graph[:, seeds].individual_sample(fanout, "w")
    return graph[:, near.dsts].individual_sample(2, "w", replace=True)


def mixed(graph, seeds, fanout):
    """By weight and evenly, for the same nodes."""
    near = graph[:, seeds].individual_sample(fanout, "w")
    return graph[:, near.dsts].individual_sample(2)


def mixed_with_replacement(graph, seeds, fanout):
    near = graph[:, seeds].individual_sample(fanout, replace=True)
    return graph[:, near.dsts].individual_sample(2, "w")


def among_themselves(graph, seeds, fanout):
    """From other sources than the macro-batch has, so that others win."""
    return graph[seeds, seeds].individual_sample(fanout)


def heavy_among_themselves(graph, seeds, fanout):
    near = graph[:, seeds].individual_sample(fanout)
    return graph[near.srcs, near.dsts].individual_sample(2, "w")


def all_among_themselves(graph, seeds, fanout):
    """A walk that is not returned, and all edges between what it found (ShaDow)."""
    near = graph[:, seeds].individual_sample(fanout)
    return graph[near.srcs, near.dsts].compact()


def kept_of_mixed(graph, seeds, fanout):
    block = mixed(graph, seeds, fanout)
    return block.keep_edges(block.edata["w"] > 0.3)


SAMPLERS = {
    "of ours": lambda graph: joestar.NeighborSampler(graph, [3, 2], seed=5, probs="w"),
    "with replacement": lambda graph: joestar.NeighborSampler(graph, [3, 2], seed=5, probs="w", replace=True),
    "many": lambda graph: joestar.NeighborSampler(graph, [3, 40], seed=5, probs="w"),
    "three hops": lambda graph: joestar.NeighborSampler(graph, [2, -1, 1], seed=5, probs="w"),
} | {block.__name__: lambda graph, block=block: Hops(graph, block)
     for block in (squares, shares, with_values, heavy_ones, two_calls, mixed, mixed_with_replacement,
                   kept_of_mixed, among_themselves, heavy_among_themselves, all_among_themselves)}  # fmt: skip


def parts(graph, layers=2, device="cpu"):
    torch.manual_seed(1)
    net = joestar.nn.GraphSAGE(8, 6, layers, 4, dropout=0.0).double().to(device)
    return net, torch.optim.Adam(net.parameters(), 0.01, eps=1e-4)


def plain_losses(net, optimizer, graph, sampler, steps) -> list[float]:
    """In plain PyTorch: every batch is drawn from the whole graph, with the key of its macro-batch.

    Args:
        steps: (seeds, key) of each.
    """
    losses = []
    for seeds, key in steps:
        optimizer.zero_grad()
        context = FirstStageContext(key, races=True)
        context.takes_parts = False
        blocks = sampler.sample(graph.with_context(context), seeds)
        loss = F.cross_entropy(net(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][seeds.long()])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(graph, name, execution, backend="eager", device="cpu", rel=1e-9):
    """Two epochs in both ways."""
    sampler = SAMPLERS[name](graph)
    net, optimizer = parts(graph, len(sampler.fanouts), device)
    plain, theirs = parts(graph, len(sampler.fanouts))
    step = joestar.compile(
        net, sampler, F.cross_entropy, optimizer, backend=backend, warm_up=3, execution=execution, memory="1GiB",
        first_stage=LargeBatch(SEEDS, hot=0), batch_size=BATCH,
    )  # fmt: skip
    limits = borders(SEEDS // BATCH, -(-len(graph.train_idx) // BATCH))
    losses, steps = [], []
    for epoch in range(2):
        for position, (loss, seeds) in enumerate(step.epoch(graph.train_idx, BATCH, with_seeds=True)):
            losses.append(loss.item())
            steps.append((seeds.clone(), (5, epoch, bisect.bisect_right(limits, position) - 1)))
    assert step.traffic.macro_batches == 2 * (len(limits) - 1) and not step.traffic.cut
    assert losses == pytest.approx(plain_losses(plain, theirs, graph, SAMPLERS[name](graph), steps), rel=rel)


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.every(3)
def test_steps_draw_what_the_first_stage_drew_for_their_nodes(graph, planned, name, execution):
    check(graph, name, execution)


def test_so_they_do_where_the_device_keeps_the_book(graph, planned):
    with book_on_device():
        check(graph, "of ours", "padded")


class Picked(torch.nn.Module):
    """The weight of the one edge that was picked for each seed."""

    def forward(self, blocks, x):
        return blocks[-1].pull(fn.copy_e(blocks[-1].edata["w"][:, None]), "sum") + 0 * x[: blocks[-1].num_dst, :1]


def counted(monkeypatch, make, nodes=40, calls=150, seeds=40) -> tuple[Tensor, int]:
    """How often edges of weights 1 to 6 are picked, of nodes that have one of each; the number of picks.

    Args:
        make: the sampler of a graph. seeds: of how many nodes.
    """
    plans(monkeypatch)(seeds=seeds, hot=0, cold=nodes, edges=6 * nodes)
    others = torch.stack([(torch.arange(nodes) + shift) % nodes for shift in (1, 2, 5, 11, 17, 23)])
    graph = joestar.Graph.from_edge_index(torch.stack([others.flatten(), torch.arange(nodes).repeat(6)]), nodes)
    graph.ndata["x"] = torch.zeros(nodes, 1)
    graph.ndata["likely"] = torch.arange(nodes) ** 2.0
    graph.edata["w"] = torch.arange(1.0, 7).repeat(nodes)
    graph.edata["heavy"] = (graph.edata["w"] > 3).float()
    step = joestar.compile(
        Picked(), make(graph), backend="eager", warm_up=1, memory="1GiB", first_stage=LargeBatch(seeds, hot=0),
        batch_size=seeds,
    )  # fmt: skip
    found = torch.cat([step(torch.arange(seeds)) for _ in range(calls)]).flatten()
    return torch.stack([(found == weight).double().mean() for weight in range(1, 7)]), found.numel()


def near(found: Tensor, wanted: Tensor, picks: int) -> bool:
    """Within five standard errors."""
    return bool(((found - wanted).abs() < 5 * (wanted * (1 - wanted) / picks).sqrt()).all())


@pytest.mark.parametrize("replace", [False, True])
def test_edges_are_picked_as_often_as_their_weights_say(monkeypatch, replace):
    """By counting, of nodes that are drawn for in both hops."""
    found, picks = counted(
        monkeypatch, lambda graph: joestar.NeighborSampler(graph, [1, 1], probs="w", replace=replace)
    )
    assert near(found, torch.arange(1, 7, dtype=torch.float64) / 21, picks), found


def looking_around(graph, seeds, fanout):
    """Picks of which nothing is returned."""
    graph[:, seeds].individual_sample(1, "w")
    return graph[:, seeds].individual_sample(1)


def by_weight_behind(graph, seeds, fanout):
    """The first hop evenly, the second by weight (blocks go from the last hop to the first)."""
    return graph[:, seeds].individual_sample(1, "w" if fanout == 2 else None)


def among_themselves_behind(graph, seeds, fanout):
    """The first hop from all sources, the second from those that are there."""
    columns = graph[seeds, seeds] if fanout == 2 else graph[:, seeds]
    return columns.individual_sample(1)


def all_among_themselves_behind(graph, seeds, fanout):
    return graph[seeds, seeds].compact() if fanout == 2 else graph[:, seeds].individual_sample(1)


def all_heavy_ones_behind(graph, seeds, fanout):
    return graph[:, seeds].individual_sample(*((-1, "heavy") if fanout == 2 else (1,)))


def a_layer_behind(graph, seeds, fanout):
    """The first hop picks edges, the second nodes, of which those behind the first are likely."""
    if fanout == 3:
        return graph[:, seeds].individual_sample(1)
    return graph[:, seeds].collective_sample(12, "likely")


@pytest.mark.parametrize("block", [
    looking_around, by_weight_behind, among_themselves_behind, all_among_themselves_behind, all_heavy_ones_behind,
    a_layer_behind,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*nodes are drawn among what")
def test_even_draws_are_even_whatever_other_calls_prefer(monkeypatch, block):
    """Most edges of weight 6 come from nodes that are no seeds."""
    found, picks = counted(monkeypatch, lambda graph: Hops(graph, block), seeds=20)
    assert near(found, torch.full((6,), 1 / 6, dtype=torch.float64), picks), found


def test_as_many_neighbours_are_kept_where_a_sampler_drops_picks(monkeypatch):
    """Uniform picks of which a half is dropped: a node that two hops drew for has no more of them for that."""
    nodes, degree, calls = 40, 20, 40
    plans(monkeypatch)(seeds=nodes, hot=0, cold=nodes, edges=degree * nodes)
    source = (torch.arange(nodes)[:, None] + torch.arange(1, degree + 1)) % nodes
    ends = torch.stack([source.flatten(), torch.arange(nodes).repeat_interleave(degree)])
    graph = joestar.Graph.from_edge_index(ends, nodes)
    graph.ndata["x"], graph.edata["w"] = torch.zeros(nodes, 1), torch.arange(nodes * degree) % 2 * 1.0
    sampler = Hops(graph, lambda graph, seeds, fanout: every_second(graph[:, seeds].individual_sample(5)))
    step = joestar.compile(
        Picked(), sampler, backend="eager", warm_up=1, memory="1GiB", first_stage=LargeBatch(nodes, hot=0),
        batch_size=nodes,
    )  # fmt: skip
    kept = torch.cat([step(torch.arange(nodes)) for _ in range(calls)]).mean().item()
    assert kept == pytest.approx(2.5, abs=5 * (5 * 0.25 / (nodes * calls)) ** 0.5)


def every_second(block):
    return block.keep_edges(block.edata["w"] > 0)


def test_a_macro_batch_without_eids_is_refused(graph, planned):
    class Nameless(LargeBatch):
        def sample(self, graph, sampler, seeds, key):
            macro = super().sample(graph, sampler, seeds, key)
            return dataclasses.replace(macro, eids=None)

    bare = joestar.Graph.from_csc(graph.indptr, graph.indices, {"x": graph.ndata["x"], "y": graph.ndata["y"]})
    net, optimizer = parts(bare)
    sampler = Hops(bare, lambda graph, seeds, fanout: by_degree(graph[:, seeds], fanout))
    options = {"backend": "eager", "memory": "1GiB", "batch_size": BATCH}
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, first_stage=Nameless(SEEDS), **options)
    with pytest.raises(StageError, match="without eids: give them, or set repeats = False"):
        next(step.epoch(graph.train_idx, BATCH))
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, first_stage=LargeBatch(SEEDS), **options)
    assert len(list(step.epoch(graph.train_idx, BATCH))) == 10  # computed weights, of a graph without edge data


def by_degree(columns, fanout):
    degrees = columns.apply_edges(fn.copy_u(columns.srcdata["x"][:, :1].square() + 1))
    return columns.individual_sample(fanout, slice_probs=degrees[:, 0])
