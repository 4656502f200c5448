"""Slots that the device gives, by Triton kernels in their interpreter: against the book that a CPU keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.stages.device_slots import DeviceSlots
from joestar.stages.macro import MacroBatch, Picked, nodes_of
from joestar.stages.slots import Slots

pytestmark = pytest.mark.usefixtures("cheapest_captures")

CPU = torch.device("cpu")


def new(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((size,), -7, dtype=dtype)


@given(st.data(), st.booleans(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([9, 70, 5000]))
@settings(max_examples=12, deadline=None)
def test_it_is_the_book_of_a_cpu(data, reuse, dtype, nodes):
    """For the same nodes, ascending: with slots lost before they were loaded, macro-batches alone, and books cleared;
    graphs of one word of bits, of some, and of several programs."""
    node = st.integers(0, nodes - 1)
    hot = torch.tensor(sorted(data.draw(st.sets(node, max_size=30))), dtype=dtype)
    pool = data.draw(st.integers(1, 2 * min(nodes, 200)))
    ours, reference = DeviceSlots(hot, pool, nodes, reuse, CPU), Slots(hot, pool, nodes, reuse)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = torch.tensor(sorted(data.draw(st.sets(node, min_size=1, max_size=60))), dtype=dtype).flip(0)
        sources = torch.tensor(data.draw(st.lists(node, max_size=120)), dtype=dtype)
        ids = torch.cat([rows, sources]).unique()
        for alone in (False, True):
            taken, expected = ours.take(rows, sources, alone), reference.take(ids, new, alone)
            assert (taken is None) == (expected is None)
            if taken is not None:
                break
        if taken is not None:
            assert (taken.nodes, taken.cold, taken.turn) == (ids.numel(), expected.cold, expected.turn)
            assert torch.equal(taken.fresh, expected.fresh) and torch.equal(taken.fresh_slots, expected.fresh_slots)
            assert torch.equal(taken.table[ids.long()], expected.slots)
            assert torch.equal(taken.rows, taken.table[rows.long()])
        what = data.draw(st.sampled_from(["load", "load", "load", "lose", "clear"]))
        if what == "load" and taken is not None:
            ours.loaded(taken), reference.loaded(expected)
        if what != "load":
            ours.begin(), reference.begin()
        if what == "clear":
            ours.clear(), reference.clear()


def test_an_interrupt_while_slots_are_given(monkeypatch):
    """What was given is forgotten with the next feed, as if it had not been."""
    slots = DeviceSlots(torch.tensor([0]), 3, 40, True, CPU)
    rows, none = torch.tensor([5, 7]), torch.tensor([], dtype=torch.int64)
    slots.loaded(slots.take(rows, none))
    given = slots._kernels.take_free

    def interrupted(*args):
        given(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slots._kernels, "take_free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.take(torch.tensor([9]), none)
    assert int(slots.slot_of[9]) >= 0
    slots.begin()
    assert slots.slot_of[[5, 7]].min() > 0 and int(slots.slot_of[9]) == -1
    assert slots.take(torch.tensor([7, 9, 11]), none).fresh.tolist() == [9, 11]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_picked_edges_of_a_macro_batch(dtype):
    local = {"seeds": torch.tensor([1, 0, 1]), "indices": torch.tensor([2, 1, 0])}
    local = {name: value.to(torch.int32) for name, value in local.items()}
    ids, indptr = torch.tensor([4, 9, 2], dtype=dtype), torch.tensor([0, 2, 3])
    macro = MacroBatch(local["seeds"], ids, indptr, local["indices"], torch.tensor([5, 6, 8]))
    picked = Picked.of(macro)
    assert picked.seeds.tolist() == [9, 4, 9] and picked.rows.tolist() == [4, 9] and picked.indptr is indptr
    assert picked.sources.tolist() == [2, 9, 4] and picked.eids is macro.eids and picked.sources.dtype == dtype
    assert nodes_of(picked, 12, CPU).tolist() == [2, 4, 9] and nodes_of(macro, 12, CPU) is ids
    assert str(picked) == "Picked(3 seeds, 2 rows, 3 edges)" and picked.size == "2 rows and 3 edges"
