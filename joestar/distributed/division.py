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


def weights(rows: Tensor, batch: int, rank: int, world: int, there: Tensor | None = None) -> Tensor:
    """Of a weighted mean over every global batch, the part that this rank's mean has: float64 ``[steps]``.

    Of a global batch whose weights are all zero one process has what the loss makes of that (NaN, 0, anything): so has
    any rank with seeds of it, and the first of them has the whole part.

    Args:
        rows: weight of every seed of the order, float64 ``[n]``.
        there: where the order has seeds, bool ``[n]``; ``None`` for everywhere.
    """
    sums = _by_rank(rows, batch, world).sum(1)
    whole = sums.sum(1)
    has = torch.ones_like(rows, dtype=torch.bool) if there is None else there
    first = _by_rank(has, batch, world).any(1).int().argmax(1)
    return torch.where(whole == 0, (first == rank).double(), sums[:, rank] / whole)


def _by_rank(values: Tensor, batch: int, world: int) -> Tensor:
    """What is one per seed, ``[steps, batch, world]``; zero where the last batch has none."""
    steps = -(-values.numel() // (batch * world))
    padded = values.new_zeros(steps * batch * world)
    padded[: values.numel()] = values
    return padded.view(steps, batch, world)


def present(seeds: int, batch: int, rank: int, world: int, device: torch.device) -> Tensor:
    """1 for every step in which this rank has a seed of its own, else 0: float64 ``[steps]``."""
    steps = -(-seeds // (batch * world))
    first = torch.arange(steps, device=device) * batch * world + rank
    return (first < seeds).double()
