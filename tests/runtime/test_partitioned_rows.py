"""Which nodes have rows in the tables of hidden layers: those that steps can read, and all of them."""

import pytest
import torch

import joestar
from joestar.errors import CheckpointError, ConfigError
from joestar.graph_api import Block
from joestar.staged import partition_planning
from joestar.staged.hidden_reach import takes_one_hop
from joestar.staged.partition_planning import PartitionPlanner
from joestar.stages.history_rows import boundary_nodes
from tests.runtime.partitioned import NODES, PARTS, compiled, drawn_graph, model_of, replayed, run, stage_of

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(scope="module")
def graph():
    made = drawn_graph()
    made.train_idx = torch.tensor([2, 11, 30, 47, 80])
    return made


@pytest.fixture(scope="module")
def parts(graph):
    return joestar.partition(graph, PARTS, passes=2)


def nodes_of(store, layer):
    return torch.nonzero(store.has_row(layer, torch.arange(NODES))).flatten().tolist()


def within(graph, parts, seeds):
    """Halo nodes that one hop from the seeds finds, and that two do."""
    part, edges = parts.assignment.tolist(), list(zip(*(ids.tolist() for ids in graph.coo()[:2]), strict=True))
    near = {u for u, v in edges if v in seeds}
    found = [{u for u, v in edges if v in some and part[u] != part[v]} for some in (seeds, seeds | near)]
    return [sorted(nodes) for nodes in found]


@pytest.mark.parametrize("one_hop", [True, False])
@pytest.mark.parametrize("hubs", [0, 4])
def test_layers_have_rows_of_what_steps_read(graph, parts, monkeypatch, one_hop, hubs):
    """Training is that of plain PyTorch, which remembers all rows; also with all rows of the boundary."""
    if not one_hop:
        monkeypatch.setattr(partition_planning, "takes_one_hop", lambda *given: False)
    ours, theirs = model_of(), model_of()
    step, losses, taken = compiled(graph, stage_of(parts, hubs=hubs), ours), [], []
    run(step, graph, 6, losses, taken)
    pinned = step.stage.hubs.tolist()
    expected, _ = replayed(graph, parts, theirs, taken, hubs=pinned)
    assert losses == pytest.approx(expected, rel=1e-6) and sum(map(len, taken)) > 6
    near, far = within(graph, parts, set(graph.train_idx.tolist()))
    wanted = (far, near) if one_hop else [boundary_nodes(graph, parts.assignment).tolist()] * 2
    store = step.exchange.store
    assert [nodes_of(store, layer) for layer in range(2)] == [
        [node for node in nodes if node not in pinned] for nodes in wanted
    ]
    record = step.report().feeding.history
    assert [row.rows for row in record] == store.num_rows and all(row.pulled > row.missing for row in record)
    if one_hop:
        assert 0 < store.num_rows[1] < store.num_rows[0]
        assert record[1].pulled < record[0].pulled


def test_seeds_whose_neighbours_have_no_row_are_refused(graph, parts):
    """Before a step is taken; those that training nodes lead to as well, and fewer of them, are trained on."""
    step = compiled(graph, stage_of(parts))
    list(step.epoch(graph.train_idx[:3], 2))
    taken = step.state_dict()["epochs"]
    with pytest.raises(ConfigError, match=r"85 seeds of this epoch, \d+ among them, are no training nodes, and .*"
                       r" in layer 0, \d+ among them.* into graph.train_idx before joestar.compile"):  # fmt: skip
        step.epoch(torch.arange(NODES)[~torch.isin(torch.arange(NODES), graph.train_idx[:1])], 2)
    assert step.state_dict()["epochs"] == taken
    alone = torch.arange(NODES - 5, NODES)  # without in-edges
    assert len(list(step.epoch(alone, 2))) > 0
    alone[0] = next(v for v in range(NODES - 5) if v not in graph.train_idx)
    with pytest.raises(ConfigError, match="5 seeds of this epoch, 0 among them"):  # in a tensor that was fine before
        step.epoch(alone, 2)


def test_the_same_seeds_are_looked_at_once(graph, parts, monkeypatch):
    """Epochs over them do not sweep the graph again, whatever tensor they are in."""
    step, looks = compiled(graph, stage_of(parts)), []
    alone, nodes = torch.arange(NODES - 5, NODES), step.reach.nodes
    monkeypatch.setattr(step.reach, "nodes", lambda seeds: looks.append(seeds.numel()) or nodes(seeds))
    for seeds in (alone, alone, alone.clone(), graph.train_idx, alone.int()):
        assert len(list(step.epoch(seeds, 2))) > 0
    assert looks == [5, 5]


