"""What feeds an arena, as Triton kernels: bit for bit what indexing gives."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from store.structures import cases, check_among_slots, check_own_table

from joestar.kernels import gpu_fill
from joestar.kernels.gpu_book import fill_near
from joestar.kernels.gpu_fill import fill_rows, gather_stored
from joestar.kernels.gpu_place import place_structure

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def numbers(rows: int, width: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * max(1, torch.Size(width).numel())) % 251).to(dtype).reshape(rows, *width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [(1,), (37,), (128,), (3, 4), ()], ids=str)
def test_rows_move_as_they_are(dtype, width):
    random = torch.Generator().manual_seed(1)
    source, out = numbers(50, width, dtype), numbers(40, width, dtype).flip(0).clone()
    ids = torch.randperm(50, generator=random)[:23].sort().values.to(torch.int32)
    slots = torch.randperm(40, generator=random)[:23]
    expected = out.clone()
    expected[slots] = source[ids.long()]
    fill_rows(source, ids, slots, out, programs=2)
    assert torch.equal(out, expected)


def test_many_tiles_take_turns_and_wide_rows_have_parts(monkeypatch):
    monkeypatch.setattr(gpu_fill, "TILE_BYTES", 256)
    monkeypatch.setattr(gpu_fill, "_WIDEST", 64)
    source, out = numbers(61, (37,), torch.float32), torch.full((61, 37), -1.0)
    for programs in (1, 3, 1000):
        fill_rows(source, torch.arange(61), torch.arange(61).flip(0), out.fill_(-1), programs)
        assert torch.equal(out, source.flip(0))


def test_rows_that_are_not_aligned():
    memory = torch.arange(1001, dtype=torch.int16)
    source, out = memory[1:].view(100, 10), torch.zeros(100, 10, dtype=torch.int16)
    fill_rows(source, torch.arange(100), torch.arange(100), out)
    assert torch.equal(out, source)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_features_are_widened_on_the_way(stored):
    source, out = torch.randn(30, 20).to(stored), torch.zeros(30, 20)
    fill_rows(source, torch.arange(30), torch.arange(30), out)
    assert torch.equal(out, source.float())


def test_nothing_to_do_and_what_does_not_fit():
    source, out, none = torch.ones(4, 3), torch.zeros(4, 3), torch.empty(0, dtype=torch.int64)
    fill_rows(source, none, none, out)
    fill_rows(source[:, :0].contiguous(), torch.arange(4), torch.arange(4), out[:, :0].contiguous())
    assert not out.any()
    one = torch.zeros(1, dtype=torch.int64)
    for wrong, message in (
        ((source, one, torch.arange(2), out), "one slot for every id"),
        ((source[:, :2].contiguous(), one, one, out), r"out with rows \[2\]"),
        ((source, one, one, out.t()), "out contiguous"),
        ((source, one, one, out.int()), "rows of torch.float32"),
        ((source, one.float(), one, out), "node ids of one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            fill_rows(*wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sorted_from", [0, 10**6])
def test_rows_through_a_cache(dtype, sorted_from, monkeypatch):
    monkeypatch.setattr(gpu_fill, "_SORTED_FROM", sorted_from)
    monkeypatch.setattr(gpu_fill, "INTERPRETED", False)
    random = torch.Generator().manual_seed(2)
    x, cache = numbers(60, (37,), dtype), -numbers(60, (37,), dtype)[:9].contiguous() - 1
    slot_of = torch.full((60,), -1, dtype=torch.int32)
    slot_of[torch.randperm(60, generator=random)[:9]] = torch.arange(9, dtype=torch.int32)
    ids = torch.randint(0, 60, (70,), generator=random, dtype=torch.int32)
    expected = torch.where(slot_of[ids.long()] >= 0, 1, 0)[:, None]
    expected = torch.where(expected == 1, cache[slot_of[ids.long()].long()], x[ids.long()])
    assert torch.equal(gather_stored(x, cache, slot_of, ids), expected)
    assert torch.equal(gather_stored(x, None, None, ids), x[ids.long()])
    assert torch.equal(gather_stored(x, cache[:0].contiguous(), slot_of.fill_(-1), ids), x[ids.long()])
    assert gather_stored(x, None, None, ids[:0]).shape == (0, 37)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_structure_among_slots(case, ids):
    check_among_slots(case, ids, place_structure)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_structure_whose_sources_have_a_table_of_their_own(case):
    check_own_table(case, place_structure)


def test_structure_that_does_not_fit():
    indptr, indices, slots = torch.tensor([0, 2]), torch.zeros(2, dtype=torch.int32), torch.tensor([3])
    with pytest.raises(ValueError, match="room for 2 edges"):
        place_structure(indptr, indices, slots, torch.zeros(5, dtype=torch.int64), indices[:1])
    with pytest.raises(ValueError, match="a slot for each of 1 rows"):
        place_structure(indptr, indices, slots[:0], torch.zeros(5, dtype=torch.int64), indices)


NARROW = {
    "labels": (torch.int8, torch.int64, ()), "several": (torch.float32, torch.float32, (2, 2)),
    "to half": (torch.float32, torch.float16, (3,)), "masks": (torch.bool, torch.bool, ()),
    "many masks": (torch.bool, torch.bool, (16,)),
}  # fmt: skip


@pytest.mark.parametrize("case", NARROW)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_narrow_rows_are_those_of_indexing(case, index):
    dtype, to, width = NARROW[case]
    random = torch.Generator().manual_seed(2)
    table = numbers(3000, width, torch.int64).sub(100).to(dtype)
    out = torch.ones(2500, *width, dtype=to)
    ids = torch.randperm(3000, generator=random)[:2100].to(index)
    slots = torch.randperm(2500, generator=random)[:2100]
    expected = out.clone()
    expected[slots] = table[ids.long()].to(to)
    fill_near(table, ids, slots.int(), out)
    assert torch.equal(out, expected)


def test_ids_themselves():
    ids, slots, out = torch.tensor([7, 2, 9]), torch.tensor([4, 0, 3], dtype=torch.int32), torch.full((5,), -1)
    fill_near(None, ids, slots, out)
    assert out.tolist() == [2, -1, -1, 9, 7]
    fill_near(None, ids[:0], slots[:0], out)
    for wrong in ((None, ids, slots, out[:4].view(2, 2)), (None, ids, slots[:2], out), (out[:, None], ids, slots, out)):
        with pytest.raises(ValueError, match="expected"):
            fill_near(*wrong)
