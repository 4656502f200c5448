"""Several processes, each with its GPU and a share of every step's seeds, before their first step over macro-batches.

Each plans for its own device, from the sizes and speeds that it finds; what decides about numbers of steps and of draws
(the budget, the seeds of a macro-batch) is agreed on.
"""

import os

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.facts import digest
from joestar.errors import ConfigError
from joestar.profile.numbers import seconds
from joestar.staged.shared import pinned_together
from joestar.stages import Partitions
from joestar.stages.large_batch import use_threads
from joestar.stages.plan import Plan
from joestar.store.pinned import Pinned


class PlanningRanks:
    """What the planners of several processes tell one another.

    Args:
        group: the processes.
    """

    def __init__(self, group: Group):
        self.group = group

    def share(self, seeds: Tensor) -> Tensor:
        """As many of the seeds for every rank: its own ones, and the first again where there is one too few."""
        rank, world = self.group.rank, self.group.world
        own = seeds[rank::world]
        return torch.cat([own, seeds[: -(-seeds.numel() // world) - own.numel()]])

    def least(self, budget: int) -> int:
        """The smallest budget of any rank: with less, a part of the ranks would keep everything on the device."""
        return min(each["budget"] for each in self.group.exchange("memory that ranks may use", {"budget": budget}))

    def best(self, plans: list[Plan | None]) -> Plan | None:
        """The plan of this rank for the size of macro-batches with which the slowest rank is the fastest."""
        own = [None if plan is None else plan.epoch_seconds for plan in plans]
        met = [each["seconds"] for each in self.group.exchange("the size of macro-batches", {"seconds": own})]
        slowest = [None if None in column else max(column) for column in zip(*met, strict=True)]
        fitting = [index for index, value in enumerate(slowest) if value is not None]
        return plans[min(fitting, key=lambda index: slowest[index])] if fitting else None

    def neediest(self, needed: int, error: ConfigError) -> ConfigError:
        """What the rank that needs most has to say of that: the same on all."""
        met = self.group.exchange("memory that macro-batches need", {"needed": needed, "error": str(error)})
        return ConfigError(max(met, key=lambda each: each["needed"])["error"])

    @property
    def hosts(self) -> int:
        """How many there are."""
        return len(set(self.group.hosts))

    def by_host(self, own: dict) -> list[list[dict]]:
        """What the ranks of every host have brought."""
        met = self.group.exchange("memory of the hosts", own | {"host": self.group.host})
        return [[each for each in met if each["host"] == host] for host in dict.fromkeys(each["host"] for each in met)]

    def pin(self, source: Tensor, device: torch.device) -> Pinned:
        """Rows that the ranks of a host read in place, from one copy if they are copied at all."""
        return pinned_together(source, device, self.group)

    def spread(self, plan: Plan) -> str:
        """In words, how the plans of the ranks differ."""
        own = {"hot": plan.hot, "bus": plan.bus, "seconds": plan.epoch_seconds}
        met = self.group.exchange("plans of all ranks", own)
        hot, bus, took = ([each[name] for each in met] for name in ("hot", "bus", "seconds"))
        return (
            f"{self.group.world} ranks, of which this is {self.group.rank}: {min(hot):,} to {max(hot):,} hot nodes, "
            f"{min(bus) / 1e9:.2f} to {max(bus) / 1e9:.2f} GB over the bus, epochs of {seconds(min(took))} to "
            f"{seconds(max(took))}; a step takes what the slowest needs"
        )


class ImaginedRanks(PlanningRanks):
    """One of ``world`` processes, without the others: to plan for them."""

    def __init__(self, world: int):
        self.group = _Imagined(world)

    def spread(self, plan: Plan) -> str:
        """What the plan is of."""
        return f"that is for one of {self.group.world} ranks, with its share of every step"


class _Imagined:
    """A group whose ranks all say the same."""

    def __init__(self, world: int):
        self.rank, self.world, self.host, self.hosts = 0, world, "here", ["here"] * world

    def exchange(self, what: str, brought: dict) -> list[dict]:
        return [brought] * self.world


def imagined(world: int) -> ImaginedRanks:
    """So many processes, of which this one stands for all; the host's CPU threads are divided among them."""
    ranks = ImaginedRanks(world)
    use_threads(max(1, len(cores()) // world))
    return ranks


def check_partitions(group: Group, first_stage, model) -> None:
    """Raises, on all ranks: ``ConfigError`` for statistics of all of them, ``DistributedError`` for other parts."""
    if not isinstance(first_stage, Partitions):
        return
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            f"SyncBatchNorm in {type(model).__name__} does not go with first_stage=joestar.Partitions(...) on several "
            "ranks: a node that one rank computes may be an older row of the history on another, and would count with "
            "either. Use BatchNorm (statistics per rank), or joestar.LargeBatch."
        )
    parts = first_stage.partitioning.assignment
    group.agree("first_stage=joestar.Partitions(...)", {"parts": f"{first_stage.partitioning.parts} #{digest(parts)}"})


def own_threads(group: Group) -> int:
    """CPU threads of this rank's first stage: of every core that it may use, as large a part as others may use it, too.

    torchrun sets ``OMP_NUM_THREADS=1``, which is right for many things, but not for a first stage.
    """
    own = None if "JOESTAR_NUM_THREADS" in os.environ else cores()
    met = group.exchange("cores of the hosts", {"host": group.host, "cores": own})
    if own is None:
        return int(os.environ["JOESTAR_NUM_THREADS"])
    users = [each["cores"] for each in met if each["host"] == group.host and each["cores"] is not None]
    return max(1, int(sum(1 / sum(core in theirs for theirs in users) for core in own) + 1e-6))


def cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
