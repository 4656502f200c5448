"""Match-Reorder: batches in another order, rows of the one before kept, everything else as ever."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.match import (
    WINDOW,
    Matched,
    MatchedEpoch,
    RowBuffer,
    Slots,
    Windows,
    greedy_order,
    match_degrees,
    needed_rows,
)
from joestar.bench.planted import planted
from joestar.graph_api import Graph
from joestar.runtime.seeds import shuffled
from joestar.store import pin

pytestmark = pytest.mark.usefixtures("cheapest_captures")

BATCH, FANOUTS = 16, [4, 3]


def _some(number: int, seed: int, of: int = 300) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(of, generator=random)[:number].sort().values.int()


def test_degrees_are_shares_of_the_smaller_batch():
    batches = [_some(40 + 7 * i, i) for i in range(6)] + [torch.empty(0, dtype=torch.int64)]
    marks = torch.zeros(300, dtype=torch.int32)
    found = match_degrees(batches, marks)
    sets = [set(ids.tolist()) for ids in batches]
    for i, a in enumerate(sets):
        for j, b in enumerate(sets):
            expected = len(a & b) / max(1, min(len(a), len(b))) if i != j else 0
            assert found[i, j] == pytest.approx(expected, abs=1e-15)
    assert not marks.any()


def test_the_order_is_greedy():
    degrees = torch.tensor([[0, 0.2, 0.9, 0.1], [0.2, 0, 0.3, 0.8], [0.9, 0.3, 0, 0.3], [0.1, 0.8, 0.3, 0]])
    assert greedy_order(degrees) == [0, 2, 1, 3], "of equals the first"
    assert greedy_order(degrees, 3) == [3, 1, 2, 0]
    assert greedy_order(torch.zeros(1, 1)) == [0]


@pytest.mark.parametrize("room", [120, 70, 5, 0])
def test_slots_of_the_batch_before_are_not_touched(room):
    """Against sets: what is there stays, what is not is missing, and the slots in use are never given away."""
    slots, held, latest = Slots(10, room, torch.device("cpu")), {}, {}
    for position in range(12):
        ids = _some(30 + position, position, 150)
        change, wanted = slots.take(position, ids), set(ids.tolist())
        loaded = dict(zip(change.ids.tolist(), change.slots.tolist(), strict=True))
        new = wanted - latest.keys()
        assert (change.position, change.needed, change.missing) == (position, len(wanted), len(new))
        assert change.ids.tolist() == sorted(loaded) and set(loaded) <= new
        assert len(loaded) == min(len(new), room - len(latest)), "as many as there is room for"
        assert not set(loaded.values()) & set(latest.values()), "steps still read those"
        assert all(10 <= slot < 10 + room for slot in loaded.values())
        for node in change.gone.tolist():
            assert node not in latest
            del held[node]
        held |= loaded
        assert len(set(held.values())) == len(held), "no slot holds two rows"
        latest = {node: held[node] for node in wanted if node in held}


# --- whole epochs ---


@pytest.fixture(scope="module")
def graph():
    return planted("tiny")


def _buffered(graph, room: int, hot: int):
    """The graph whose rows come through a buffer; with rows of NaN where a step would read the host's."""
    near = Graph.from_csc(graph.indptr, graph.indices, validate=False)
    near.ndata["y"], near.num_classes = graph.ndata["y"], graph.num_classes
    buffer = RowBuffer(pin(graph.ndata["x"], "cpu"), torch.arange(hot), room)
    near.ndata["x"] = buffer
    return near, buffer


def _step(graph, learning_rate: float = 0.01):
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, 2, graph.num_classes, dropout=0.3)
    sampler = joestar.NeighborSampler(graph, FANOUTS, seed=3)
    optimizer = torch.optim.SGD(net.parameters(), learning_rate)
    return joestar.compile(net, sampler, F.cross_entropy, optimizer, backend="eager", execution="exact")


@pytest.fixture(scope="module")
def steps(graph):
    """Steps that learn nothing, so that a loss tells which batch it is of: resident, and through a buffer."""
    near, buffer = _buffered(graph, 900, 25)
    return _step(graph, 0.0), _step(near, 0.0), buffer


