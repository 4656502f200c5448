"""Results whose size depends on data: refused with the line and a remedy, or, picked by a mask, those of Python."""

import pytest
import torch

from joestar.errors import CaptureError

from .worlds import World, worlds_apart

RAGGED = {
    "bincount": lambda m, b, h: h + torch.bincount(b.indices, minlength=9)[:8],
    "unique_consecutive": lambda m, b, h: h + torch.unique_consecutive(b.indices).sum(),
    "repeat_interleave": lambda m, b, h: h + h.repeat_interleave(b.out_degrees(), 0).sum(0),
    "entries": lambda m, b, h: h + h[torch.nonzero(h > 0)[:, 0]].sum(0),
}


@pytest.mark.parametrize("name", RAGGED)
def test_results_whose_size_depends_on_data(name):
    with pytest.raises(CaptureError, match=r"test_data_sizes\.py:.*depends on data.*Write instead: x\[mask\]"):
        World.of(RAGGED[name]).trace()


def by_kind(m, b, h):
    """Each kind of rows has a layer of its own; a mask that picks none is among them."""
    out, kinds = torch.zeros_like(h), b.srcs % 3
    for kind in range(4):
        mask = kinds == kind
        out[mask] = h[mask] * (kind + 1) + h[mask].sum(0)
    return out


def overwritten(m, b, h):
    """Numbers and one row for all, in entries or rows; read before and after."""
    out = h * 1
    before = out.sum()
    out[b.out_degrees() > 1] = h.mean(0).detach()
    out[out.detach() > 0.5] = -1
    return out + before


def in_place(m, b, h):
    """Written where they are, and put back."""
    out, mask = h * 1, b.out_degrees() > 1
    out[mask] += h[b.out_degrees() > 1].sum(0).tanh()
    some = out[h.detach() > 0]
    some *= 2
    some[some.detach() > 1] = 1
    return out + some.sum().tanh()


PICKED = {
    "assigned": by_kind,
    "overwritten": overwritten,
    "where": lambda m, b, h: h + torch.where(b.out_degrees() > 1)[0].sum() * 0.1,
    "mask of degrees": lambda m, b, h: h + h[b.out_degrees() > 1].sum(0),
    "mask of values": lambda m, b, h: h + h[h[:, 0].detach() > 0].sum(0),
    "nonzero": lambda m, b, h: h + h[h[:, 0].detach().round().nonzero()[:, 0]].sum(0),
    "masked_select": lambda m, b, h: h + h.masked_select(h.detach() > 0).sum().tanh(),
    "masked_select, rows": lambda m, b, h: (
        h + torch.masked_select(h, b.out_degrees()[:, None] > 1).square().sum().tanh()
    ),
    "in place": in_place,
    "as a tuple": lambda m, b, h: h + h[torch.nonzero(b.in_degrees() > 1, as_tuple=True)].sum(0),
}


@pytest.mark.parametrize("name", PICKED)
@pytest.mark.every(4)
def test_rows_that_a_mask_picks(name):
    assert worlds_apart(operation=PICKED[name]) == {"exact": [], "padded": []}
