"""What a sampler is found to draw, and what is said of it before work starts."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import JoestarWarning
from joestar.staged.draws import draws_of, warn_of_fanouts
from joestar.stages import LargeBatch
from tests.runtime.staged_plans import BATCH, EDGES, plans
from tests.runtime.test_staged_weights import Hops, parts, random_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(scope="module")
def graph():
    made = random_graph()
    made.ndata["q"] = torch.rand(made.num_nodes)
    return made


def at_hop(hop, one, others):
    """A sampler whose calls at one fanout (3, then 2) are others than at the other one."""
    return lambda graph: Hops(graph, lambda graph, seeds, k: (one if k == (3, 2)[hop] else others)(graph, seeds, k))


def evenly(graph, seeds, k):
    return graph[:, seeds].individual_sample(k)


def with_values(graph, seeds, k):
    columns = graph[:, seeds]
    columns.edata["half"] = columns.edata["w"] / 2
    return columns.individual_sample(k)


def every(graph, seeds, k):
    return graph[:, seeds].individual_sample(-1, "w")


def by_weight(graph, seeds, k):
    return graph[:, seeds].individual_sample(k, "w")


def a_layer(graph, seeds, k):
    return graph[:, seeds].collective_sample(10 * k)


def among_themselves(graph, seeds, k):
    return graph[seeds, seeds].individual_sample(k)


def all_among_themselves(graph, seeds, k):
    return graph[seeds, seeds].compact()


def with_loops(graph, seeds, k):
    return graph[:, seeds].individual_sample(k).add_self_loops()


def some_kept(graph, seeds, k):
    block = graph[:, seeds].individual_sample(k)
    return block.keep_edges(block.edata["w"] > 0.5)


def by_hand(graph, seeds, k):
    """The first edge of every row."""
    rows = graph[:, seeds].compact()
    kept = torch.zeros(rows.num_edges, dtype=torch.bool)
    kept[rows.indptr[:-1][rows.indptr.diff() > 0]] = True
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])[rows.indptr]
    return joestar.Block(ends, rows.indices[kept], rows.srcs, rows.dsts, graph, eids=rows.eids[kept])


SAMPLERS = {
    "ours": (lambda graph: joestar.NeighborSampler(graph, [3, 2]), False, False),
    "ours by weight": (lambda graph: joestar.NeighborSampler(graph, [3, 2], probs="w"), True, False),
    "ours, everything": (lambda graph: joestar.NeighborSampler(graph, [-1, -1], probs="w"), False, False),
    "ours of layers": (lambda graph: joestar.LayerDependentSampler(graph, [30, 20]), False, False),
    "evenly": (lambda graph: Hops(graph, evenly), False, False),
    "evenly, with values": (at_hop(0, with_values, evenly), False, False),
    "every edge with a weight": (at_hop(1, every, evenly), True, False),
    "every edge of all hops": (lambda graph: Hops(graph, every), False, False),
    "evenly, with loops": (lambda graph: Hops(graph, with_loops), False, False),
    "evenly, some kept": (lambda graph: Hops(graph, some_kept), False, False),
    "by hand": (at_hop(1, by_hand, evenly), True, False),
    "by weight": (lambda graph: Hops(graph, by_weight), True, False),
    "by weight first": (at_hop(0, by_weight, evenly), True, False),
    "by weight behind": (at_hop(1, by_weight, evenly), True, False),
    "layers": (lambda graph: Hops(graph, a_layer), False, False),
    "layers behind": (at_hop(1, a_layer, evenly), True, True),
    "layers and weights": (at_hop(1, a_layer, by_weight), True, True),
    "some sources": (lambda graph: Hops(graph, among_themselves), True, False),
    "some sources behind": (at_hop(1, among_themselves, evenly), True, False),
    "all from some sources": (lambda graph: Hops(graph, all_among_themselves), False, False),
    "all from some sources behind": (at_hop(1, all_among_themselves, evenly), True, False),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.every(3)
def test_draws_that_would_be_others_are_repeated(graph, name, monkeypatch):
    """And what cannot be is warned of."""
    plans(monkeypatch)(edges=3 * EDGES)
    make, repeated, warned = SAMPLERS[name]
    assert draws_of(make(graph), graph.train_idx[:BATCH]).repeated == repeated
    net, optimizer = parts(graph)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = joestar.compile(
            net, make(graph), F.cross_entropy, optimizer, backend="eager", memory="1GiB", first_stage=LargeBatch(48),
            batch_size=BATCH,
        )  # fmt: skip
    assert (step.arena.graph.first_key is not None) == repeated == step.first_stage.races
    texts = [str(one.message) for one in said if one.category is JoestarWarning and "draws edges" in str(one.message)]
    assert len(texts) == warned and all("nodes in others" in text for text in texts)


AHEAD = {
    "evenly": "", "layers": "", "by weight behind": "light edges are picked more often",
    "some sources behind": "fewer of them", "all from some sources": "fewer of them",
}  # fmt: skip


@pytest.mark.parametrize("fanouts", [None, [-1, -1], [3, -1]])
@pytest.mark.parametrize("name", AHEAD)
def test_draws_from_what_partitions_picked_ahead_are_warned_of(graph, name, fanouts):
    sampler, words = SAMPLERS[name][0](graph), AHEAD[name] if fanouts == [3, -1] else ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_fanouts(sampler, draws_of(sampler, graph.train_idx[:BATCH]), fanouts)
    assert [one.category for one in said] == [JoestarWarning] * bool(words)
    assert all(words in str(one.message) for one in said)
