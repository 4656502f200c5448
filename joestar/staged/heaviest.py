"""The heaviest steps of many epochs: a macro-batch of one step cannot be cut, so every one of them needs room.

Where neighbourhoods are taken whole, a few seeds may have as many neighbours as all others together: macro-batches that
are looked at by chance say little of the step that such a seed will be in, and every epoch has that step.
"""

import torch
from torch import Tensor

EPOCHS, SEEDS = 64, 1 << 24
"""Orders of the seeds that are looked at, and about how many seeds of them in all."""
TAKEN = 3
"""Steps that are given."""
_EDGES = 1 << 22
"""In-edges that are looked at together, or those of one seed."""


def heaviest_steps(sampler, seeds: Tensor, batch: int, seed: int) -> list[Tensor]:
    """Seeds of the ``TAKEN`` steps that reach most edges, by ``reach``, of as many epochs.

    Args:
        sampler: of a graph on the CPU. seeds: ids that epochs go over, ``[n]``. batch: seeds of a step.
        seed: of the orders.
    """
    weights = reach(sampler, seeds)
    orders = (torch.arange(seeds.numel(), device="cpu") if epoch == 0 else _order(seeds.numel(), seed, epoch)
              for epoch in range(max(2, min(EPOCHS, SEEDS // seeds.numel()))))  # fmt: skip
    heaviest = sorted((_heaviest(weights, order, batch) for order in orders), key=lambda found: -found[0])
    return [seeds[step] for _, step in heaviest[:TAKEN]]


def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch), device="cpu")


def _heaviest(weights: Tensor, order: Tensor, batch: int) -> tuple[float, Tensor]:
    """(sum of the weights, positions) of the heaviest step of an order."""
    padded = weights.new_zeros(-(-order.numel() // batch) * batch)
    padded[: order.numel()] = weights[order]
    sums = padded.view(-1, batch).sum(1)
    at = int(sums.argmax())
    return float(sums[at]), order[at * batch : (at + 1) * batch]


def reach(sampler, seeds: Tensor) -> Tensor:
    """About how many edges the first two hops from each seed have, float64 ``[n]``; all neighbours count where a
    sampler has no fanouts."""
    first, *others = getattr(sampler, "fanouts", None) or [-1]
    graph = sampler.graph
    indptr, seeds = graph.indptr.cpu(), seeds.cpu().long()
    degree = indptr[seeds + 1] - indptr[seeds]
    taken = _taken(degree, first)
    if not others:
        return taken
    sizes = torch.unique_consecutive(degree.cumsum(0) // _EDGES, return_counts=True)[1].tolist()
    pieces = zip(seeds.split(sizes), degree.split(sizes), strict=True)
    beyond = [_mean_beyond(indptr, graph.indices, *piece, others[0]) for piece in pieces]
    return taken * (1 + torch.cat(beyond))


def _taken(degree: Tensor, fanout: int) -> Tensor:
    return (degree if fanout < 0 else degree.clamp(max=fanout)).double()


def _mean_beyond(indptr: Tensor, indices: Tensor, rows: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """Mean over the in-neighbours of each row of how many edges they have."""
    of = torch.repeat_interleave(torch.arange(rows.numel(), device="cpu"), degree)
    begins = indptr[rows] - (degree.cumsum(0) - degree)
    near = indices[begins[of] + torch.arange(of.numel(), device="cpu")].long().cpu()
    sums = torch.zeros(rows.numel(), dtype=torch.float64, device="cpu").index_add_(
        0, of, _taken(indptr[near + 1] - indptr[near], fanout)
    )
    return sums / degree.clamp(min=1)