def test_hosts_hold_as_many_bytes_of_hidden_rows_not_as_many_rows(graph, parts):
    """A layer is as wide as the others together."""
    step = compiled(graph, stage_of(parts))
    planner = PartitionPlanner.__new__(PartitionPlanner)
    planner.stage, planner.nodes, planner.widths = step.stage, [torch.arange(NODES), torch.tensor([0])], [1, 1000]
    hosts, parts_of_hosts = planner._hosts(2), step.stage.stage.partitioning.assignment
    apart = [set(parts_of_hosts[hosts == host].tolist()) for host in range(2)]
    assert {int(parts_of_hosts[0])} in apart and len(apart[0] | apart[1]) == PARTS


def test_a_state_of_another_training_set_is_refused(graph, parts):
    """Of as many nodes, from an epoch that is over; nothing is taken over."""
    step = compiled(graph, stage_of(parts))
    list(step.epoch(graph.train_idx, 5))
    other = drawn_graph()
    other.train_idx = torch.tensor([3, 12, 31, 48, 81])
    there = compiled(other, stage_of(parts))
    before = [table.clone() for table in there.exchange.store.tables]
    with pytest.raises(CheckpointError, match="training set"):
        there.load_state_dict(step.state_dict())
    assert all(map(torch.equal, before, there.exchange.store.tables))


class Given:
    """A sampler that makes its blocks by a function."""

    def __init__(self, graph, make):
        self.graph, self.make = graph, make

    def sample(self, graph, seeds):
        return self.make(graph, seeds)


def hops(graph, seeds, change=lambda block: block):
    found = []
    for _ in range(2):
        found.insert(0, change(graph[:, seeds].individual_sample(3)))
        seeds = found[0].srcs
    return found


def walked(graph, seeds):
    """Blocks whose sources are two hops away."""
    first, second = hops(graph, seeds)
    owner = torch.repeat_interleave(torch.arange(second.num_dst), second.indptr.diff())
    at = {int(node): row for row, node in reversed(list(enumerate(second.srcs)))}
    rows, ends = [], [0]
    for row in range(second.num_dst):
        middle = [int(second.srcs[i]) for i in second.indices[owner == row]]
        for node in middle:
            there = at[node]
            rows += first.srcs[first.indices[first.indptr[there] : first.indptr[there + 1]].long()].tolist()
        ends.append(len(rows))
    srcs = list(dict.fromkeys([*second.dsts.tolist(), *rows]))
    places = {node: place for place, node in reversed(list(enumerate(srcs)))}
    srcs = torch.tensor(srcs, dtype=second.dsts.dtype)
    indices = torch.tensor([places[node] for node in rows], dtype=torch.int32)
    return [graph[:, srcs].individual_sample(2), Block(torch.tensor(ends), indices, srcs, second.dsts, graph)]


def all_the_same(graph, seeds):
    """The nodes of two hops in every layer."""
    nodes = hops(graph, seeds)[0].srcs
    inner = graph[nodes, nodes].compact()
    return [inner, inner]


SAMPLERS = {
    "neighbours": (lambda graph: joestar.NeighborSampler(graph, [3, 2]), True),
    "weighted": (lambda graph: joestar.NeighborSampler(graph, [3, 2], probs="w"), True),
    "layers": (lambda graph: joestar.LayerDependentSampler(graph, [20, 10]), True),
    "own": (lambda graph: Given(graph, hops), True),
    "self-loops": (lambda graph: Given(graph, lambda g, s: hops(g, s, lambda block: block.add_self_loops())), True),
    "walks": (lambda graph: Given(graph, walked), False),
    "a subgraph": (lambda graph: Given(graph, all_the_same), False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_which_samplers_take_one_hop(name):
    make, expected = SAMPLERS[name]
    graph = drawn_graph()
    graph.edata["w"] = torch.rand(graph.num_edges)
    assert takes_one_hop(graph, make(graph), torch.randperm(NODES), 7, 0) is expected


def test_a_walk_whose_ends_are_neighbours_of_other_seeds_is_none():
    """Where nearly every node is the neighbour of some seed, only edges tell."""
    generator = torch.Generator().manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, 30 * NODES), generator=generator), NODES)
    every = torch.randperm(NODES, generator=generator)
    assert takes_one_hop(graph, Given(graph, hops), every, NODES, 0)
    assert not takes_one_hop(graph, Given(graph, walked), every, NODES, 0)
