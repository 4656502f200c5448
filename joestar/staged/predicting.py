"""Batches of predictions over macro-batches: what a process carries out of them, in steps that have room."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Batches:
    """Batches in pieces, one per step: draws are keyed by the batch and the node, so that pieces sample as the whole.

    Attributes:
        order: seeds ``[steps * width]``, -1 where a step has fewer. width: seeds of a step.
        starts: of every step, the row of the result where its seeds begin; counts: how many they are.
        batches: of every step, the number of its batch.
    """

    order: Tensor
    width: int
    starts: list[int]
    counts: list[int]
    batches: list[int]


def batches_of(seeds: Tensor, batch: int, most: int, rank: int = 0, world: int = 1) -> Batches:
    """The part of rank ``rank``, which may be empty: steps in a row, as many as others have, give or take one.

    Args:
        seeds: ids ``[n]``. most: seeds of a step, where a batch has more than that.
    """
    width = -(-batch // -(-batch // most))
    pieces = [
        (start, min(start + width, first + batch, seeds.numel()), number)
        for number, first in enumerate(range(0, seeds.numel(), batch))
        for start in range(first, min(first + batch, seeds.numel()), width)
    ]
    own = pieces[len(pieces) * rank // world : len(pieces) * (rank + 1) // world]
    starts, counts = [start for start, *_ in own], [end - start for start, end, _ in own]
    order = seeds.new_full((len(own), width), -1)
    if own:
        there = torch.arange(width, device=seeds.device) < torch.tensor(counts, device=seeds.device).unsqueeze(1)
        order[there] = seeds[starts[0] : starts[0] + sum(counts)]
    return Batches(order.view(-1), width, starts, counts, [number for *_, number in own])
