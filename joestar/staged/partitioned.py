"""``PartitionedStep``: training over groups of parts, with historical embeddings of what lies outside of them."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from joestar.errors import CheckpointError
from joestar.locks import TRACING
from joestar.profile.ledger import HistoryRecord, Report
from joestar.runtime.seeds import shuffled
from joestar.runtime.state import Run
from joestar.staged.epoch import StagedEpoch
from joestar.staged.hidden import exchanging
from joestar.staged.hidden_reach import HiddenReach
from joestar.staged.step import StagedStep
from joestar.stages import LargeBatch
from joestar.stages.arena import Arena
from joestar.stages.exchange import Exchange, seen_by
from joestar.stages.feed import Feed
from joestar.stages.partition_order import Lanes, PartitionOrder, partition_order
from joestar.stages.partitions import PartitionBatch, PreparedPartitions


class PartitionedStep(StagedStep):
    """A step over partitions (thesis 5.2.2); made by ``joestar.compile(first_stage=joestar.Partitions(...))``.

    Epochs go over random groups of parts. Hidden rows of halo nodes come from a history (``joestar.nn.historical``),
    which the steps keep up. Single steps, predictions and scores draw macro-batches as ``LargeBatch`` does, and neither
    read nor write the history.

    Several ranks train on groups of their own at the same time; the history is one (``stages.exchange``).
    """

    in_pieces = True

    def __init__(
        self, model, sampler, arena: Arena, stage: PreparedPartitions, others: LargeBatch, exchange: Exchange,
        reach: HiddenReach, *given,
    ):  # fmt: skip
        self.stage, self.exchange, self.reach = stage, exchange, reach
        arena.bring_history(exchange)
        self._training = exchanging(sampler, arena.graph, exchange.device.tables)
        super().__init__(model, sampler, arena, others, *given)
        self._runner.push = exchange.device.push

    def _sampler_of(self, kind: str):
        return self._training if kind == "train" else self.sampler

    def _new_epoch(self, *given, **further) -> "PartitionedEpoch":
        return PartitionedEpoch(self, *given, self._prepare, **further)

    def _going_on(self, under_way: dict) -> dict:
        lanes = under_way.get("lanes", [(0, 1, under_way["batch_size"])])
        return super()._going_on(under_way) | {"lanes": [tuple(entry) for entry in lanes]}

    def _most_steps(self, idx: Tensor, batch: int, drop_last: bool) -> int:
        """One more for every group of parts, whose last batch may be smaller (with ``drop_last``: of those that may
        have fewer seeds than a batch); of several ranks, what the one takes that has the groups with the most seeds."""
        stage, own = self.stage.stage, batch // self._world
        seeds, number = idx.numel(), stage.partitioning.parts
        groups = min(-(-number // stage.group), seeds)
        parts = torch.bincount(stage.partitioning.assignment[idx.long()].long(), minlength=number)
        least = number % stage.group or stage.group
        if self._world > 1:
            least = number // min(number, -(-groups // self._world) * self._world)
        some_are_small = int(parts.topk(least, largest=False).values.sum()) < own
        most = seeds // own + (0 if drop_last and not some_are_small else groups)
        if self._world == 1:
            return most
        largest = int(parts.topk(min(stage.group, number)).values.sum())
        of_each = max(1, largest // own) if drop_last else -(-largest // own)
        return min(most, -(-groups // self._world) * of_each)

    def part_order(
        self, seeds: Tensor, batch: int, epoch: int, shuffle: bool, drop_last: bool, before: Sequence[Lanes] = (),
        position: int = 0,
    ) -> PartitionOrder:  # fmt: skip
        """The order of an epoch over ``seeds``."""
        order = shuffled(seeds, self._seed, epoch) if shuffle else seeds
        key = self._seed, epoch
        return partition_order(self.stage, order, batch, key, drop_last, self._world, before, position)

    def part_feed(self, order: PartitionOrder, epoch: int) -> Feed:
        """The macro-batches of an epoch, those of this rank."""
        base, rank = self.exchange.number_epoch(epoch), 0 if self.group is None else self.group.rank
        sample = functools.partial(
            _sample, self.stage, [parts[rank] for parts in order.groups], base, self.exchange.expect
        )
        return Feed(
            self.arena, sample, order.fed(rank), order.batch, 0, (self._seed, epoch), self.traffic, order.borders,
            self.exchange.begin,
        )  # fmt: skip

    def fill_in(self, local: Tensor, feed: Feed, batch: int, first: int, slots: Tensor) -> slice:
        """As ``StagedStep.fill_in``, where steps have fewer seeds than ``batch``: others' places get the first one."""
        last = next((border for border in feed.borders if border > first), feed.total)
        known = torch.nonzero(feed.order[first * batch : last * batch] >= 0).flatten()[: slots.numel()]
        start, count = first * batch, slots.numel()
        filled = slice(start, (first + int(known[-1]) // batch + 1) * batch)
        local[filled] = slots[0]
        if int(known[-1]) == count - 1:  # only the last step has fewer: nothing waits for the device
            local[start : start + count] = slots
        else:
            local[start + known.to(local.device)] = slots
        return filled

    def begin(self, feed: Feed, order: Tensor, batch: int, epoch: int, position: int) -> Run:
        """As ``StagedStep.begin``; bounds are those of batches whose halo nodes all have a row."""
        tables = self.exchange.device.tables
        tables.everything = True
        try:
            return super().begin(feed, order, batch, epoch, position)
        finally:
            tables.everything = False

    def _look_around(self, executor, feed: Feed, *given) -> None:
        """Groups of parts differ. A look at one sets the history back, so that there must be none yet; several ranks
        have a group each, and agree on bounds. Predictions are of nodes from anywhere."""
        if feed.before is None:
            super()._look_around(executor, feed, *given)
        elif self.group is None and executor.lacks_bounds and self.exchange.is_new:
            with self.exchange.looking():
                super()._look_around(executor, feed, *given, alike=False)

    def _check_labels(self, program, order: Tensor, slots: Tensor) -> None:
        super()._check_labels(program, order[order >= 0], slots)

    def restart(self, seed: int | None = None) -> None:
        """As ``Step.restart``; hidden rows are forgotten. All ranks call it together."""
        if self.exchange.ranks is not None:  # rows of one are those of all
            self.exchange.ranks.any("step.restart over partitions, which all ranks call", False)
        super().restart(seed)
        self._nobody_loads()
        self.exchange.clear()

    def _nobody_loads(self) -> None:
        """Waits for a thread of an epoch that was left, which may still read and write rows."""
        with self.arena.loading:
            pass

    # --- state ---

    @property
    def keeps_history(self) -> bool:
        return True

    @property
    def state_of_all(self) -> bool:
        """Every rank knows what it has pushed."""
        return self.group is not None

    def state_dict(self) -> dict:
        """As ``StagedStep.state_dict``, with the history: tables are not copied, nor changed before the next step.

        All ranks call it together. Over several hosts tables are copied to rank 0, whose state is the whole one, and
        the macro-batch in use is made again for the next step.
        """
        found = super().state_dict()
        feed = None if self.arena.holder is None else self.arena.holder()
        cut = feed is not None and feed.before is not None and feed.is_cut
        if self.exchange.apart is not None:  # nobody writes to the tables of another host meanwhile
            if feed is not None:
                feed.forget()
            self._nobody_loads()
        with self._long("step.state_dict over partitions"):
            history = self.exchange.state_dict(cut, f"after {found['epochs']} epochs, {steps_taken(found)} steps")
        return found | {"history": history | {"parts": self._digest()}}

    def load_state_dict(self, state: Mapping) -> None:
        """As ``StagedStep.load_state_dict``.

        Raises:
            CheckpointError: also if it was saved without a history, or over other partitions.
        """
        history = state.get("history") if isinstance(state, Mapping) else None
        self.exchange.check_state(history)
        if history.get("parts") != self._digest():
            raise CheckpointError(
                "the checkpoint is of training over other partitions, groups or hubs: expected those it was saved with."
            )
        super().load_state_dict(state)
        self._nobody_loads()
        with self._long("step.load_state_dict over partitions"):
            self.exchange.load_state_dict(history)

    def _long(self, what: str) -> contextlib.AbstractContextManager:
        """What other ranks wait for, however large tables are."""
        return contextlib.nullcontext() if self.group is None else self.group.board.at(what, long=True)

    def _digest(self) -> str:
        """Of all that decides which macro-batch has which rows."""
        found = hashlib.blake2b(digest_size=16)
        found.update(self.stage.stage.partitioning.assignment.numpy().tobytes())
        found.update(self.stage.hubs.to(torch.int64).numpy().tobytes())
        found.update(repr(self.stage.stage.settings).encode())
        return found.hexdigest()

    def report(self) -> Report:
        """As ``StagedStep.report``, with how old the rows were that came from the history."""
        found, exchange = super().report(), self.exchange
        found.feeding.history = [
            HistoryRecord(
                layer, table.shape[1], exchange.store.num_rows[layer], exchange.store.pushed_rows(layer), pulls.rows,
                pulls.missing, pulls.too_old, pulls.mean_age, pulls.oldest, pulls.rows / max(1, exchange.nodes),
            )
            for layer, (table, pulls) in enumerate(zip(exchange.store.tables, exchange.pulls, strict=True))
        ]  # fmt: skip
        return found


class PartitionedEpoch(StagedEpoch):
    """An epoch over partitions: as many steps as the parts' seeds make, none of which crosses two macro-batches."""

    def __init__(self, step: PartitionedStep, *given, lanes: list[Lanes] | None = None, **further):
        super().__init__(step, *given, **further)
        step.reach.check(self.seeds, step.exchange.store)
        self._orders: dict[int, PartitionOrder] = {}
        self._counts: list[int] = []
        self._begin_lanes(lanes or [], (step._world, self.batch_size))

    def _begin_lanes(self, before: list[Lanes], now: tuple[int, int]) -> None:
        """Who has carried out which steps of this epoch: what other numbers of ranks have begun is divided anew."""
        before = [lanes for lanes in before if lanes[0] < self._position]
        if before and before[-1][1:] == now:
            self.lanes = before
        else:
            self.lanes = [*before, (self._position, *now)]

    def _in_parts(self) -> PartitionOrder:
        number = self._step._epochs if self.number < 0 else self.number
        if number not in self._orders:
            self._orders = {
                number: self._step.part_order(
                    self.seeds, self.batch_size, number, self.shuffle, self.drop_last, self.lanes[:-1],
                    self.lanes[-1][0],
                )
            }  # fmt: skip
        return self._orders[number]

    def state_dict(self) -> dict:
        """As ``Epoch.state_dict``, with the numbers of ranks that the steps so far had."""
        return super().state_dict() | {"lanes": [list(lanes) for lanes in self.lanes]}

    @property
    def steps(self) -> int:
        """Steps of the whole epoch."""
        return self._in_parts().steps

    def _order(self) -> Tensor:
        return self._in_parts().seeds

    def _started(self, order: Tensor) -> Run:
        step = self._step
        self._seeds_in_order, _ = step.divided(order, self.batch_size)
        self._feed = step.part_feed(self._in_parts(), self.number)
        self._counts = (self._feed.order.view(-1, self.batch_size) >= 0).sum(1).tolist()
        with step.at_macro_batches():
            return step.begin(self._feed, order, self.batch_size, self.number, self._position)

    def _ahead(self) -> None:
        self._step.exchange.check_turn(self.number)
        super()._ahead()
        self._end_at_seeds(self._run)

    def _end_at_seeds(self, run: Run) -> None:
        """The run ends behind the seeds of the next step, if there are fewer than in others; else behind it."""
        first, count = run.position * run.batch, self._counts[run.position]
        if count == run.batch and run.end is not None and run.end >= first + count:
            return
        end = first + count if count < run.batch else run.filled.stop
        if end != run.end:
            run.end = end
            self._runner.state.let_go()

    def _taken(self, position: int) -> Tensor:
        seeds = super()._taken(position)
        return seeds[seeds >= 0]


def steps_taken(state: dict) -> list[int]:
    """Of the epochs that are under way in a state."""
    return [epoch["position"] for epoch in state["under_way"]]


def _sample(
    stage: PreparedPartitions, groups: list[Tensor], base: int, expect: Callable[[PartitionBatch], None],
    seeds: Tensor, key: tuple[int, int, int],
) -> PartitionBatch:  # fmt: skip
    index = key[2]
    with TRACING:  # as ``staged.step``
        found = stage.of(groups[index], seeds, key, number=base + index, sees=seen_by(base, index))
    expect(found)  # first the whole one, then pieces of it
    return found
