"""``compile(memory=...)``: a graph on the CPU for a model on another device, resident there if it fits, else staged."""

import copy
import logging
import weakref

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.errors import ConfigError, GraphError, say
from joestar.graph_api import Graph
from joestar.graph_api.arrays import settle_classes
from joestar.profile.ledger import FeedingRecord, Report
from joestar.profile.numbers import human_bytes, parse_bytes
from joestar.runtime.features import check_floating, settle_for_loss
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.modes import check_modules
from joestar.runtime.seeds import CheckedSeeds, check_seeds
from joestar.staged.draws import warn_of_fanouts, warn_of_nodes
from joestar.staged.epoch import TimedEpoch, planned_epoch
from joestar.staged.growth import Growth
from joestar.staged.hidden import hidden_widths
from joestar.staged.partition_planning import PartitionPlanner
from joestar.staged.partitioned import PartitionedStep
from joestar.staged.planning import Planner
from joestar.staged.pure import check_pure
from joestar.staged.several import PlanningRanks, check_partitions, own_threads
from joestar.staged.step import StagedStep, over
from joestar.staged.tables import refuse_tables_of
from joestar.staged.written import Written
from joestar.stages import LargeBatch, Partitions
from joestar.stages.exchange import Exchange
from joestar.stages.large_batch import use_threads
from joestar.step import Step
from joestar.torch_private import tree_map_only
from joestar.whole_numbers import plain

_LOG = logging.getLogger("joestar")
"""Says what was planned, at level INFO, before anything of it is allocated."""


