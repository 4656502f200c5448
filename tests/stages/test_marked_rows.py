"""Which nodes of a macro-batch have hidden rows, and where, against masks of PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.kernels.cpu_store import pull_hidden
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import HistoryRows, MarkedRows


@st.composite
def cases(draw):
    """Ids of nodes, which are marked, and tables of some layers."""
    num_nodes = draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    ids = torch.randperm(num_nodes, generator=generator)[: draw(st.integers(0, num_nodes))].to(dtype)
    marks = torch.rand(ids.shape, generator=generator) < draw(st.sampled_from((0.0, 0.4, 1.0)))
    rows = [
        torch.randperm(num_nodes, generator=generator)[: draw(st.integers(0, num_nodes))].sort().values
        for _ in range(draw(st.integers(1, 3)))
    ]
    return num_nodes, ids, marks, rows, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_they_are_what_masks_say(case):
    num_nodes, ids, marks, nodes, placed = case
    rows = HistoryRows(num_nodes, len(nodes), nodes)
    slots = torch.arange(ids.numel(), dtype=torch.int32) * 3 + 1
    each = [torch.isin(ids.long(), given) for given in nodes]
    wanted = marks & torch.stack(each).any(0) if placed else marks
    found = MarkedRows(ids, marks, rows.tables, placed)
    marked, own, places = found.at(slots)
    assert torch.equal(marked.slots, slots[wanted])
    for layer, known in enumerate(each):
        assert torch.equal(marked.layers[layer], known[wanted])
        assert torch.equal(own[layer], ids[wanted & known]) and found.counts[layer] == own[layer].numel()
        assert torch.equal(places[layer], torch.searchsorted(nodes[layer], own[layer].long()).int())


def test_which_host_has_them_and_all_have_one():
    hosts = torch.tensor([0, -1, 2, 1, -1], dtype=torch.int16)
    ids, marks = torch.tensor([4, 3, 0, 2]), torch.tensor([True, True, False, True])
    found = MarkedRows(ids, marks, [hosts, None])
    marked, own, places = found.at(torch.tensor([9, 8, 7, 6], dtype=torch.int32))
    assert marked.slots.tolist() == [9, 8, 6] and [each.tolist() for each in own] == [[3, 2], [4, 3, 2]]
    assert [each.tolist() for each in marked.layers] == [[False, True, True], [True, True, True]]
    assert places[0].tolist() == [1, 2] and places[1].tolist() == [4, 3, 2]


@pytest.mark.parametrize("wrong", [-1, 5, 1 << 40])
def test_what_is_no_node_is_an_error(wrong):
    ids = torch.tensor([0, wrong])
    with pytest.raises(IndexError, match=f"node {wrong} of a graph of 5 nodes"):
        MarkedRows(ids, torch.ones(2, dtype=torch.bool), [torch.zeros(5, dtype=torch.int32)])


def test_tables_and_marks_of_other_forms_are_refused():
    ids, marks = torch.arange(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"marks bool \[3\]"):
        MarkedRows(ids, marks[:2], [None])
    with pytest.raises(ValueError, match="int16 or int32"):
        MarkedRows(ids, marks, [torch.zeros(3)])


def test_rows_that_are_known_are_read_as_if_they_were_looked_up():
    nodes = torch.tensor([1, 4, 5, 8])
    stores = [HistoryStore(9, [3], nodes) for _ in range(2)]
    for store in stores:
        store.push(0, nodes[:3], torch.arange(9.0).view(3, 3), 0)
    ids = torch.tensor([8, 5, 1])
    found, looked_up = stores[0].pull(0, ids, 2, torch.tensor([3, 2, 0], dtype=torch.int32)), stores[1].pull(0, ids, 2)
    assert torch.equal(found.values, looked_up.values) and torch.equal(found.usable, looked_up.usable)
    assert torch.equal(found.age, looked_up.age) and found.counts == looked_up.counts == (1, 0, 4, 2)
    assert stores[0].staleness(0) == stores[1].staleness(0)
    with pytest.raises(IndexError):
        stores[0].pull(0, ids, 2, torch.tensor([3, 2, 4], dtype=torch.int32))
    table = stores[0].tables[0]
    with pytest.raises(ValueError, match="known bool"):
        pull_hidden(table, stores[0].stamps[0], torch.arange(3), torch.ones(2, dtype=torch.bool), 1, None, table[:3])


def test_slots_of_another_form_are_refused_and_ids_with_gaps_are_read_right():
    ids = torch.arange(20, dtype=torch.int32)[::2]
    found = MarkedRows(ids, torch.ones(10, dtype=torch.bool), [None])
    assert found.at(torch.zeros(10, dtype=torch.int32))[1][0].tolist() == ids.tolist()
    for slots in (torch.zeros(10, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"slots int32 \[10\]"):
            found.at(slots)


def test_a_mask_without_entries_does_not_mean_all():
    table, stamps = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="known bool"):
        pull_hidden(table, stamps, torch.arange(3), torch.zeros(0, dtype=torch.bool), 1, None, torch.zeros(3, 2))
