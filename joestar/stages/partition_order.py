"""The order of an epoch over partitions: seeds part by part, every macro-batch from a step of its own on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.stages.partitions import PreparedPartitions


@dataclass(eq=False)
class PartitionOrder:
    """Seeds of an epoch.

    Attributes:
        seeds: ``[steps * batch]``, -1 where a macro-batch's last step has fewer. borders: first step of every
            macro-batch, then the number of steps. groups: the parts of every macro-batch.
    """

    seeds: Tensor
    borders: list[int]
    groups: list[Tensor]

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return self.borders[-1]


def partition_order(
    stage: PreparedPartitions, seeds: Tensor, batch: int, key: tuple[int, int], drop_last: bool = False
) -> PartitionOrder:
    """The order of an epoch: parts grouped at random under ``key`` = (seed, epoch), in every group its seeds as given.

    Groups without seeds make no macro-batch. With ``drop_last`` the last, smaller batch of every macro-batch is left
    out.
    """
    part = stage.stage.partitioning.assignment[seeds.to(torch.int64)].to(torch.int64)
    groups = stage.all_groups(*key)
    group_of = torch.empty(stage.stage.partitioning.parts, dtype=torch.int64, device="cpu")
    for index, group in enumerate(groups):
        group_of[group] = index
    of_seed = group_of[part]
    by_group = seeds[torch.argsort(of_seed, stable=True)].split(torch.bincount(of_seed, minlength=len(groups)).tolist())
    found, borders, kept = [seeds.new_empty(0)], [0], []
    for group, own in zip(groups, by_group, strict=True):
        steps = own.numel() // batch if drop_last else -(-own.numel() // batch)
        if not steps:
            continue
        own = own[: steps * batch]
        found += [own, own.new_full((steps * batch - own.numel(),), -1)]
        borders.append(borders[-1] + steps)
        kept.append(group)
    return PartitionOrder(torch.cat(found), borders, kept)
