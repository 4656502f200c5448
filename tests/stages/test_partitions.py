"""The partition-based first stage, against sets and loops."""

import threading

import numpy as np
import pytest
import torch
from partitioning.planted import planted

import joestar
from joestar import _native
from joestar.errors import ConfigError, DataError, SamplerError
from joestar.graph_api import Graph
from joestar.sampling import NeighborSampler
from joestar.stages import Partitions, check_macro_batch
from joestar.stages.hubs import hub_nodes, influence, row_pieces
from joestar.stages.partition_order import partition_order
from stages.part_reference import ahead_of_time, chosen_rows, local_batch

PARTS, GROUP = 12, 5


@pytest.fixture(scope="module")
def graph():
    return planted(600, 30, 4)


@pytest.fixture(scope="module")
def parts(graph):
    return joestar.partition(graph, PARTS, passes=3)


def stage_of(graph, parts, **settings):
    return Partitions(parts, GROUP, **settings).prepare(graph)


def edges_of(macro):
    """Every edge as (source, destination), in the order of rows, by global ids."""
    dst = macro.ids[: macro.num_rows].repeat_interleave(macro.indptr.diff())
    return list(zip(macro.ids[macro.indices.long()].tolist(), dst.tolist(), strict=True))


def in_edges(graph, node):
    return graph.indices[int(graph.indptr[node]) : int(graph.indptr[node + 1])].tolist()


def expected_edges(graph, assignment, group, hubs=()):
    """By rows ascending: all in-edges of the parts' nodes; of hubs those from rows."""
    members = {v for v in range(graph.num_nodes) if int(assignment[v]) in group}
    inside = members | set(hubs)
    rows = sorted(inside)
    return rows, [(u, v) for v in rows for u in in_edges(graph, v) if v in members or u in inside]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("hubs", [(), (3, 77, 78, 500)])
def test_has_all_in_edges_of_its_parts_and_marks_the_halo(graph, parts, hubs, dtype):
    other = Graph.from_csc(graph.indptr, graph.indices.to(dtype), dict(graph.ndata))
    other.train_idx = graph.train_idx
    stage = stage_of(other, parts, hubs=torch.tensor(hubs, dtype=torch.int64))
    for index, group in enumerate(stage.groups(1, 2)):
        macro = check_macro_batch(stage.sample((1, 2, index)), other)
        rows, edges = expected_edges(other, parts.assignment, group.tolist(), hubs)
        assert macro.ids.dtype is dtype
        assert macro.ids[: macro.num_rows].tolist() == rows
        assert edges_of(macro) == edges
        assert set(macro.ids.tolist()) == set(rows) | {u for u, _ in edges}
        assert macro.halo.tolist() == [local >= len(rows) for local in range(macro.num_nodes)]
        train = set(other.train_idx[torch.isin(parts.assignment[other.train_idx], group.int())].tolist())
        seeds = macro.ids[macro.seeds.long()].tolist()
        assert set(seeds) == train and len(seeds) == len(train) and seeds != sorted(seeds)
        assert macro.parts.tolist() == group.tolist()
        assert torch.equal(stage.seeds(1, 2)[index].long(), macro.ids[macro.seeds.long()].long())


def test_an_epoch_visits_every_part_once_and_epochs_differ(graph, parts):
    stage = stage_of(graph, parts)
    epochs = [stage.groups(0, epoch) for epoch in range(3)]
    for groups in epochs:
        assert [len(group) for group in groups] == [5, 5, 2]
        assert sorted(torch.cat(groups).tolist()) == list(range(PARTS))
        assert all(group.tolist() == sorted(group.tolist()) for group in groups)
    assert len({str(groups) for groups in epochs}) == 3
    assert str(stage.groups(0, 1)) == str(epochs[1]) != str(stage.groups(1, 1))
    assert sorted(torch.cat(stage.seeds(5, 6)).tolist()) == sorted(graph.train_idx.tolist())


def test_parts_without_training_nodes_make_no_macro_batch(graph, parts):
    lone = Graph.from_csc(graph.indptr, graph.indices)
    lone.train_idx = torch.nonzero(parts.assignment == 3).flatten()
    stage = stage_of(lone, parts)
    assert len(stage.groups(0, 0)) == 1 and 3 in stage.groups(0, 0)[0]
    with pytest.raises(SamplerError, match="expected one of 0 to 0"):
        stage.sample((0, 0, 1))


