"""Rows into slots and into staging buffers, and structure among slots, on a CPU: against indexing, ids checked."""

import numpy as np
import pytest
import torch

from joestar.store import fill_rows, host_gather, pin, pinned_empty, place_structure
from store.structures import cases, check_among_slots, check_own_table

_native = pytest.importorskip("joestar._native")


@pytest.fixture(params=[1, 4])
def threads(request):
    before = _native.num_threads()
    _native.set_num_threads(request.param)
    yield
    _native.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [(1,), (37,), (3, 4), ()], ids=str)
@pytest.mark.usefixtures("threads")
def test_rows_move_as_they_are(dtype, width):
    random = torch.Generator().manual_seed(1)
    source = torch.randint(0, 200, (9000, *width), generator=random).to(dtype)
    out = torch.randint(0, 200, (8000, *width), generator=random).to(dtype)
    ids = torch.randint(0, 9000, (7000,), generator=random, dtype=torch.int32).sort().values
    slots = torch.randperm(8000, generator=random)[:7000]
    expected = out.clone()
    expected[slots] = source[ids.long()]
    fill_rows(pin(source, "cpu").view, ids, slots, out)
    assert torch.equal(out, expected)
    assert torch.equal(host_gather(source, ids), source[ids.long()])


def test_features_change_dtype_on_the_way():
    source, ids = torch.randn(300, 20), torch.randint(0, 300, (250,))
    for stored, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        out = torch.zeros(300, 20, dtype=wanted)
        fill_rows(source.to(stored), ids, torch.arange(50, 300), out)
        assert torch.equal(out[50:], source.to(stored)[ids].to(wanted)) and not out[:50].any()


def test_a_mapped_file_is_gathered_into_locked_memory(tmp_path):
    path = tmp_path / "x.bin"
    np.arange(4000, dtype=np.float32).tofile(path)
    table = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+", shape=(400, 10)))
    staging, ids = pinned_empty((5, 10), torch.float32, "cpu"), torch.tensor([7, 399, 0, 7, 11])
    assert host_gather(table, ids, staging.host) is staging.host
    assert torch.equal(staging.view, torch.arange(4000.0).reshape(400, 10)[ids])


@pytest.mark.usefixtures("threads")
def test_rows_that_are_not_there_are_errors():
    source, out = torch.ones(4, 3), torch.zeros(5, 3)
    with pytest.raises(IndexError, match="row 4 of a table of 4 rows"):
        host_gather(source, torch.tensor([0, 4]))
    with pytest.raises(IndexError, match="row -1 of a table of 5 rows"):
        fill_rows(source, torch.tensor([0]), torch.tensor([-1]), out)
    for wrong, message in (
        ((source, torch.tensor([0]), torch.tensor([0, 1]), out), "a slot for each of 1 ids"),
        ((source, torch.tensor([0]), torch.tensor([0]), out[:, :2].contiguous()), r"out with rows \[3\]"),
        ((source, torch.tensor([0]), torch.tensor([0]), out.t()), "contiguous"),
        ((source, torch.tensor([0]), torch.tensor([0]), out.int()), "rows of torch.float32"),
        ((source, torch.tensor([0.0]), torch.tensor([0]), out), "ids int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            fill_rows(*wrong)
    assert not out.any()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.usefixtures("threads")
def test_structure_among_slots(case, ids):
    check_among_slots(case, ids, place_structure)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_structure_whose_sources_have_a_table_of_their_own(case):
    check_own_table(case, place_structure)


def test_structure_that_cannot_be_placed():
    indptr, indices = torch.tensor([0, 1, 2]), torch.zeros(2, dtype=torch.int32)
    out = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="two rows have the same"):
        place_structure(indptr, indices, torch.tensor([3, 3]), out, indices.clone())
    with pytest.raises(IndexError, match="slot 4 of an arena of 4 slots"):
        place_structure(indptr, indices, torch.tensor([1, 4]), out, indices.clone())
    with pytest.raises(IndexError, match="a source that has no slot"):
        place_structure(indptr, indices + 2, torch.tensor([1, 2]), out, indices.clone())
    with pytest.raises(ValueError, match="room for 2 edges"):
        place_structure(indptr, indices, torch.tensor([1, 2]), out, indices[:1].clone())