class Staging:
    """Plans, and makes the step.

    Args:
        group: several processes, each with a share of every step's seeds and a plan of its own.

    Attributes:
        plan: what goes where. sampler: the user's, over the graph that programs are compiled on.
    """

    def __init__(self, model, sampler, loss_fn, memory, first_stage, batch_size: int, autocast, tune: bool,
                 deterministic: bool = False, prefetch: bool = False, group: Group | None = None):  # fmt: skip
        if first_stage is not None and not isinstance(first_stage, (LargeBatch, Partitions)):
            raise ConfigError(
                f"first_stage must be a joestar.LargeBatch or joestar.Partitions; got {type(first_stage).__name__}."
            )
        batch_size = plain(batch_size)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be a positive integer; got {batch_size!r}.")
        graph: Graph = sampler.graph
        if graph.device.type != "cpu":
            raise GraphError(
                f"memory= and first_stage= are for a graph on the CPU, whose parts are brought to the model's device; "
                f"the graph is on {graph.device}. Keep it there without memory=, or move it with graph.to('cpu')."
            )
        if tune:
            raise ConfigError(
                "tune=True does not go with memory= and first_stage= yet: tune on a graph that fits, and give "
                "choices=path of step.save_choices."
            )
        settle_classes(graph)
        check_floating(graph)
        if loss_fn is not None:
            settle_for_loss(graph, loss_fn)
        self.users_sampler = sampler
        ranks = None if group is None else PlanningRanks(group)
        budget = free_memory_of(model, group) if memory is None else budget_on(model, memory)
        if group is not None:
            check_partitions(group, first_stage, model)
            use_threads(own_threads(group), host_work=group.device.type == "cuda")
            budget = ranks.least(budget)
        self.exchange: Exchange | None = None
        if isinstance(first_stage, Partitions):
            if loss_fn is None:
                raise ConfigError(
                    "first_stage=joestar.Partitions(...) goes with epochs: give loss_fn and optimizer. A loop of your "
                    "own chooses its seeds itself: take joestar.LargeBatch for it."
                )
            planner = Planner(
                model, sampler, budget, None, batch_size, autocast, reuse=not deterministic, own_book=False, ranks=ranks
            )
            self._over_parts(model, planner, first_stage)
            return
        planner = Planner(
            model, sampler, budget, None, batch_size, autocast, first_stage, reuse=not deterministic, ranks=ranks,
            prefetch=prefetch,
        )  # fmt: skip
        self.plan, self._planner = planner.plan(), planner
        self._keeps_hot = first_stage is not None and first_stage.hot is not None
        _LOG.info("%s", self.plan)
        if self.plan.fits:
            self.arena, self.first_stage = None, None
            self.sampler = over(sampler, graph.to(planner.device))
        else:
            refuse_tables_of(sampler)
            check_pure(sampler)
            warn_of_nodes(sampler, planner.draws)
            check_modules(model, graph)  # the arena's graph shows nothing of it yet
            self.arena = planner.arena(self.plan)
            if group is not None:
                group.exchange("the arena, filled")
            empty = _page_locked if planner.device.type == "cuda" else None
            self.first_stage = LargeBatch() if first_stage is None else copy.copy(first_stage)
            self.first_stage.num_seeds, self.first_stage.empty = self.plan.num_seeds, empty
            planner.tell(self.first_stage)
            self.sampler = over(sampler, self.arena.graph)

    def _over_parts(self, model, planner: Planner, first_stage: Partitions) -> None:
        """As the rest of ``__init__``, for a partition-based first stage."""
        sampler, graph = self.users_sampler, planner.graph
        warn_of_fanouts(sampler, planner.draws, first_stage.fanouts)
        refuse_tables_of(sampler)
        check_modules(model, graph)
        over_parts = partition_planner(planner, first_stage)
        found, self.parts, self._planner = over_parts.plan(), over_parts.stage, planner
        self._keeps_hot = first_stage.hot is not None
        self.plan = found.plan
        _LOG.info("%s", self.plan)
        self.arena = planner.arena(self.plan)
        self.exchange, self.reach = over_parts.exchange(found, self.arena.graph.num_slots), over_parts.reach
        if planner.ranks is not None:
            planner.ranks.group.exchange("the arena, filled")
        number = max(1, self.plan.num_seeds // self.plan.batch) * self.plan.batch
        self.first_stage = LargeBatch(number, empty=_page_locked if planner.device.type == "cuda" else None)
        self.sampler = over(sampler, self.arena.graph)

    def step(self, model, sampler, *given) -> Step:
        """The step, over the sampler of this."""
        if self.plan.fits:
            step = MovedStep(model, sampler, self.users_sampler, *given)
        elif self.exchange is not None:
            stages = self.arena, self.parts, self.first_stage, self.exchange, self.reach
            step = PartitionedStep(model, self.users_sampler, *stages, *given)
        else:
            step = StagedStep(model, self.users_sampler, self.arena, self.first_stage, *given)
        step.plan = self.plan
        if not self.plan.fits:
            history = 0 if self.exchange is None else self.exchange.device.slot_nbytes(len(self.exchange.pulls))
            step.growth = Growth(self._planner, self.arena, self.plan, self._keeps_hot, history)
        return step


def partition_planner(planner: Planner, first_stage: Partitions) -> PartitionPlanner:
    """What plans training over partitions: the graph's nodes are sorted by part, and the model is looked at.

    Raises:
        ConfigError, DataError: as ``Partitions.prepare`` and ``hidden_widths``.
    """
    if len(planner.graph.edata):
        raise ConfigError(
            f"edge data ({', '.join(planner.graph.edata)}) do not travel with partitions yet: take joestar.LargeBatch, "
            "or remove what is not needed from graph.edata."
        )
    planner.repeats = False  # partitions are not drawn by the sampler
    stage = first_stage.prepare(planner.graph, planner.every.unique())
    widths = hidden_widths(planner.model, planner.sampler, planner.every, planner.autocast)
    hops, within = len(widths) + 1, first_stage.fanouts
    if within is not None and len(within) < hops:
        raise ConfigError(
            f"Partitions: ahead= keeps {len(within)} hops, and the sampler makes {hops}: nodes behind them would have "
            f"no neighbours. Give ahead={hops}, or {hops} fanouts."
        )
    return PartitionPlanner(planner, stage, widths)


def _page_locked(number: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(number, dtype=dtype, pin_memory=True, device="cpu")


def budget_on(model, memory: int | str, name: str = "memory") -> int:
    """Bytes of a budget on the model's device.

    Raises:
        ConfigError: it is no size, or a GPU has less in all.
    """
    budget = parse_bytes(memory, name)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return budget
    free, there = torch.cuda.mem_get_info(device)
    if budget > there:
        raise ConfigError(
            f"{name}={human_bytes(budget)} is more than the {human_bytes(there)} that {device} has in all: what is "
            f"planned for would not fit. Give {human_bytes(0.9 * free)}, nine tenths of what is free now, or less; or "
            f"leave {name} out, which takes that."
        )
    ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if budget > free + ours:
        say(
            f"{name}={human_bytes(budget)}, and only {human_bytes(free + ours)} of the memory of {device} are free: "
            "training runs out of memory unless others give some back."
        )
    return budget


def free_memory_of(model, group: Group | None = None) -> int:
    """Bytes that are free on the model's device, less a tenth; of a host's memory, the part of one of its ranks."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    from joestar.runtime.inference import free_memory

    return int(free_memory(device) * 0.9) // (1 if group is None else group.place.local_world)


class MovedStep(Step):
    """A step over a copy of the graph on the model's device; ids and predictions are on the CPU, as the graph is."""

    def __init__(self, model, sampler, users_sampler, *given):
        self._users_sampler, self._times = users_sampler, []
        super().__init__(model, sampler, *given)
        self._written = Written(self.whole)
        self._seeds = _Moved(self._seeds, sampler.graph.device)

    @property
    def whole(self) -> Graph:
        """The user's graph, in host memory."""
        return self._users_sampler.graph

    def _watch(self, loss_fn) -> ChangeGuard:
        return ChangeGuard(self.model, self._users_sampler, self.whole, loss_fn)

    def report(self) -> Report:
        """As ``Step.report``, with the plan."""
        found = super().report()
        measured = planned_epoch(self.plan, self._times, self.graph.device)
        found.feeding = FeedingRecord(str(self.plan), [], {}, {}, measured)
        return found

    def _new_epoch(self, *given, **further) -> TimedEpoch:
        return TimedEpoch(self._times, *given, self._prepare, **further)

    def _check(self, *kinds: str) -> bool:
        if self.graph is not self.whole:
            self._written.check()
        return super()._check(*kinds)

    def _between_steps(self) -> None:
        if self.graph is not self.whole:
            self._written.check(contents=False)
        super()._between_steps()

    def _checked(self, seeds) -> Tensor:
        return check_seeds(seeds, self.whole).to(self.graph.device)

    def predict(self, idx: Tensor, batch_size: int | None = None, full: bool = False):
        """As ``Step.predict``; ``idx`` and what is returned are on the CPU."""
        return tree_map_only(Tensor, lambda t: t.to(self.whole.device), super().predict(idx, batch_size, full))


class _Moved:
    """Checked seeds on another device: the same tensor for the same one."""

    def __init__(self, seeds: CheckedSeeds, device: torch.device):
        self.seeds, self.device = seeds, device
        self._last: tuple | None = None

    def __call__(self, idx) -> Tensor:
        if isinstance(idx, Tensor) and idx.device == self.device:
            idx = idx.cpu()
        checked = self.seeds(idx)
        if self._last is None or self._last[0]() is not checked:
            self._last = weakref.ref(checked), checked.to(self.device)
        return self._last[1]
