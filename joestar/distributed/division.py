"""How seeds are divided among ranks.

The order of an epoch is the same on all ranks. A global batch of ``world x batch`` seeds of it is one step; rank r
takes the seeds at r, r + world, ... of it. Only the last global batch may be smaller: its shares differ by a seed at
most. A rank without a seed takes the batch's first one with weight zero, so that every rank makes every step.
"""

import torch
from torch import Tensor


def seeds_per_rank(seeds: int, batch: int, world: int) -> int:
    """``batch``, or less where there are fewer seeds than a global batch has."""
    return min(batch, -(-seeds // world))


def arranged(order: Tensor, batch: int, world: int) -> Tensor:
    """The same seeds with every share of every full global batch in one piece: ``[n]``."""
    full = order.numel() // (batch * world) * batch * world
    shares = order[:full].view(-1, batch, world).transpose(1, 2).reshape(-1)
    return torch.cat([shares, order[full:]])


def share(order: Tensor, batch: int, rank: int, world: int) -> tuple[Tensor, int]:
    """Seeds of a rank, ``batch`` per step: (ids ``[steps * batch]``, how many of them are meant).

    All ranks get as many ids, so that nothing depends on which has a smaller last share; what is left is filled up.
    """
    full = order.numel() // (batch * world)
    whole, rest = order[: full * batch * world], order[full * batch * world :]
    own = whole.view(full, batch, world)[:, :, rank].reshape(-1)
    if not rest.numel():
        return own, own.numel()
    last = rest[rank::world] if rest.numel() > rank else rest[:1]
    filled = torch.cat([own, last, last[:1].expand(batch - last.numel())])
    return filled, own.numel() + last.numel()


def weights(rows: Tensor, batch: int, rank: int, world: int, void: float = float("nan")) -> Tensor:
    """Of a weighted mean over every global batch, the part that this rank's mean has: float64 ``[steps]``.

    Args:
        rows: weight of every seed of the order, float64 ``[n]``.
        void: what every rank has of a global batch whose weights are all zero: NaN where one process has NaN.
    """
    steps = -(-rows.numel() // (batch * world))
    padded = rows.new_zeros(steps * batch * world)
    padded[: rows.numel()] = rows
    sums = padded.view(steps, batch, world).sum(1)
    whole = sums.sum(1)
    return torch.where(whole == 0, void, sums[:, rank] / whole)


def present(seeds: int, batch: int, rank: int, world: int, device: torch.device) -> Tensor:
    """1 for every step in which this rank has a seed of its own, else 0: float64 ``[steps]``."""
    steps = -(-seeds // (batch * world))
    first = torch.arange(steps, device=device) * batch * world + rank
    return (first < seeds).double()
