"""``joestar::first_where`` is ``nonzero``, of any mask, with places to go back to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import joestar  # noqa: F401  (registers the ops)

ops = torch.ops.joestar


@given(st.lists(st.booleans(), max_size=12), st.booleans())
def test_positions_are_those_of_nonzero_in_front(bits, flat):
    mask = torch.tensor(bits, dtype=torch.bool)
    mask = mask if flat or len(bits) % 2 else mask.view(-1, 2)
    wanted = mask.flatten().nonzero().squeeze(1)
    positions, count, places = ops.first_where(mask, mask.numel())
    assert torch.equal(positions[: int(count)], wanted) and len(wanted) == count
    assert torch.equal(positions.sort()[0], torch.arange(mask.numel()))
    assert torch.equal(ops.first_where(mask, -1)[0], wanted)
    assert torch.equal(positions[places][mask.flatten()], torch.arange(mask.numel())[mask.flatten()])


@pytest.mark.parametrize("size", [-1, 7])
def test_traced_as_it_runs(size):
    torch.library.opcheck(ops.first_where.default, (torch.arange(7) % 3 > 0, size))
