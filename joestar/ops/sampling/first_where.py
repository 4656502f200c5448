"""``joestar::first_where``: the entries that a mask picks, in front of the others."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.registry import NO_GRADIENT, Padding, define


def first_where(mask: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a mask is true, in order, then where it is not: of tensors of static size what ``mask.nonzero()`` is.

    Args:
        mask: bool, of any shape; size: of the positions, ``mask.numel()``; -1: as many as are true.

    Returns:
        (positions in the flattened mask int64 ``[size]``, number of true entries 0-d int64, of every entry of the mask
        the place in the first result int64 ``[mask.numel()]``, anything in range where it is false).
    """
    true = mask.flatten()
    count, places = true.sum(), (true.cumsum(0) - 1).clamp(min=0)
    positions = torch.argsort((~true).to(torch.uint8), stable=True)
    return positions[: int(count)] if size < 0 else positions, count, places


def _fake(mask, size):
    positions = mask.new_empty((shapes.bound(size),), dtype=torch.int64)
    return positions, shapes.count(mask), mask.new_empty((mask.numel(),), dtype=torch.int64)


define(
    "first_where(Tensor mask, SymInt size) -> (Tensor, Tensor, Tensor)", first_where, fake=_fake, gradient=NO_GRADIENT,
    padding=Padding.RULE, padded_ids="batch",
)  # fmt: skip
