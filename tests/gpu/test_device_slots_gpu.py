"""The book of slots on a GPU, at sizes of many programs: against the one that a CPU keeps."""

import pytest
import torch

from joestar.stages.device_slots import DeviceSlots
from joestar.stages.slots import Slots

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NODES, HOT, POOL = 3_000_000, 200_000, 900_000


def new(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_the_book_of_a_cpu(reuse, dtype):
    """Sources that come many times, hubs among them; books that are full, begun anew and cleared."""
    torch.manual_seed(3)
    hot = torch.randperm(NODES)[:HOT].sort().values.to(dtype)
    ours, reference = DeviceSlots(hot, POOL, NODES, reuse, torch.device("cuda")), Slots(hot, POOL, NODES, reuse)
    refused = 0
    for turn in range(12):
        rows = torch.randperm(NODES)[: 100_000 + 20_000 * turn].to(dtype)
        sources = (torch.rand(400_000) ** (3 + turn % 2) * NODES).to(dtype)
        ids = torch.cat([rows, sources]).unique()
        for alone in (False, True):
            taken = ours.take(rows.cuda(), sources.cuda(), alone)
            expected = reference.take(ids, new, alone)
            assert (taken is None) == (expected is None)
            refused += taken is None
            if taken is not None:
                break
        if taken is None:
            continue
        assert (taken.nodes, taken.cold) == (ids.numel(), expected.cold)
        assert torch.equal(taken.fresh.cpu(), expected.fresh)
        assert torch.equal(taken.fresh_slots.cpu(), expected.fresh_slots)
        assert torch.equal(taken.table[ids.cuda().long()].cpu(), expected.slots)
        assert torch.equal(taken.rows, taken.table[rows.cuda().long()])
        if turn % 5 == 3:
            ours.begin(), reference.begin()
        else:
            ours.loaded(taken), reference.loaded(expected)
        if turn == 9:
            ours.clear(), reference.clear()
    assert refused
