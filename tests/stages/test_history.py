"""Historical embeddings on the host, against a dict of what was pushed when."""

import random

import pytest
import torch
from partitioning.planted import planted

import joestar
from joestar.errors import CheckpointError, ConfigError
from joestar.stages import Partitions, history_rows
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import HistoryRows, boundary_nodes, halo_within

NODES, WIDTHS = 40, (3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_age", [None, 0, 3])
@pytest.mark.parametrize("some", [False, True])
def test_is_what_was_pushed_last_and_knows_how_long_ago(dtype, max_age, some):
    draw, values = random.Random(0), torch.Generator().manual_seed(0)
    nodes = [torch.tensor(draw.sample(range(NODES), count)) for count in (25, 15)] if some else None
    has_row = [set(range(NODES))] * 2 if nodes is None else [set(each.tolist()) for each in nodes]
    history = HistoryStore(NODES, WIDTHS, nodes, dtype=dtype, max_age=max_age)
    kept = [{}, {}]
    seen = [[], []]
    for now in range(30):
        layer = now % 2
        ids = torch.tensor(draw.sample(range(NODES), 12), dtype=draw.choice([torch.int32, torch.int64]))
        rows = torch.randn(12, WIDTHS[layer], generator=values, requires_grad=True)
        written = torch.rand(12, generator=values) < 0.7 if now % 3 else None
        told = {int(v): row for i, (v, row) in enumerate(zip(ids, rows, strict=True)) if written is None or written[i]}
        told = {v: (row.detach().to(dtype), now) for v, row in told.items() if v in has_row[layer]}
        assert history.push(layer, ids, rows, now, written) == len(told)
        kept[layer] |= told
        wanted = torch.tensor([draw.randrange(NODES) for _ in range(20)])
        got = history.pull(layer, wanted, now + 1)
        assert not got.values.requires_grad and got.values.dtype is dtype
        for i, v in enumerate(wanted.tolist()):
            row, then = kept[layer].get(v, (None, None))
            age = -1 if then is None else now + 1 - then
            usable = then is not None and (max_age is None or age <= max_age)
            seen[layer].append((age, usable))
            assert (int(got.age[i]), bool(got.usable[i])) == (age, usable)
            assert torch.equal(got.values[i], row if usable else torch.zeros(WIDTHS[layer], dtype=dtype))
    for layer in range(2):
        facts, ages = history.staleness(layer), [age for age, usable in seen[layer] if usable]
        assert (facts.rows, facts.pushed, facts.pulled) == (len(has_row[layer]), len(kept[layer]), len(seen[layer]))
        assert facts.missing == sum(age < 0 for age, _ in seen[layer])
        assert facts.too_old == len(seen[layer]) - facts.missing - len(ages)
        assert facts.mean_age == (pytest.approx(sum(ages) / len(ages)) if ages else None)
        assert facts.max_age == (max(ages) if ages else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_push_keeps_what_it_writes_over_once(dtype):
    history, nodes = HistoryStore(NODES, WIDTHS, torch.arange(0, NODES, 2), dtype=dtype), torch.tensor([7, 4, 30, 6])
    history.push(1, nodes[1:], torch.ones(3, 5), 2)
    before = history.tables[1].clone(), history.stamps[1].clone()
    replaced = history.room_for(1, nodes)
    assert not replaced.is_there
    written = torch.tensor([True, True, True, False])
    assert history.push(1, nodes, torch.full((4, 5), 2.0), 3, written, replaced) == 2
    assert replaced.is_there and replaced.stamps.tolist() == [-1, 2, 2, -1]
    assert replaced.values.tolist() == [[0.0] * 5, [1.0] * 5, [1.0] * 5, [0.0] * 5]
    history.push(1, nodes, torch.full((4, 5), 3.0), 3, written, replaced)
    assert replaced.stamps.tolist() == [-1, 2, 2, -1] and replaced.values[1].tolist() == [1.0] * 5
    assert history.pull(1, nodes, 3).values[:, 0].tolist() == [0.0, 3.0, 3.0, 1.0]
    history.put_back(1, nodes[1:3], replaced.values[1:3], replaced.stamps[1:3])
    assert torch.equal(history.tables[1], before[0]) and torch.equal(history.stamps[1], before[1])


def test_clear_and_state():
    history, other = HistoryStore(NODES, WIDTHS), HistoryStore(NODES, WIDTHS)
    history.push(1, torch.arange(4), torch.ones(4, 5), 7)
    other.load_state_dict(history.state_dict())
    got = other.pull(1, torch.tensor([3, 4]), 9)
    assert (got.values[0].tolist(), got.age.tolist(), got.usable.tolist()) == ([1.0] * 5, [2, -1], [True, False])
    assert history.stamps[1].data_ptr() != other.stamps[1].data_ptr()
    with pytest.raises(ConfigError, match="macro-batch 6 comes after 7"):
        other.pull(1, torch.tensor([3]), 6)
    other.clear()
    assert not other.pull(1, torch.arange(NODES), 0).usable.any()
    for wrong in (
        HistoryStore(NODES, (3, 6)),
        HistoryStore(NODES + 1, WIDTHS),
        HistoryStore(NODES, WIDTHS, torch.arange(9)),
    ):
        with pytest.raises(CheckpointError, match="belongs to another model, graph, partitioning or training set"):
            other.load_state_dict(wrong.state_dict())
    with pytest.raises(CheckpointError):
        other.load_state_dict({})


def test_rows_of_as_many_other_nodes_are_refused():
    """Of another training set: nothing in shapes tells."""
    nodes = [torch.arange(4), torch.arange(3)]
    history, state = HistoryStore(NODES, WIDTHS, nodes), HistoryStore(NODES, WIDTHS, nodes).state_dict()
    history.load_state_dict(state)
    for others in ([torch.arange(1, 5), nodes[1]], [nodes[0], torch.tensor([0, 1, 3])], [nodes[0].flip(0), nodes[1]]):
        with pytest.raises(CheckpointError, match="of other nodes: it belongs to another graph, partitioning or train"):
            HistoryStore(NODES, WIDTHS, others).load_state_dict(state)
    every = HistoryStore(NODES, WIDTHS, torch.arange(NODES))
    every.load_state_dict(HistoryStore(NODES, WIDTHS).state_dict())
    before = {name: value for name, value in every.state_dict().items() if name != "rows"}  # of an older version
    every.load_state_dict(before)


def test_memory_is_made_as_asked():
    made = []
    history = HistoryStore(NODES, WIDTHS, empty=lambda *args, **kw: made.append(torch.empty(*args, **kw)) or made[-1])
    kept = [*history.tables, *history.stamps]  # what several processes may share
    assert [table.data_ptr() for table in kept] == [table.data_ptr() for table in made]
    assert history.nbytes == sum(WIDTHS) * NODES * 4 + 3 * NODES * 4


def test_layers_of_the_same_nodes_share_what_says_where_rows_are():
    one, two = (HistoryRows(NODES, 2, nodes) for nodes in (torch.arange(9), [torch.arange(9), torch.arange(8)]))
    assert one.nbytes == 4 * NODES and two.nbytes == 8 * NODES and one.digests[0] == two.digests[0] != two.digests[1]


def test_a_table_without_rows_has_nothing():
    history = HistoryStore(NODES, WIDTHS, torch.empty(0, dtype=torch.int64))
    assert history.push(0, torch.tensor([1, 2]), torch.ones(2, 3), 0) == 0
    got = history.pull(0, torch.tensor([1, 2, 1]), 1)
    assert got.values.shape == (3, 3) and not got.usable.any() and not got.values.any()
    assert history.staleness(0).pushed == 0 and history.num_rows == [0, 0]


def test_the_halo_lies_on_the_boundary():
    graph = planted(600, 30, 4)
    parts = joestar.partition(graph, 12, passes=3)
    src, dst = graph.coo()[:2]
    out = parts.assignment[src.long()] != parts.assignment[dst.long()]
    boundary = boundary_nodes(graph, parts.assignment)
    assert boundary.tolist() == sorted(set(src[out].tolist()))
    stage = Partitions(parts, 4).prepare(graph)
    for index in range(3):
        macro = stage.sample((0, 0, index))
        assert torch.isin(macro.ids[macro.halo], boundary).all()
    history = HistoryStore(600, (4,), boundary)
    assert history.num_rows == [len(boundary)] and len(boundary) < 600


@pytest.mark.parametrize("edges_at_once", [1, 97, 1 << 25])
def test_how_far_halo_nodes_lie_from_the_seeds(monkeypatch, edges_at_once):
    """Against sets, from any seeds; within many hops it is the boundary of what they reach."""
    monkeypatch.setattr(history_rows, "EDGES_AT_ONCE", edges_at_once)
    graph, draw = planted(200, 15, 4), random.Random(0)
    part = torch.tensor([draw.randrange(6) for _ in range(200)])
    edges = list(zip(*(ids.tolist() for ids in graph.coo()[:2]), strict=True))
    for count in (1, 5, 200):
        seeds = torch.tensor(draw.sample(range(200), count))
        reached, marked, found = set(seeds.tolist()), set(), halo_within(graph, part, seeds, 4)
        for nodes in found:
            marked |= {u for u, v in edges if v in reached and part[u] != part[v]}
            reached |= {u for u, v in edges if v in reached}
            assert nodes.tolist() == sorted(marked) and nodes.dtype == graph.indices.dtype
        assert set(found[-1].tolist()) <= set(boundary_nodes(graph, part).tolist())
    assert torch.equal(found[0], boundary_nodes(graph, part))


WRONG = [
    (lambda: HistoryStore(NODES, ()), "positive width"),
    (lambda: HistoryStore(NODES, (4, 0)), "positive width"),
    (lambda: HistoryStore(NODES, (4,), dtype=torch.float16), "float32 or bfloat16"),
    (lambda: HistoryStore(NODES, (4,), max_age=-1), "max_age"),
    (lambda: HistoryStore(NODES, (4,), torch.tensor([1, 1])), "stands twice among"),
    (lambda: HistoryStore(NODES, (4,), torch.tensor([NODES])), "below 40"),
    (lambda: HistoryStore(NODES, (4, 4), [torch.tensor([1])]), "for 2 layers, got 1"),
    (lambda: HistoryStore(NODES, (4,)).pull(0, torch.tensor([-1]), 0), "below 40"),
    (lambda: HistoryStore(NODES, (4,)).pull(1, torch.tensor([1]), 0), "layer from 0 to 0, got 1"),
    (lambda: HistoryStore(NODES, (4,)).push(0, torch.tensor([1, 1]), torch.zeros(2, 4), 0), "node 1 stands twice"),
    (lambda: HistoryStore(NODES, (4,)).push(0, torch.tensor([1]), torch.zeros(1, 5), 0), r"\[1, 4\] .* got .*\[1, 5\]"),
    (lambda: HistoryStore(NODES, (4,)).push(0, torch.tensor([1]), torch.zeros(1, 4), 0, torch.ones(2) > 0), "written"),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_use(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