def test_depends_on_the_key_alone(graph, parts):
    settings = {"hubs": 6, "halo_fanout": 2, "ahead": [3, 2]}
    stage, again = stage_of(graph, parts, **settings), stage_of(graph, parts, **settings)
    expected = [again.sample((4, 1, index)) for index in range(3)]
    found = {}
    workers = [threading.Thread(target=lambda i=i: found.update({i: stage.sample((4, 1, i))})) for i in (2, 0, 1)]
    [worker.start() for worker in workers], [worker.join() for worker in workers]
    for index, macro in enumerate(expected):
        for name in ("seeds", "ids", "indptr", "indices", "halo"):
            assert torch.equal(getattr(macro, name), getattr(found[index], name))
    assert not torch.equal(stage.sample((4, 2, 0)).ids, expected[0].ids)


def test_a_mini_batch_is_that_of_the_whole_graph_where_its_neighbourhood_is_there(graph, parts):
    macro = stage_of(graph, parts).sample((0, 0, 0))
    inner = Graph(torch.cat([macro.indptr, macro.indptr[-1:].expand(macro.num_nodes - macro.num_rows)]), macro.indices)
    seeds = macro.seeds[:20]
    ours = NeighborSampler(inner, [-1]).sample(inner, seeds)[0]
    theirs = NeighborSampler(graph, [-1]).sample(graph, macro.ids[seeds.long()])[0]
    assert torch.equal(macro.ids[ours.srcs.long()], theirs.srcs) and torch.equal(ours.indices, theirs.indices)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_halo_edges_are_sampled_down(graph, parts, most):
    full, less = (stage_of(graph, parts, halo_fanout=k).sample((0, 0, 1)) for k in (None, most))
    assert torch.equal(full.ids[: full.num_rows], less.ids[: less.num_rows])
    members = set(full.ids[: full.num_rows].tolist())
    for row in range(full.num_rows):
        all_edges, kept = (
            macro.ids[macro.indices[int(macro.indptr[row]) : int(macro.indptr[row + 1])].long()].tolist()
            for macro in (full, less)
        )
        assert [u for u in kept if u in members] == [u for u in all_edges if u in members]
        outside, some = ([u for u in edges if u not in members] for edges in (all_edges, kept))
        assert len(some) == min(most, len(outside))
        walk = iter(outside)
        assert all(u in walk for u in some), "some of them, in their order"
    assert (less.num_nodes == less.num_rows) == (most == 0)


