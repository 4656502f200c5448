"""Historical embeddings between host and device: slices, pushes that happen or not, undoing, against dictionaries."""

import copy
import random
import threading

import pytest
import torch

from joestar.errors import CheckpointError
from joestar.graph_api import Graph, SamplingContext
from joestar.graph_api.history import HistoryTables, LayerHistory
from joestar.sampling import NeighborSampler
from joestar.stages.device_history import DeviceHistory
from joestar.stages.exchange import Exchange, seen_by
from joestar.stages.exchanged import Marked
from joestar.stages.history import HistoryStore, Pushed, Slice
from joestar.stages.partitions import PartitionBatch

NODES, WIDTHS, ROOM = 30, (3, 2), (12, 12)
SOME = [torch.arange(0, NODES, 2), torch.arange(0, NODES, 3)]
"""With a row in each layer."""


def test_slices_take_turns_and_steps_that_did_not_happen_leave_nothing():
    device = DeviceHistory(50, WIDTHS, [4, 4], [5, 5], torch.float32, "cpu")
    for half in (0, 1):
        slices = [
            Slice(torch.full((2, w), half + 1.0), torch.tensor([True, False]), torch.zeros(2), (1, 0, 0, 0))
            for w in WIDTHS
        ]
        halo = torch.tensor([10 + half, 20 + half, 40]).int()
        pulled = Marked(halo, [torch.tensor([True, True, False])] * 2)
        pushed = Marked(torch.tensor([30, 31, 32]).int(), [torch.ones(3, dtype=torch.bool)] * 2)
        before = [place.clone() for place in device.tables.places]
        device.load(half, pulled, pushed, slices)
        assert all(map(torch.equal, before, device.tables.places)), "nothing is shown yet"
        device.show()
        place = device.tables.places[0]
        assert torch.equal(place, device.tables.places[1])
        assert (place != 0).sum() == 6 and place[40] == 1 and not device.tables.usable[0][1], "without a row"
        assert place[[10 + half, 20 + half]].tolist() == [2 + 4 * half, 3 + 4 * half]
        assert (-place[30:33]).tolist() == [1 + 5 * half, 2 + 5 * half, 3 + 5 * half]
        assert device.tables.usable[0][place[[10 + half, 20 + half, 5]].long()].tolist() == [True, False, True]
        rows = torch.tensor([0, 1 + 5 * half, 3 + 5 * half, 0, 0]).int()
        values = [torch.randn(5, w, dtype=torch.float64) for w in WIDTHS]
        device.push([rows, values[0], rows, values[1]], torch.tensor(False))
        assert all(not which.numel() for which, _ in device.collected(half, [3, 3]))
        device.push([rows, values[0], rows, values[1]], torch.tensor(True))
        for (which, found), value in zip(device.collected(half, [3, 3]), values, strict=True):
            assert which.tolist() == [0, 2] and torch.equal(found, value[1:3].float())
        device.forget(half, [3, 3])
        assert all(not which.numel() for which, _ in device.collected(half, [3, 3])), "once"
    assert device.tables.pulled[0][2].tolist() == [1.0] * 3, "the other half stays"


def test_layers_have_room_and_rows_of_their_own():
    device = DeviceHistory(50, WIDTHS, [4, 2], [5, 1], torch.float32, "cpu")
    shapes = [[tuple(table.shape) for table in tables] for tables in (device.tables.pulled, device.pushed)]
    assert shapes == [[(10, 3), (6, 2)], [(11, 3), (3, 2)]]
    pulled = Marked(torch.tensor([3, 4, 5]).int(), [torch.tensor([True] * 3), torch.tensor([False, True, False])])
    pushed = Marked(torch.tensor([7, 8]).int(), [torch.tensor([True, True]), torch.tensor([False, True])])
    for half in (0, 1):
        slices = [
            Slice(torch.full((n, w), 1.0 + half), torch.ones(n, dtype=torch.bool), torch.zeros(n), (0, 0, 0, 0))
            for n, w in zip((3, 1), WIDTHS, strict=True)
        ]
        device.load(half, pulled, pushed, slices)
        device.show()
        first, second = device.tables.places
        at = 2 + 4 * half
        assert first[3:6].tolist() == [at, at + 1, at + 2] and second[3:6].tolist() == [1, 2 + 2 * half, 1]
        assert (-first[7:9]).tolist() == [1 + 5 * half, 2 + 5 * half] and second[7:9].tolist() == [0, -1 - half]
        assert not device.tables.usable[1][1] and device.tables.usable[1][2 + 2 * half]
        ones = [torch.ones(2, 3), torch.ones(1, 2)]
        device.push([-first[7:9], ones[0], -second[8:9], ones[1]], torch.tensor(True))
        assert [which.tolist() for which, _ in device.collected(half, [2, 1])] == [[0, 1], [0]]
        device.forget(half, [2, 1])


