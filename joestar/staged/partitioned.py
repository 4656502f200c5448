"""``PartitionedStep``: training over groups of parts, with historical embeddings of what lies outside of them."""

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from joestar.errors import CheckpointError
from joestar.locks import TRACING
from joestar.profile.ledger import HistoryRecord, Report
from joestar.runtime.seeds import shuffled
from joestar.runtime.state import Run
from joestar.staged.hidden import exchanging
from joestar.staged.step import StagedEpoch, StagedStep
from joestar.stages import LargeBatch
from joestar.stages.arena import Arena
from joestar.stages.exchange import Exchange, seen_by
from joestar.stages.feed import Feed
from joestar.stages.partition_order import PartitionOrder, partition_order
from joestar.stages.partitions import PreparedPartitions


class PartitionedStep(StagedStep):
    """A step over partitions (thesis 5.2.2); made by ``joestar.compile(first_stage=joestar.Partitions(...))``.

    Epochs go over random groups of parts. Hidden rows of halo nodes come from a history (``joestar.nn.historical``),
    which the steps keep up. Single steps, predictions and scores draw macro-batches as ``LargeBatch`` does, and neither
    read nor write the history.
    """

    def __init__(
        self, model, sampler, arena: Arena, stage: PreparedPartitions, others: LargeBatch, exchange: Exchange, *given
    ):
        self.stage, self.exchange = stage, exchange
        arena.exchange = exchange
        self._training = exchanging(sampler, arena.graph, exchange.device.tables)
        super().__init__(model, sampler, arena, others, *given)
        self._runner.push = exchange.device.push

    def _sampler_of(self, kind: str):
        return self._training if kind == "train" else self.sampler

    def _new_epoch(self, *given, **further) -> "PartitionedEpoch":
        return PartitionedEpoch(self, *given, self._prepare, **further)

    def _most_steps(self, seeds: int, batch: int, drop_last: bool) -> int:
        """One more for every group of parts, whose last batch may be smaller."""
        stage = self.stage.stage
        groups = min(-(-stage.partitioning.parts // stage.group), seeds)
        return seeds // batch + (0 if drop_last else groups)

    def part_order(self, seeds: Tensor, batch: int, epoch: int, shuffle: bool, drop_last: bool) -> PartitionOrder:
        """The order of an epoch over ``seeds``."""
        order = shuffled(seeds, self._seed, epoch) if shuffle else seeds
        return partition_order(self.stage, order, batch, (self._seed, epoch), drop_last)

    def part_feed(self, order: PartitionOrder, batch: int, epoch: int) -> Feed:
        """The macro-batches of an epoch."""
        base = self.exchange.number_epoch(epoch)
        sample = functools.partial(_sample, self.stage, order.groups, base)
        return Feed(
            self.arena, sample, order.seeds, batch, 0, (self._seed, epoch), self.traffic, order.borders,
            self.exchange.begin,
        )  # fmt: skip

    def begin(self, feed: Feed, order: Tensor, batch: int, epoch: int, position: int) -> Run:
        """As ``StagedStep.begin``; bounds are those of batches whose halo nodes all have a row."""
        tables = self.exchange.device.tables
        tables.everything = True
        try:
            return super().begin(feed, order, batch, epoch, position)
        finally:
            tables.everything = False

    def _check_labels(self, program, order: Tensor, slots: Tensor) -> None:
        super()._check_labels(program, order[order >= 0], slots)

    def restart(self, seed: int | None = None) -> None:
        """As ``Step.restart``; hidden rows are forgotten."""
        super().restart(seed)
        self.exchange.clear()

    # --- state ---

    def state_dict(self) -> dict:
        """As ``StagedStep.state_dict``, with the history: tables are not copied, nor changed before the next step."""
        return super().state_dict() | {"history": self.exchange.state_dict() | {"parts": self._digest()}}

    def load_state_dict(self, state: Mapping) -> None:
        """As ``StagedStep.load_state_dict``.

        Raises:
            CheckpointError: also if it was saved without a history, or over other partitions.
        """
        history = state.get("history") if isinstance(state, Mapping) else None
        if history is not None and history.get("parts") != self._digest():
            raise CheckpointError(
                "the checkpoint is of training over other partitions, groups or hubs: expected those it was saved with."
            )
        self.exchange.check_state(history)
        super().load_state_dict(state)
        self.exchange.load_state_dict(history)

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
                layer, table.shape[1], exchange.store.num_rows, exchange.store.pushed_rows(layer), pulls.rows,
                pulls.missing, pulls.too_old, pulls.mean_age, pulls.oldest, pulls.rows / max(1, exchange.nodes),
            )
            for layer, (table, pulls) in enumerate(zip(exchange.store.tables, exchange.pulls, strict=True))
        ]  # fmt: skip
        return found


class PartitionedEpoch(StagedEpoch):
    """An epoch over partitions: as many steps as the parts' seeds make, none of which crosses two macro-batches."""

    def __init__(self, step: PartitionedStep, *given, **further):
        super().__init__(step, *given, **further)
        self._orders: dict[int, PartitionOrder] = {}

    def _in_parts(self) -> PartitionOrder:
        number = self._step._epochs if self.number < 0 else self.number
        if number not in self._orders:
            self._orders = {
                number: self._step.part_order(self.seeds, self.batch_size, number, self.shuffle, self.drop_last)
            }
        return self._orders[number]

    @property
    def steps(self) -> int:
        """Steps of the whole epoch."""
        return self._in_parts().steps

    def _order(self) -> Tensor:
        return self._in_parts().seeds

    def _started(self, order: Tensor) -> Run:
        self._seeds_in_order = order
        self._feed = self._step.part_feed(self._in_parts(), self.batch_size, self.number)
        run = self._step.begin(self._feed, order, self.batch_size, self.number, self._position)
        run.end = run.filled.stop
        return run

    def _ahead(self) -> None:
        self._step.exchange.check_turn(self.number)
        super()._ahead()
        self._run.end = self._run.filled.stop

    def _taken(self, position: int) -> Tensor:
        seeds = super()._taken(position)
        return seeds[seeds >= 0]


def _sample(stage: PreparedPartitions, groups: list[Tensor], base: int, seeds: Tensor, key: tuple[int, int, int]):
    index = key[2]
    with TRACING:  # as ``staged.step``
        return stage.of(groups[index], seeds, key, number=base + index, sees=seen_by(base, index))