SETTINGS = [
    {}, {"hubs": 9}, {"halo_fanout": 0}, {"halo_fanout": 2, "hubs": 9}, {"ahead": 2, "hubs": 9, "halo_fanout": 1},
    {"ahead": [3, 2, 2]}, {"ahead": [2, -1], "hubs": 9}, {"ahead": [-1, 2, 1]}, {"ahead": [1, 70, 2], "halo_fanout": 3},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_kernel_gives_what_the_reference_gives(graph, parts, settings):
    few = Graph.from_csc(graph.indptr, graph.indices)
    few.train_idx = graph.train_idx[:30]
    stage = stage_of(few, parts, **settings)
    for index, group in enumerate(stage.groups(3, 1)):
        key = (3, 1, index)
        members = torch.nonzero(torch.isin(parts.assignment, group.int())).flatten().int()
        rows = chosen_rows(few, members, stage.hubs, stage.stage.halo_fanout, key, torch.full((600,), -1).int())
        seeds = torch.searchsorted(rows.nodes[: rows.num_rows], stage.seeds(3, 1)[index])
        whole = stage.sample(key, ahead=False)
        assert torch.equal(whole.ids, rows.nodes) and torch.equal(whole.indices, rows.indices.int())
        if stage.stage.fanouts is not None:
            rows, seeds = ahead_of_time(rows, seeds, stage.stage.fanouts, key)
        macro = check_macro_batch(stage.sample(key), few)
        for name, expected in zip(("seeds", "ids", "indptr", "indices"), local_batch(rows, seeds), strict=True):
            assert torch.equal(getattr(macro, name), expected), name
        assert torch.equal(macro.halo, rows.halo)


def test_any_number_of_threads_gives_the_same(graph, parts):
    stage = stage_of(graph, parts, hubs=9, halo_fanout=2, ahead=[3, -1])
    before, found = _native.num_threads(), []
    try:
        for threads in (1, 5):
            _native.set_num_threads(threads)
            found.append(stage.sample((0, 0, 0)))
    finally:
        _native.set_num_threads(before)
    assert all(torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in ("ids", "indptr", "indices"))


def reached(graph, macro, hops):
    """(nodes within ``hops`` of the seeds, those within ``hops - 1`` that have rows) by global ids."""
    rows = set(macro.ids[: macro.num_rows].tolist())
    of = {}
    for u, v in edges_of(macro):
        of.setdefault(v, []).append(u)
    seen, expanded = set(macro.ids[macro.seeds.long()].tolist()), set()
    for _ in range(hops):
        expanded |= seen & rows
        seen |= {u for v in expanded for u in of.get(v, [])}
    return seen, expanded


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_ahead_of_time_keeps_what_the_hops_reach(graph, parts, hops):
    few = Graph.from_csc(graph.indptr, graph.indices)
    few.train_idx = graph.train_idx[:12]
    full, less = (stage_of(few, parts, hubs=5, ahead=ahead).sample((0, 0, 0)) for ahead in (None, hops))
    seen, expanded = reached(few, full, hops)
    check_macro_batch(less, few)
    assert set(less.ids.tolist()) == seen and set(less.ids[: less.num_rows].tolist()) == expanded
    assert edges_of(less) == [(u, v) for u, v in edges_of(full) if v in expanded]
    assert torch.equal(less.ids[less.seeds.long()], full.ids[full.seeds.long()])
    halo = set(full.ids[full.halo].tolist())
    assert set(less.ids[less.halo].tolist()) == seen & halo
    assert less.sizes.nbytes(512) < full.sizes.nbytes(512)


def test_ahead_of_time_with_fanouts_keeps_what_is_picked(graph, parts):
    full, less = (stage_of(graph, parts, ahead=ahead).sample((0, 0, 0)) for ahead in (None, [3, 2]))
    check_macro_batch(less, graph)
    degrees = {int(v): int(d) for v, d in zip(full.ids, full.indptr.diff(), strict=False)}
    seeds = set(less.ids[less.seeds.long()].tolist())
    for node, degree in zip(less.ids.tolist(), less.indptr.diff().tolist(), strict=False):
        low, high = (3, 5) if node in seeds else (2, 2)
        assert min(low, degrees[node]) <= degree <= min(high, degrees[node])
    everything = set(edges_of(full))
    assert set(edges_of(less)) < everything
    assert less.sizes.edges < 0.7 * full.sizes.edges


def test_bytes_are_those_of_the_tensors(graph, parts):
    macro = stage_of(graph, parts).sample((0, 0, 0))
    structure = macro.indptr.nbytes + macro.indices.nbytes + 8 * macro.num_nodes
    assert macro.sizes.nbytes() == structure
    assert macro.sizes.nbytes(100, 7) == structure + 100 * macro.num_nodes + 7 * int(macro.halo.sum())


def plain_influence(graph, train, steps):
    mass = [0.0] * graph.num_nodes
    for v in train.tolist():
        mass[v] += 1.0
    for _ in range(steps):
        after = [0.0] * graph.num_nodes
        for v, m in enumerate(mass):
            sources = in_edges(graph, v)
            after[v] += m if not sources else m / 2
            for u in sources:
                after[u] += m / 2 / len(sources)
        mass = after
    return torch.tensor(mass, dtype=torch.float64)


def test_hubs_are_where_lazy_walks_land(graph, monkeypatch):
    directed = Graph.from_csc(graph.indptr, graph.indices).keep_edges(torch.arange(graph.num_edges) % 5 != 0)
    train = graph.train_idx[:40]
    expected = plain_influence(directed, train, 3)
    monkeypatch.setattr("joestar.stages.hubs.EDGES_AT_ONCE", 100)
    mass = influence(directed, train, 3)
    assert torch.allclose(mass, expected) and mass.sum().item() == pytest.approx(40)
    hubs = hub_nodes(directed, 25, 3, train)
    assert set(hubs.tolist()) == set(torch.argsort(expected, descending=True, stable=True)[:25].tolist())
    assert hubs.tolist() == sorted(hubs.tolist())
    assert hub_nodes(directed, 10_000, 0, train).tolist() == sorted(train.tolist())


def test_hubs_of_a_star_begin_with_its_middle():
    star = Graph.from_edge_index(torch.tensor([[0] * 9, list(range(1, 10))]), 10)
    star.train_idx = torch.arange(1, 10)
    assert hub_nodes(star, 1, 2).tolist() == [0]


def test_pinned_hubs_are_in_every_macro_batch(graph, parts):
    stage = stage_of(graph, parts, hubs=7, hub_steps=2)
    assert torch.equal(stage.hubs, hub_nodes(graph, 7, 2))
    for index in range(3):
        macro = stage.sample((0, 0, index))
        at = torch.isin(macro.ids, stage.hubs)
        assert int(at.sum()) == 7 and not macro.halo[at].any()


def test_pieces_of_rows_cover_all():
    indptr = torch.tensor([0, 0, 5, 5, 30, 31, 32, 32])
    for edges in (1, 5, 7, 100):
        pieces = row_pieces(indptr, edges)
        assert [a for a, _ in pieces] == [0, *(b for _, b in pieces[:-1])] and pieces[-1][1] == 7
        assert all(int(indptr[b] - indptr[a]) <= edges or b == a + 1 for a, b in pieces)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"group": 0}, "group must be a whole number, at least 1; got 0"),
        ({"group": 13}, "group=13 parts of 12"),
        ({"group": 2, "halo_fanout": -1}, "halo_fanout must be a whole number, at least 0"),
        ({"group": 2, "ahead": 0}, "ahead must be a number of hops, or a list of fanouts"),
        ({"group": 2, "ahead": [5, 0]}, "got [5, 0]"),
        ({"group": 2, "ahead": True}, "got True"),
    ],
)
def test_wrong_settings(parts, settings, says):
    with pytest.raises(ConfigError) as caught:
        Partitions(parts, **settings)
    assert says in str(caught.value)