def slots_of(nodes, layer):
    """Of those with a row of a layer."""
    return nodes.slots[nodes.layers[layer]]


def macro_of(number, sees, draw):
    nodes = torch.tensor(draw.sample(range(NODES), 20))
    halo, inner = torch.zeros(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    halo[:8], inner[10:] = True, True
    empty = torch.zeros(0, dtype=torch.int32)
    return PartitionBatch(empty, nodes, torch.zeros(1).long(), empty, halo=halo, inner=inner, number=number, sees=sees)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_macro_batch_sees_does_not_depend_on_when_things_happen(seed):
    """Loaded early or late, again, or after a state was saved and loaded: as dictionaries say."""
    draw, values = random.Random(seed), torch.Generator().manual_seed(seed)
    store = HistoryStore(NODES, WIDTHS, SOME)
    exchange = Exchange(store, DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"))
    pushes, turn = {}, 0
    for epoch in range(3):
        base, count = exchange.number_epoch(epoch), 5
        assert base == epoch * count
        macros = [macro_of(base + i, seen_by(base, i), draw) for i in range(count)]
        slots = torch.arange(20, dtype=torch.int32)
        exchange.begin(0)
        loaded = exchange.prepare(macros[0], slots, turn % 2)
        exchange.load(loaded)
        for i, macro in enumerate(macros):
            exchange.show(loaded, 20)
            here = loaded
            _check(exchange, loaded, pushes, macro)
            if draw.random() < 0.6 and i + 1 < count:  # the next one is loaded early, in another thread
                ahead = exchange.prepare(macros[i + 1], slots, (turn + 1) % 2)
                thread = threading.Thread(target=exchange.load, args=(ahead,))
                thread.start(), thread.join()
            else:
                ahead = None
            _push(exchange, here, pushes, values, macro.number)
            if draw.random() < 0.4:  # something else used the arena, or the run goes on elsewhere
                if draw.random() < 0.5:
                    state = copy.deepcopy(exchange.state_dict())
                    exchange = Exchange(store, exchange.device)
                    exchange.load_state_dict(state)
                    exchange.number_epoch(epoch)
                exchange.begin(i)
                loaded = exchange.prepare(macro, slots, 0)
                turn, ahead = 0, None
                exchange.load(loaded)
                exchange.show(loaded, 20)
                _check(exchange, loaded, pushes, macro)
                _push(exchange, loaded, pushes, values, macro.number)
            turn += 1
            if i + 1 < count:
                loaded = ahead
                if loaded is None:
                    loaded = exchange.prepare(macros[i + 1], slots, turn % 2)
                    exchange.load(loaded)


def _push(exchange, rows, pushes, values, number):
    outputs = []
    for layer, width in enumerate(WIDTHS):
        place, slots = exchange.device.tables.places[layer], slots_of(rows.pushes, layer)
        chosen = slots[torch.rand(len(slots), generator=values) < 0.7]
        row = torch.randn(len(chosen), width, generator=values)
        outputs += [-place[chosen.long()], row]
        at = {int(slot): int(node) for slot, node in zip(slots, rows.push_ids[layer], strict=True)}
        for slot, value in zip(chosen.tolist(), row, strict=True):
            pushes.setdefault(number, {})[layer, at[slot]] = value
    exchange.device.push(outputs, torch.tensor(True))


def _check(exchange, rows, pushes, macro):
    tables = exchange.device.tables
    for layer in range(len(WIDTHS)):
        place, pull_slots, pull_ids = tables.places[layer].long(), slots_of(rows.pulls, layer), rows.pull_ids[layer]
        assert pull_ids.tolist() == [node for node in macro.halo_ids.tolist() if node in SOME[layer]]
        without = macro.halo & ~torch.isin(macro.ids, SOME[layer])
        assert (place[pull_slots.long()] > 1).all() and (place[:20][without] == 1).all() and without.any()
        seen = {}
        for number in sorted(pushes):
            if number <= macro.sees:
                seen |= {node: (value, number) for (where, node), value in pushes[number].items() if where == layer}
        ages = []
        for slot, node in zip(pull_slots.tolist(), pull_ids.tolist(), strict=True):
            value, when = seen.get(node, (None, None))
            assert bool(tables.usable[layer][place[slot]]) == (value is not None)
            if value is not None:
                assert torch.equal(tables.pulled[layer][place[slot]], value)
                ages.append(macro.number - when)
        assert rows.pulled[layer] == (len(pull_ids) - len(ages), 0, sum(ages), max(ages, default=0))


def test_rows_are_exchanged_without_gradient_where_they_are_stored():
    graph = Graph.from_edge_index(torch.randint(0, NODES, (2, 90)), NODES)
    place = torch.randint(-4, 5, (NODES,), dtype=torch.int32)
    tables = HistoryTables([place], [torch.randn(6, 3)], [torch.ones(6, dtype=torch.bool)])
    view = graph.with_context(SamplingContext(torch.zeros(3, dtype=torch.int64)))
    (block,) = NeighborSampler(graph, [3]).sample(view, torch.tensor([4, 4, 9, 0, 7, 11, 2], dtype=graph.indices.dtype))
    h = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    out = LayerHistory(tables, 0).exchanged(h, block)
    at = place[block.dsts.long()].tolist()
    wanted = torch.stack([tables.pulled[0][p].double() if p > 0 else row for p, row in zip(at, h, strict=True)])
    assert torch.equal(out, wanted)
    (grad,) = torch.autograd.grad(out.sum(), h)
    assert grad[:, 0].tolist() == [float(p <= 0) for p in at]
    ((layer, rows, values),) = block.graph.context.pushed
    assert layer == 0 and rows.tolist() == [max(0, -p) for p in at] and not values.requires_grad


def test_states_of_others_are_refused():
    def made(widths):
        return Exchange(HistoryStore(NODES, widths), DeviceHistory(NODES, widths, [3, 3], [3, 3], torch.float32, "cpu"))

    for wrong in (None, {}, made((3, 4)).state_dict()):
        with pytest.raises(CheckpointError):
            made(WIDTHS).load_state_dict(wrong)


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize("then", ["go on", "rewind", "save"])
def test_an_interrupt_between_layers_loses_nothing(monkeypatch, layer, when, then):
    """Ctrl-C while a state is saved, which writes what is due: it is written, or taken back, or saved, all the same."""

    def made(node_values):
        exchange = Exchange(HistoryStore(NODES, WIDTHS), DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"))
        ids = torch.arange(5)
        for number in range(2):
            layers = [(ids + number, torch.full((5, width), node_values + number)) for width in WIDTHS]
            exchange._waiting.append(Pushed(number, layers))
        exchange._apply(0)
        exchange.latest = 2
        return exchange

    plain, exchange = made(3.0), made(3.0)
    push = HistoryStore.push

    def interrupted(store, where, *given, **further):
        if where == layer and when == "before":
            raise KeyboardInterrupt
        found = push(store, where, *given, **further)
        if where == layer:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(HistoryStore, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exchange._apply(1)
    if then == "save":
        state = copy.deepcopy(exchange.state_dict(cut=True))
        exchange = made(0.0)
        exchange.load_state_dict(state)
    if then != "rewind":
        exchange._apply(1)
        plain._apply(1)
        same(plain, exchange)
    plain._rewind(0)
    exchange._rewind(0)
    same(plain, exchange)
    for one in (plain, exchange):
        one._apply(1)
    same(plain, exchange)


def same(one, other):
    pairs = zip(one.store.tables + one.store.stamps, other.store.tables + other.store.stamps, strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), 3.4e38])
def test_rows_that_are_not_finite_are_not_kept(wrong):
    """Also where only the table's dtype cannot hold them: the step before last pushed a row that is kept."""
    device = DeviceHistory(50, WIDTHS, [4, 4], [5, 5], torch.bfloat16, "cpu")
    rows = torch.tensor([1, 2, 0, 3], dtype=torch.int32)
    ones = [torch.ones(4, width) for width in WIDTHS]
    device.push([each for values in ones for each in (rows, values)], torch.tensor(True))
    values = [2 * each for each in ones]
    values[0][1, -1] = wrong
    device.push([each for value in values for each in (rows, value)], torch.tensor(True))
    (which, found), (others, rest) = device.collected(0, [5, 5])
    assert which.tolist() == others.tolist() == [0, 1, 2]
    assert found[:, 0].tolist() == [2, 1, 2] and torch.equal(rest, torch.full_like(rest, 2))
