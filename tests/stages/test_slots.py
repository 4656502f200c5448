"""Slots: against a book kept in dictionaries, over random macro-batches, some of which are never loaded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joestar.kernels import machine
from joestar.kernels.cpu_store import take_slots
from joestar.stages.slots import Slots


def new(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((size,), -7, dtype=dtype)


class Device:
    """Rows as they are in slots: what loads wrote there."""

    def __init__(self, hot: torch.Tensor, pool: int):
        self.rows = dict(enumerate(hot.tolist()))
        self.hot, self.pool = hot.tolist(), pool

    def load(self, taken) -> None:
        for node, slot in zip(taken.fresh.tolist(), taken.fresh_slots.tolist(), strict=True):
            assert len(self.hot) <= slot < len(self.hot) + self.pool
            self.rows[slot] = node

    def check(self, ids: list[int], taken) -> None:
        assert [self.rows.get(slot) for slot in taken.slots.tolist()] == ids
        assert taken.cold == len(set(ids) - set(self.hot))


@given(st.data(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_every_node_is_where_its_slot_says(data, reuse, dtype):
    nodes = data.draw(st.integers(1, 40))
    hot = torch.tensor(sorted(data.draw(st.sets(st.integers(0, nodes - 1)))), dtype=dtype)
    pool = data.draw(st.integers(1, 2 * nodes))
    slots, device = Slots(hot, pool, nodes, reuse), Device(hot, pool)
    before, in_use = set(), set()
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["take", "take", "take", "lose", "begin", "clear"]))
        if what in ("begin", "clear"):
            slots.begin()
            if what == "clear":
                slots.clear()
            before, in_use = set(), set()
            continue
        ids = sorted(data.draw(st.sets(st.integers(0, nodes - 1))))
        cold = set(ids) - set(hot.tolist())
        taken = slots.take(torch.tensor(ids, dtype=dtype), new)
        if taken is None:
            assert len(before | cold if reuse else [*before, *cold]) > pool
            taken = slots.take(torch.tensor(ids, dtype=dtype), new, alone=True)
            if taken is None:
                assert len(cold) > pool
                continue
        else:
            assert not in_use & set(taken.fresh_slots.tolist())
        if what == "lose":  # taken, and the feed ends before it is loaded
            slots.begin()
            before, in_use = set(), set()
            continue
        device.load(taken)
        slots.loaded(taken)
        device.check(ids, taken)
        if not reuse:
            places = [slot for slot in taken.slots.tolist() if slot >= len(hot)]
            assert places == sorted(places) and taken.fresh.numel() == len(cold)
        before, in_use = cold, set(taken.slots.tolist())


def test_rows_of_earlier_macro_batches_are_found_again():
    slots = Slots(torch.tensor([0]), 6, 20)
    first = slots.take(torch.tensor([0, 1, 2]), new)
    second = slots.take(torch.tensor([2, 3]), new)
    assert first.fresh.tolist() == [1, 2] and second.fresh.tolist() == [3]
    assert second.slots[0] == first.slots[2]
    third = slots.take(torch.tensor([1, 4, 5, 6]), new)  # 1 is still there
    assert third.fresh.tolist() == [4, 5, 6] and third.slots[0] == first.slots[1]
    slots.loaded(third)
    assert slots.take(torch.arange(10, 14), new) is None  # six slots, four are of the macro-batch before
    alone = slots.take(torch.arange(10, 14), new, alone=True)
    assert alone.fresh.numel() == 4
    assert slots.take(torch.arange(7, 14), new, alone=True) is None


def test_what_was_not_loaded_is_not_found():
    slots = Slots(torch.tensor([], dtype=torch.int64), 4, 9)
    slots.loaded(slots.take(torch.tensor([1, 2]), new))
    slots.take(torch.tensor([2, 3]), new)
    slots.begin()
    again = slots.take(torch.tensor([1, 2, 3]), new)
    assert again.fresh.tolist() == [3]
    slots.clear()
    assert slots.take(torch.tensor([1, 2, 3]), new, alone=True).fresh.tolist() == [1, 2, 3]


@pytest.fixture
def three_threads():
    before = machine.num_threads()
    machine.set_num_threads(3)
    yield
    machine.set_num_threads(before)


def test_large_macro_batches_over_several_blocks_of_work(three_threads):
    nodes, pool = 500_000, 400_000
    slots, device = Slots(torch.arange(0, 100_000, 2), pool, nodes), torch.full((450_000,), -1)
    device[:50_000] = torch.arange(0, 100_000, 2)
    for turn in range(5):
        ids = torch.randperm(nodes, generator=torch.Generator().manual_seed(turn))[:200_000].sort().values
        taken = slots.take(ids, new)
        device[taken.fresh_slots.long()] = taken.fresh
        slots.loaded(taken)
        assert torch.equal(device[taken.slots.long()], ids)
        assert turn == 0 or taken.fresh.numel() < taken.cold


def test_wrong_tensors_are_refused():
    slots = Slots(torch.tensor([0]), 3, 5)
    with pytest.raises(IndexError, match="not in the graph"):
        slots.take(torch.tensor([5]), new)
    book = (slots.slot_of, 1, slots._owner, slots._since, slots._keep, slots._used, True, 0, 1)
    ids = torch.tensor([1, 2])
    for name, out in {
        "room for 2": (new(1, torch.int32), new(2, torch.int64), new(2, torch.int32)),
        "slots int32": (new(2, torch.int64), new(2, torch.int64), new(2, torch.int32)),
        "fresh and owner": (new(2, torch.int32), new(2, torch.int32), new(2, torch.int32)),
    }.items():
        with pytest.raises(ValueError, match=name):
            take_slots(ids, *book, *out)
