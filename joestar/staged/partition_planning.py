"""What training over partitions takes: macro-batches of an epoch are made, and room for ones like them planned."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joestar.runtime.seeds import spread_nodes
from joestar.staged.hidden_rates import seconds_of_rows, seconds_to_prepare
from joestar.staged.hidden_reach import HiddenReach, takes_one_hop
from joestar.staged.history_ranks import HistoryRanks
from joestar.staged.host_memory import settle_host
from joestar.staged.planning import PLANNING, Planner
from joestar.stages import LargeBatch
from joestar.stages.device_history import DeviceHistory
from joestar.stages.exchange import Exchange, exchanged_rows
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import HistoryRows
from joestar.stages.host_history import HostHistory, divided
from joestar.stages.partition_order import partition_order
from joestar.stages.partitions import PartitionBatch, PreparedPartitions
from joestar.stages.plan import SIGMAS, SLACK, SMALL, Look, Plan, choose, least, shortest, sum_of_largest
from joestar.store.hot import count_needed

PICKED = 3
"""Macro-batches that are made to see how long it takes."""


@dataclass
class PartitionPlan:
    """Where everything goes, and how many hidden rows a macro-batch reads and keeps.

    Attributes:
        plan: of nodes, edges and memory. pulls, pushes: rows of a half of the slices on the device, per layer.
    """

    plan: Plan
    pulls: list[int]
    pushes: list[int]


class PartitionPlanner:
    """Plans the memory of one device for a partition-based first stage.

    Args:
        planner: knows the graph, the model and the budget. stage: prepared for the graph. widths: of hidden layers.

    Attributes:
        reach: which nodes have a row; nodes: their ids, ascending, per layer.
    """

    def __init__(self, planner: Planner, stage: PreparedPartitions, widths: list[int]):
        self.planner, self.stage, self.widths = planner, stage, widths
        one_hop = takes_one_hop(planner.graph, planner.sampler, planner.every, planner.batch, planner.seed)
        if planner.ranks is not None:  # tables are those of all
            met = planner.ranks.group.exchange("how far samplers reach", {"one hop": int(one_hop)})
            one_hop = all(each["one hop"] for each in met)
        self.reach = HiddenReach(stage, len(widths), one_hop)
        self.nodes = self.reach.nodes(planner.every)
        self._rows = HistoryRows(planner.graph.num_nodes, len(widths), self.nodes)

    def plan(self) -> PartitionPlan:
        """The plan.

        Raises:
            ConfigError: it does not fit; with what it would take.
        """
        planner, total, ranks = self.planner, self.planner.seeds.numel(), self.planner.ranks
        macros = self._some()
        number = max(1, round(statistics.fmean(macro.seeds.numel() for macro in macros)))
        if ranks is not None:  # lanes differ, and what predictions draw depends on it
            met = ranks.group.exchange("seeds of a macro-batch", {"number": number})
            number = max(each["number"] for each in met)
        alone, group = self._each_part(), self.stage.stage.group
        some, each = self._exchanged(macros), self._exchanged(alone)
        pulls, pushes = (
            [_room(*sizes, group, nodes.numel()) for *sizes, nodes in zip(a, b, self.nodes, strict=True)]
            for a, b in zip(some, each, strict=True)
        )
        counted = (macros[i % len(macros)].ids for i in range(SMALL))
        score = count_needed(counted, planner.graph.num_nodes)
        making = self._picking() + self._preparing(macros)
        look = Look(
            lambda _, index: macros[index % len(macros)], score, planner.device, planner.reuse, self.stage.stage.hot,
            making,
        )  # fmt: skip
        look.together(alone, group)
        for index in range(SMALL):
            seeds = spread_nodes(planner.batch, planner.graph, planner.seed, index)
            key = (planner.seed, PLANNING, index)
            look.anywhere(LargeBatch(planner.batch).sample(planner.graph, planner.sampler, seeds, key))
        costs = planner.costs()
        history = DeviceHistory.nbytes_of(self.widths, pulls, pushes, self.stage.stage.dtype)
        fixed = costs.fixed | {"history": history}
        rates = [[statistics.fmean(sizes) for sizes in layers] for layers in some]
        pulled, pushed = (
            sum(width * rate for width, rate in zip(self.widths, rates_of, strict=True)) for rates_of in rates
        )
        size, counts = self.stage.stage.dtype.itemsize, [nodes.numel() for nodes in self.nodes]
        hidden = seconds_of_rows(self.widths, self.stage.stage.dtype, counts, *rates, planner.device.type == "cuda")
        costs = replace(
            costs, fixed=fixed, slot=costs.slot + DeviceHistory.slot_nbytes(len(self.widths)), pulled=size * pulled,
            pushed=size * pushed, hidden=hidden,
        )  # fmt: skip
        compute = -(-total // planner.batch) * planner.step_seconds()
        best = shortest if ranks is None else ranks.best
        found = choose(look, [number], costs, planner.budget, total, compute, planner.speeds, best)
        if found is None:
            parts = least(look, number, costs)
            error = planner._too_small(look.shape(number), parts)
            raise error if ranks is None else ranks.neediest(sum(parts.values()), error)
        if ranks is not None:
            found.ranks = ranks.spread(found)
        found.hot_ids, found.batch = look.hottest(found.hot), planner.batch
        found.alone, found.rough = planner.nodes_of_a_batch(), planner.device.type == "cpu"
        hosts = 1 if ranks is None else ranks.hosts
        once = planner.copied() | {"historical embeddings": self._history_bytes(hosts)}
        each = planner.under_way(found) | {"where hidden rows are": self._places_bytes(hosts)}
        return PartitionPlan(settle_host(found, once, each, ranks), pulls, pushes)

    def _history_bytes(self, hosts: int) -> int:
        """Of the tables on this host, one of so many."""
        rows = [-(-nodes.numel() // hosts) for nodes in self.nodes]
        return HistoryStore.nbytes_of(rows, 0, self.widths, self.stage.stage.dtype)

    def _places_bytes(self, hosts: int) -> int:
        """Of what says where rows are, which every process has; over hosts, also which of them has a row."""
        return self._rows.nbytes + (0 if hosts == 1 else HostHistory.places_nbytes(self._rows))

    def _some(self) -> list[PartitionBatch]:
        """Macro-batches of an epoch that is never trained, of this rank: all of them, or the first ``SMALL``."""
        return [make() for make in self._makers(SMALL)]

    def _makers(self, most: int) -> list[Callable[[], PartitionBatch]]:
        """Of the first few of these."""
        planner, key = self.planner, (self.planner.seed, PLANNING)
        rank, world = (0, 1) if planner.ranks is None else (planner.ranks.group.rank, planner.ranks.group.world)
        order = partition_order(self.stage, planner.every, planner.batch, key, ranks=world)
        fed, found = order.fed(rank), []
        for index, groups in enumerate(order.groups[:most]):
            seeds = fed[order.borders[index] * planner.batch : order.borders[index + 1] * planner.batch]
            found.append(functools.partial(self.stage.of, groups[rank], seeds[seeds >= 0], (*key, index)))
        return found

    def _picking(self) -> float:
        """Seconds of a macro-batch when others were made and dropped before it, as in a run. The shortest: what else
        goes on only adds to it."""
        found, makers = [], self._makers(PICKED)
        for make in [makers[0], *makers]:
            start = time.perf_counter()
            make()  # and forgotten
            found.append(time.perf_counter() - start)
        return min(found[1:])

    def _preparing(self, macros: list[PartitionBatch]) -> float:
        """Seconds, the shortest, as of ``_picking``."""
        tried = [seconds_to_prepare(macro, self._rows, self.planner.reuse) for macro in macros[: 1 + PICKED]]
        return min(tried[1:], default=tried[0])

    def _each_part(self) -> list[PartitionBatch]:
        """Every part as a macro-batch, of which any few may come together; none where a macro-batch has but what its
        seeds may reach: cut, it is smaller."""
        if self.stage.stage.fanouts:
            return []
        none = self.planner.every[:0]
        return [
            self.stage.of(torch.tensor([p], device="cpu"), none, (0, 0, p))
            for p in range(self.stage.stage.partitioning.parts)
        ]

    def _exchanged(self, macros: list[PartitionBatch]) -> tuple[list[list[int]], list[list[int]]]:
        """Rows that every macro-batch reads, and that it keeps, per layer."""
        layers = range(len(self.widths))
        sizes = []
        for macro in macros:
            sizes.append([found.counts for found in exchanged_rows(macro, self._rows.tables)])
        return tuple([[size[which][layer] for size in sizes] for layer in layers] for which in (0, 1))

    # --- making ---

    def exchange(self, found: PartitionPlan, slots: int) -> Exchange:
        """Tables on the host and slices on the device."""
        device, stage, ranks = self.planner.device, self.stage.stage, self.planner.ranks
        others = None if ranks is None else HistoryRanks(ranks.group)
        given = {"dtype": stage.dtype, "max_age": stage.max_age, "pinned": device.type == "cuda"}
        of, tables = (self.planner.graph.num_nodes, self.widths), {}
        if others is not None:
            tables = {"empty": others.empty, "shared": True}
        if others is None or others.swap is None:
            store = HistoryStore(*of, self._rows, **given, **tables)
        else:
            store = HostHistory(*of, self.nodes, self._hosts(len(others.ranks_of)), others, **given, **tables)
        on_device = DeviceHistory(slots, self.widths, found.pulls, found.pushes, stage.dtype, device)
        return Exchange(store, on_device, others)

    def _hosts(self, number: int) -> Tensor:
        """int16 ``[num_nodes]``: which of so many hosts has the rows of a node, that of its part."""
        found = self.stage.stage.partitioning
        assignment, load = found.assignment.to(torch.int64), torch.zeros(found.parts, dtype=torch.int64, device="cpu")
        for nodes, width in zip(self.nodes, self.widths, strict=True):  # widths of layers differ, and so do their nodes
            load += width * torch.bincount(assignment[nodes.to(torch.int64)], minlength=found.parts)
        return divided(load, number)[assignment]


def _room(sizes: list[int], parts: list[int], group: int, most: int) -> int:
    """Rows that a macro-batch like these, or of a group of these parts, hardly ever exceeds."""
    sizes = [*sizes, sum_of_largest(parts, group)] if parts else sizes
    mean = statistics.fmean(sizes)
    spread = statistics.stdev(sizes) if len(sizes) > 1 else 0.0
    return min(int(max(max(sizes), mean + SIGMAS * spread) * SLACK) + 64, max(1, most))