@pytest.mark.parametrize("reorder", [False, True])
def test_every_batch_is_trained_once_on_its_own_rows(graph, steps, reorder):
    plain, matched, buffer = steps
    seeds = graph.train_idx
    plain.restart(), matched.restart()
    for number in range(2):
        expected = torch.stack(list(plain.epoch(seeds, BATCH)))
        epoch = MatchedEpoch(matched, seeds, BATCH, buffer, reorder)
        found = torch.stack(list(epoch))
        epoch.close()
        order = epoch.seen.order
        assert sorted(order) == list(range(-(-seeds.numel() // BATCH))) and len(order) > WINDOW
        assert (order == sorted(order)) == (not reorder)
        assert expected.unique().numel() == len(order)
        assert torch.allclose(found, expected[order], rtol=1e-6), (
            "batches have the samples, rows and masks of any other order"
        )
        assert matched.epochs_done == number + 1
        slots = buffer.slot_of.long()
        there = torch.nonzero(slots >= 0).flatten()
        assert torch.equal(buffer.cache[slots[there]], graph.ndata["x"][there]), "what seems to be there is there"
        assert (slots[:25] == torch.arange(25)).all(), "hot rows stay"


def test_nothing_is_read_from_the_host_when_there_is_room(graph):
    """The host's rows are NaN once the buffer has been loaded from the true ones."""
    near, buffer = _buffered(graph, 900, 1)
    true, poisoned = buffer.table, torch.full_like(buffer.table, torch.nan)
    buffer.table = poisoned
    near.ndata["x"] = buffer
    buffer.load = lambda ids, slots: (
        buffer.cache.index_copy_(0, slots.long(), true[ids.long()]), buffer.slot_of.index_copy_(0, ids.long(), slots)
    )  # fmt: skip
    losses = list(MatchedEpoch(_step(near), graph.train_idx, BATCH, buffer, True))
    assert torch.isfinite(torch.stack(losses)).all()


def test_without_room_rows_are_read_where_they_are(graph):
    near, buffer = _buffered(graph, 40, 0)
    plain, matched = _step(graph), _step(near)
    expected, found = plain.epoch(graph.train_idx, BATCH), MatchedEpoch(matched, graph.train_idx, BATCH, buffer, False)
    assert torch.allclose(torch.stack(list(found)), torch.stack(list(expected)), rtol=1e-5)
    assert found.seen.missing > 0.9 * found.seen.needed


@pytest.mark.parametrize("hot", [0, 200])
def test_rows_are_counted(graph, hot):
    """Against sets of nodes, in the order in which batches were taken."""
    near, buffer = _buffered(graph, 900, hot)
    seeds, number = graph.train_idx[:320], 20
    order = shuffled(seeds, 3, 0)
    sampler = joestar.NeighborSampler(near, FANOUTS, seed=3)
    needs = [set(needed_rows(sampler, near, order, BATCH, (3, 0), i).tolist()) for i in range(number)]
    assert needs[5] == set(sampler.sample(near.keyed(3, 0, 5), order[80:96])[0].srcs.tolist())
    counted = {}
    for reorder in (False, True):
        windows = Windows(lambda i: torch.tensor(list(needs[i])).int(), number, buffer, reorder)
        seen, before = Matched(), set()
        for change in (change for window in range(windows.count) for change in windows(window)):
            cold = {node for node in needs[change.position] if node >= hot}
            assert (change.needed, change.missing) == (len(cold), len(cold - before))
            before = cold
            seen.missing += change.missing
            seen.order.append(change.position)
        assert sorted(seen.order) == list(range(number))
        counted[reorder] = seen.missing
        assert seen.share is None, "nothing was counted as needed"
    assert counted[True] < counted[False], "the order is chosen for overlap"


def test_an_epoch_may_be_left(graph, steps):
    _, matched, buffer = steps
    matched.restart()
    epoch = MatchedEpoch(matched, graph.train_idx, BATCH, buffer, True)
    first = [next(epoch) for _ in range(3)]
    epoch.close()
    assert not epoch.running and len(epoch.seen.order) == 3 == len(first)
    again = MatchedEpoch(matched, graph.train_idx, BATCH, buffer, True)
    assert len(list(again)) == len(epoch) + 3 and again.number == 1
