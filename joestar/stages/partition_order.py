"""The order of an epoch over partitions: seeds part by part, every macro-batch from a step of its own on.

Several ranks train on macro-batches of their own at the same time, a *round* of them: groups that have about as many
steps, so that few have to wait. A rank that has fewer seeds than the others in a round, or no group at all, takes part
in the steps that are left with a seed of weight zero.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.stages.partitions import PreparedPartitions

Lanes = tuple[int, int, int]
"""(the step from which on it is so, number of ranks, seeds of each per step)."""


@dataclass(eq=False)
class PartitionOrder:
    """Seeds of an epoch.

    Attributes:
        seeds: ``[steps * batch * ranks]``, those of rank r at r, r + ranks, ...; -1 where a rank has fewer in a step.
        borders: first step of every round, then the number of steps. groups: per round, the parts of every rank;
            those of the first one again for a rank without.
        batch, ranks: seeds of a rank per step, and their number.
    """

    seeds: Tensor
    borders: list[int]
    groups: list[list[Tensor]]
    batch: int
    ranks: int = 1

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return self.borders[-1]

    def fed(self, rank: int) -> Tensor:
        """What a rank is fed, ``[steps * batch]``: its seeds, and one of weight zero in steps in which it has none."""
        lanes = self.seeds.view(self.steps, self.batch, self.ranks)
        own = lanes[:, :, rank].clone()
        for first, last in itertools.pairwise(self.borders):
            rows = own[first:last]
            lacking = (rows < 0).all(1)
            some = rows[rows >= 0] if not lacking.all() else lanes[first:last, :, 0].flatten()
            if lacking.any() and int(some[0]) >= 0:  # else of steps that were carried out by others, long ago
                rows[lacking, 0] = some[0]
        return own.view(-1)


def partition_order(
    stage: PreparedPartitions, seeds: Tensor, batch: int, key: tuple[int, int], drop_last: bool = False,
    ranks: int = 1, before: Sequence[Lanes] = (), position: int = 0,
) -> PartitionOrder:  # fmt: skip
    """The order of an epoch: parts grouped at random under ``key`` = (seed, epoch), in every group its seeds as given.

    Groups without seeds make no macro-batch. With ``drop_last`` the last, smaller batch of every macro-batch is left
    out, unless all of its seeds are fewer than a batch.

    Args:
        batch: seeds of a rank per step.
        before: who has carried out the steps so far, up to ``position``, if not as many ranks: what they have left is
            divided anew.
    """
    left = torch.arange(seeds.numel(), device="cpu")
    borders, groups, start = [0], [], 0
    starts = [*(lanes[0] for lanes in before), position]
    for (first, number, size), last in zip(before, starts[1:], strict=True):
        dealt, ends, parts = _dealt(stage, seeds, left, size, key, drop_last, number)
        steps, begun = last - first, sum(end < last - first for end in ends[:-1])
        taken = dealt[: steps * size * number]
        left = left[~torch.isin(left, taken[taken >= 0])]
        borders += [*(first + end for end in ends[1:begun]), last] if begun else []
        groups += [each[:1] * ranks for each in parts[:begun]]  # nobody comes back to these
        start = last
    dealt, ends, parts = _dealt(stage, seeds, left, batch, key, drop_last, ranks)
    found = torch.where(dealt >= 0, seeds[dealt.clamp(min=0)], -1) if seeds.numel() else seeds
    past = seeds.new_full((start * batch * ranks,), -1)
    return PartitionOrder(
        torch.cat([past, found]), borders + [start + end for end in ends[1:]], groups + parts, batch, ranks
    )


def _dealt(
    stage: PreparedPartitions, seeds: Tensor, which: Tensor, batch: int, key: tuple[int, int], drop_last: bool,
    ranks: int,
) -> tuple[Tensor, list[int], list[list[Tensor]]]:  # fmt: skip
    """Positions in ``seeds``, of ``which``, as ``PartitionOrder.seeds``; its borders and groups."""
    groups = stage.all_groups(*key, ranks)
    group_of = torch.empty(stage.stage.partitioning.parts, dtype=torch.int64, device="cpu")
    for index, group in enumerate(groups):
        group_of[group] = index
    of_seed = group_of[_part_of(stage, seeds[which])]
    by_group = which[torch.argsort(of_seed, stable=True)].split(torch.bincount(of_seed, minlength=len(groups)).tolist())
    whole = torch.bincount(group_of[_part_of(stage, seeds)], minlength=len(groups)).tolist()
    steps = [
        own.numel() // batch if drop_last and of_all >= batch else -(-own.numel() // batch)
        for own, of_all in zip(by_group, whole, strict=True)
    ]
    found, borders, kept = [which.new_empty(0)], [0], []
    for chosen in rounds(steps, ranks):
        most = max(steps[index] for index in chosen)
        lanes = which.new_full((ranks, most * batch), -1)
        for lane, index in zip(lanes, chosen, strict=False):
            own = by_group[index][: steps[index] * batch]
            lane[: own.numel()] = own
        found.append(lanes.view(ranks, most, batch).permute(1, 2, 0).reshape(-1))
        borders.append(borders[-1] + most)
        kept.append([groups[index] for index in chosen + chosen[:1] * (ranks - len(chosen))])
    return torch.cat(found), borders, kept


def _part_of(stage: PreparedPartitions, seeds: Tensor) -> Tensor:
    return stage.stage.partitioning.assignment[seeds.to(torch.int64)].to(torch.int64)


def rounds(steps: Sequence[int], ranks: int) -> list[list[int]]:
    """Which groups are trained on at the same time: those with about as many steps, in the order of the first of them.

    Groups without steps are left out; one round at most has fewer groups than there are ranks.
    """
    by_size = sorted((index for index, number in enumerate(steps) if number), key=lambda index: -steps[index])
    found = [sorted(by_size[first : first + ranks]) for first in range(0, len(by_size), ranks)]
    return sorted(found)
