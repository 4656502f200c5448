"""Rows of a table in shards, read through addresses: bit for bit what indexing gives."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu_shards
from joestar.kernels.gpu import gather_shards
from joestar.store.features import slot_table
from joestar.store.sharded import fill_shard, shard_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def in_shards(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    """The parts of every rank; what is no row is NaN."""
    rows = shard_rows(x.shape[0], world)
    shards = [torch.full((rows, *x.shape[1:]), torch.nan, dtype=x.dtype) for _ in range(world)]
    for rank, part in enumerate(shards):
        fill_shard(x, part, rank, world)
    return shards


def addresses(shards, cache=None) -> torch.Tensor:
    return torch.tensor([s.data_ptr() for s in shards] + [0 if cache is None else cache.data_ptr()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "world"), [((1,), 2), ((37,), 3), ((128,), 4), ((3, 4), 1), ((), 5)], ids=str)
def test_rows_come_from_their_owners_and_hot_ones_from_this_device(dtype, width, world):
    random = torch.Generator().manual_seed(world)
    x = torch.randn(64 * 7 + 13, *width, generator=random).to(dtype)
    shards, hot = in_shards(x, world), torch.randperm(x.shape[0], generator=random)[:50]
    cache, slot_of = x[hot] + 1, slot_table(hot, x.shape[0])  # told apart from what the owners have
    ids = torch.randint(0, x.shape[0], (150,), generator=random)
    assert torch.equal(gather_shards(shards, addresses(shards), 64, None, None, ids), x[ids])
    expected = torch.where((slot_of[ids] >= 0).view(-1, *[1] * len(width)), x[ids] + 1, x[ids])
    got = gather_shards(shards, addresses(shards, cache), 64, cache, slot_of, ids.to(torch.int32))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_wide_rows_have_parts_and_few_programs_take_all_tiles(monkeypatch, programs):
    monkeypatch.setattr(gpu_shards, "_WIDEST", 64)
    monkeypatch.setattr(gpu_shards, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(gpu_shards, "_THREAD", 1)
    monkeypatch.setattr(gpu_shards, "_WARPS", 8)
    monkeypatch.setattr(gpu_shards, "SHARE", 1)
    x = torch.arange(200 * 37, dtype=torch.float32).view(200, 37)
    shards, ids = in_shards(x, 2), torch.arange(199, -1, -7)
    assert torch.equal(gather_shards(shards, addresses(shards), 64, None, None, ids), x[ids])


def test_nothing_to_read_and_what_does_not_fit():
    shards = in_shards(torch.ones(70, 3), 2)
    none = torch.empty(0, dtype=torch.int64)
    assert gather_shards(shards, addresses(shards), 64, None, None, none).shape == (0, 3)
    with pytest.raises(ValueError, match=r"int64 addresses \[3\]"):
        gather_shards(shards, addresses(shards)[:2], 64, None, None, none)
    with pytest.raises(ValueError, match="one of them"):
        gather_shards(shards, addresses(shards), 64, shards[0], None, none)
    with pytest.raises(ValueError, match=r"rows \[3\]"):
        gather_shards([shards[0], shards[1][:, :2].contiguous()], addresses(shards), 64, None, None, none)