def test_wrong_graphs_and_nodes(graph, parts):
    with pytest.raises(DataError, match="made for another graph"):
        Partitions(parts, 2).prepare(planted(300, 30))
    bare = Graph.from_csc(graph.indptr, graph.indices)
    with pytest.raises(SamplerError, match="no training nodes"):
        Partitions(parts, 2).prepare(bare)
    with pytest.raises(SamplerError, match="stands twice"):
        Partitions(parts, 2).prepare(bare, torch.tensor([1, 2, 1]))
    with pytest.raises(SamplerError, match="600"):
        Partitions(parts, 2).prepare(bare, torch.tensor([600]))
    with pytest.raises(SamplerError, match="hubs"):
        Partitions(parts, 2, hubs=torch.tensor([-1])).prepare(graph)
    with pytest.raises(ConfigError, match="count must be"):
        Partitions(parts, 2, hubs=-3).prepare(graph)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (torch.arange(600) == 10, "is a mask"), (np.arange(600) == 10, "is a mask"), (torch.tensor([10.7]), "node ids"),
        ([10.7], "node ids"), (10.7, "got float"), (torch.tensor(3), r"node ids \[n\]"), ([[3, 4]], r"node ids \[n\]"),
        ({3, 4}, "is a set"), ("3", "got str"),
    ],
)  # fmt: skip
def test_hubs_and_training_nodes_are_ids(graph, parts, nodes, says):
    with pytest.raises(SamplerError, match=says):
        Partitions(parts, 2, hubs=nodes).prepare(graph)
    with pytest.raises(SamplerError, match=says):
        Partitions(parts, 2).prepare(graph, nodes)
    if "[n]" not in says.replace("\\", ""):
        with pytest.raises(ConfigError, match=says):
            hub_nodes(graph, 3, 2, nodes)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int16)])
def test_hubs_and_training_nodes_of_any_integers(graph, parts, kind):
    stage = Partitions(parts, 2, hubs=kind([30, 10])).prepare(graph, kind([7, 3, 5]))
    assert stage.hubs.tolist() == [10, 30] and int(stage.train_of_part.sum()) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_drop_last_a_group_with_fewer_seeds_than_a_batch_is_a_step(graph, parts, ranks):
    """What larger groups have left out stays so, however ranks change."""
    stage = stage_of(graph, parts)
    seeds = graph.train_idx.unique()
    batch = seeds.numel()
    order = partition_order(stage, seeds, batch, (1, 0), True, ranks)
    found = order.seeds[order.seeds >= 0]
    assert sorted(found.tolist()) == seeds.tolist() and order.steps == len(order.groups)
    whole = partition_order(stage, seeds, 4, (1, 0), True, ranks)
    again = partition_order(stage, seeds, 4, (1, 0), True, ranks, [(0, ranks, 4)], whole.steps)
    assert again.steps == whole.steps, "nothing is left"


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_fanouts_ahead_are_any_list_of_numbers(parts, kind):
    assert Partitions(parts, 2, ahead=kind([3, -1])).fanouts == [3, -1]
    with pytest.raises(ConfigError, match="ahead must be a number of hops"):
        Partitions(parts, 2, ahead=kind([3.5, 2.0]))
