"""``staged.hidden_rates``: what is tried for a plan is what a macro-batch does, however large the tables will be."""

import pytest
import torch
from partitioning.planted import planted

import joestar
from joestar.staged import hidden_rates
from joestar.staged.hidden_rates import seconds_of_rows, seconds_to_prepare
from joestar.stages import Partitions
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import HistoryRows
from joestar.stages.slots import Slots
from tests.conftest import Clock


@pytest.fixture
def done(monkeypatch):
    """(what, layer, rows) of all that is pushed and pulled; every look at the clock is a millisecond later."""
    monkeypatch.setattr(hidden_rates, "time", Clock)
    found, push, pull = [], HistoryStore.push, HistoryStore.pull

    def pushed(store, layer, ids, *given, **further):
        count = push(store, layer, ids, *given, **further)
        assert count == len(ids) and further["replaced"].is_there
        found.append(("push", layer, count))
        return count

    def pulled(store, layer, ids, now):
        assert ids.unique().numel() == len(ids) and torch.equal(ids, ids.sort().values)
        found.append(("pull", layer, len(ids)))
        return pull(store, layer, ids, now)

    monkeypatch.setattr(HistoryStore, "push", pushed)
    monkeypatch.setattr(HistoryStore, "pull", pulled)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_and_read_as_often_as_a_macro_batch_does(done, dtype):
    state = torch.random.get_rng_state()
    assert seconds_of_rows((4, 3), dtype, [100, 50], [30, 20], [10, 5]) == pytest.approx(4e-3)
    layers = [[("push", 0, 10), ("pull", 0, 30)], [("push", 0, 5), ("pull", 0, 20)]]
    assert done == [each for layer in layers for each in layer * hidden_rates.TIMES]
    assert torch.equal(state, torch.random.get_rng_state())


def test_more_rows_than_are_tried_take_longer_in_proportion(done, monkeypatch):
    monkeypatch.setattr(hidden_rates, "PROBED", 40 * 4 * 8)
    assert seconds_of_rows((4,), torch.float32, [1000], [200], [8]) == pytest.approx(1e-3 + 200 / 80 * 1e-3)
    assert {number for what, _, number in done if what == "pull"} == {80}
    assert seconds_of_rows((4,), torch.float32, [1], [0], [0]) == 0.0
    assert seconds_of_rows((4,), torch.float32, [0], [0], [0]) == 0.0


def test_getting_ready_takes_slots_of_every_node(monkeypatch):
    graph = planted(300, 30)
    parts = joestar.partition(graph, 6, passes=1)
    stage = Partitions(parts, group=2, ahead=[3, 2]).prepare(graph, torch.arange(0, 300, 3))
    macro = stage.sample((0, 0, 0))
    assert macro.halo.any()
    taken, take = [], Slots.take

    def noted(slots, ids, *given):
        taken.append(take(slots, ids, *given))
        return taken[-1]

    monkeypatch.setattr(hidden_rates, "time", Clock)
    monkeypatch.setattr(Slots, "take", noted)
    assert seconds_to_prepare(macro, HistoryRows(300, 2, None), True) == pytest.approx(1e-3)
    (found,) = taken
    assert found.slots.unique().numel() == macro.num_nodes == found.cold
