"""``StagedStep``: a step over a graph in host memory, whose mini-batches are drawn from macro-batches on the device."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from joestar.distributed.division import seeds_per_rank
from joestar.errors import ConfigError, StageError
from joestar.graph_api import Graph
from joestar.locks import TRACING
from joestar.profile.ledger import Expected, FeedingRecord, Report
from joestar.runtime.epochs import Epoch
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.prediction import PREDICTED, Rows, agree_on, logits
from joestar.runtime.seeds import check_batch_size, check_seeds
from joestar.runtime.state import Run
from joestar.runtime.step_graph import StreamOrder
from joestar.staged.bounds import look_around
from joestar.staged.epoch import StagedEpoch, planned_epoch
from joestar.staged.growth import Growth
from joestar.staged.predicting import Batches, batches_of
from joestar.staged.room import check_room, compare_room, room_of
from joestar.staged.written import Written
from joestar.stages import LargeBatch
from joestar.stages.arena import Arena
from joestar.stages.feed import Feed, NoRoomError, Traffic
from joestar.stages.large_batch import drawn
from joestar.step import Step

PREDICTIONS = -1
"""Epoch of the keys under which macro-batches of predictions are drawn; single steps count down from there."""


SOONER = 4
"""How many times smaller the first macro-batch of an epoch of several is."""


class StagedStep(Step):
    """A compiled step whose graph is larger than the device's memory; made by ``joestar.compile(memory=...)``.

    Works as a ``Step`` does; seeds and predictions are on the CPU, where the graph is. Mini-batches are sampled by the
    compiled step from macro-batches that the first stage samples on the CPU and loads ahead (thesis 5.2.1).

    Attributes:
        growth: makes room for steps that have none; ``None``: they are refused.
    """

    growth: Growth | None = None
    in_pieces = False
    """Whether predictions of more seeds than a planned step has are carried out in pieces: no room is made for them."""

    def __init__(self, model, sampler, arena: Arena, first_stage: LargeBatch, *given):
        self.arena, self.first_stage = arena, first_stage
        self._users_sampler = sampler
        self.traffic = Traffic()
        self._written = Written(sampler.graph, arena.hot_ids)
        self._streams = StreamOrder(arena.device)
        self._last_met: list[dict] = []
        super().__init__(model, over(sampler, arena.graph), *given)
        if self.group is not None and self._runner is not None:
            self._runner.ranks.graph = self.whole

    @property
    def whole(self) -> Graph:
        """The user's graph, in host memory."""
        return self._users_sampler.graph

    @property
    def keeps_data(self) -> bool:
        return False

    def _watch(self, loss_fn) -> ChangeGuard:
        return ChangeGuard(self.model, self._users_sampler, self.whole, loss_fn)

    def _check(self, *kinds: str) -> None:
        self._written.check()
        super()._check(*kinds)

    def _between_steps(self) -> None:
        self._written.check(contents=False)
        super()._between_steps()

    def _feed(self, order: Tensor, batch: int, epoch: int) -> Feed:
        sample = functools.partial(_sample, self.first_stage, self.arena.own_book, self.whole, self._users_sampler)
        steps, total = max(1, self.first_stage.num_seeds // batch), -(-order.numel() // batch)
        key = (self._seed, epoch)
        return Feed(self.arena, sample, order, batch, steps, key, self.traffic, borders(steps, total))

    def report(self) -> Report:
        """As ``Step.report``, with what was planned of macro-batches beside what came of them."""
        found, plan, seen = super().report(), self.plan, self.traffic
        number = self._planned_ones(seen)
        share = 1 - seen.cold / max(1, seen.nodes)
        rows = [
            Expected("nodes", plan.nodes, seen.nodes / number),
            Expected("of these hot, %", 100 * plan.share, 100 * share),
            Expected("to be loaded", plan.nodes * plan.fresh, seen.fresh / number),
            Expected("edges", plan.mean_edges, seen.edges / number),
            Expected("MB over the bus", plan.bus / max(1, plan.macro_batches) / 1e6, seen.bytes / number / 1e6),
        ]
        counts = {
            "macro-batches": seen.macro_batches, "cut": seen.cut, "loaded alone": seen.alone, "made again": seen.again,
        }  # fmt: skip
        if seen.enlarged:
            counts["times room was made"] = seen.enlarged
        found.graph = repr(self.whole)
        found.feeding = FeedingRecord(str(plan) + self._of_all_ranks(), rows, dict(seen.seconds), counts)
        found.feeding.epoch = planned_epoch(plan, self.traffic.epochs, self.graph.device)
        return found

    def _planned_ones(self, seen: Traffic) -> float:
        """How many macro-batches of the planned size were fed: the first of an epoch, its last and cut ones have fewer
        seeds."""
        return max(1, seen.seeds) / max(1, self.plan.num_seeds)

    def _of_all_ranks(self) -> str:
        """How much the ranks had fed when their latest macro-batches began."""
        if not self._last_met:
            return ""
        loaded, cut = ([each[name] for each in self._last_met] for name in ("fresh", "cut"))
        return f"\nso far {min(loaded):,} to {max(loaded):,} rows loaded per rank, {min(cut)} to {max(cut)} cut"

    # --- training ---

    def _new_epoch(self, *given, **further) -> Epoch:
        return StagedEpoch(self, *given, self._prepare, **further)

    def _ready(self, seeds: Tensor, batch: int) -> None:
        """Programs are traced when the first macro-batch is there (``begin``)."""
        self._runner.executor.program.follow_modes()

    def _is_ready(self, batch: int) -> bool:
        return False  # ranks meet once all have their first macro-batch

    def begin(self, feed: Feed, order: Tensor, batch: int, epoch: int, position: int) -> Run:
        """A run over ``order``, of which the macro-batch of step ``position`` is shown."""
        runner = self._runner
        program = runner.executor.program
        own, end = self.divided(order, batch)
        self._look_around(runner.executor, feed, batch, epoch, position)
        first, slots = self._shown(feed, program, batch, epoch, position)
        local = torch.zeros(own.numel(), dtype=slots.dtype, device=slots.device)
        known = self.fill_in(local, feed, batch, first, slots)
        self._check_labels(program, order, slots)
        if runner.ranks is None:
            run = runner.begin(local, batch, epoch, slots)
        else:
            run = runner.begin_own(local, end, order, batch, epoch, slots)
        run.filled = known
        return run

    def _look_around(self, executor, feed: Feed, batch: int, epoch: int, position: int, alike: bool = True) -> None:
        """Bounds are of the batches of several macro-batches, where one has too few."""

        def shown(other: Feed, first: int) -> tuple[int, Tensor]:
            return self._shown(other, executor.program, batch, epoch, first)

        look_around(shown, executor, feed, batch, (self._seed, epoch), position, alike)

    def fill_in(self, local: Tensor, feed: Feed, batch: int, first: int, slots: Tensor) -> slice:
        """Writes the slots of a macro-batch's seeds, the first of which are those of step ``first``, into ``local``."""
        known = slice(first * batch, first * batch + slots.numel())
        local[known] = slots
        return known

    def divided(self, order: Tensor, batch: int) -> tuple[Tensor, int]:
        """This process's seeds of an order: (ids, how many of them are meant)."""
        ranks = self._runner.ranks
        return (order, order.numel()) if ranks is None else ranks.own(order, batch)

    @contextlib.contextmanager
    def at_macro_batches(self) -> Iterator[None]:
        """What is done within may take long, and other ranks wait for it; afterwards nothing of theirs may any more."""
        if self.group is None:
            yield
            return
        with self.group.board.at("its macro-batches", long=True):
            yield
        self.group.board.settle()

    def ensured_together(self, feed: Feed, position: int) -> tuple[int, Tensor] | None:
        """``ensured``, where all ranks have a new macro-batch: the last one that has it lets them go on.

        They would find out in the sum of the next step, where nobody may take long. In the middle of a macro-batch
        that is one which was made before and is made again: on all ranks, as all made the call that took the arena.
        """
        if self.group is None or (position not in feed.borders and feed.arena.held_by(feed)):
            return self.ensured(feed, position)
        with self.at_macro_batches():
            shown = self.ensured(feed, position)
            fed = {"fresh": self.traffic.fresh, "cut": self.traffic.cut}
            try:
                self._last_met = self.group.exchange(f"the macro-batch of step {position}", fed)
            except BaseException:  # the run does not know its seeds' slots
                feed.forget()
                raise
        return shown

    def ensured(self, feed: Feed, position: int) -> tuple[int, Tensor] | None:
        """``feed.ensure``, behind what was launched on another stream; room is made for a step that has none.

        Raises:
            StageError: also where that would take more than the budget.
        """
        while True:
            if self.arena.device.type == "cuda":
                self._streams.follow()
            try:
                return feed.ensure(position)
            except StageError as error:
                short = error.__cause__
                if self.growth is None or not isinstance(short, NoRoomError):
                    raise
            try:
                self.plan = self.growth.make_room(self.plan, short, self._forget_arena)
            except StageError as error:
                raise error from short
            self.traffic.enlarged += 1

    def _forget_arena(self) -> None:
        """Nothing holds on to the arena's tensors: programs are traced anew."""
        for executor in self._executors.values():
            executor.forget()

    def _shown(self, feed: Feed, program, batch: int, epoch: int, position: int) -> tuple[int, Tensor]:
        """The macro-batch of a step, and the program traced on it; with degrees, if that reads them."""
        first, slots = self.ensured(feed, position)
        program.refresh()
        if program.captured is None:
            program.trace(slots[:batch], self._key(epoch))
            reads = any(role.tensor is self.arena.graph.whole_degrees for role in program.lowered_roles)
            others = any(e.program is not program and e.program.captured for e in self._executors.values())
            if reads and not self.arena.with_degrees:
                self.arena.fill_degrees()
                first, slots = feed.again(position)
            self.arena.with_degrees = reads or (others and self.arena.with_degrees)
        return first, slots

    def _key(self, epoch: int) -> Tensor:
        return torch.tensor([self._seed, epoch, 0], dtype=torch.int64, device=self.arena.device)

    def _check_labels(self, program, order: Tensor, slots: Tensor) -> None:
        """Labels of all seeds before the first step, where they are read as they are; else of a macro-batch's."""
        program.check_lookups(slots)
        for loss in program._losses:
            if loss.target is None:
                dataclasses.replace(loss, labels=self.whole.ndata["y"]).check(order)
            else:
                loss.check(slots)

    def swapped(self, run: Run) -> None:
        """Another macro-batch is shown, whose seeds the run knows: what depends on it is computed and checked again."""
        self._written.check(contents=False)
        program, slots = self._runner.executor.program, run.known
        if program.captured is None:  # forgotten, as the arena is another
            program.trace(slots[: run.batch], self._key(run.epoch))
        program.refresh()
        for loss in program._losses:
            if loss.target is not None:
                loss.check(slots)

    def _one_step(self, runner, seeds: Tensor) -> Tensor:
        batch = seeds_per_rank(seeds.numel(), seeds.numel(), runner.world)
        self._agree_on_call(runner, seeds)
        self._ready(seeds, batch)
        number = -1 - self._calls
        own, end = self.divided(seeds, batch)
        with self.at_macro_batches(), contextlib.closing(self._feed(own[:end], batch, number)) as feed:
            run = self.begin(feed, seeds, batch, number, 0)
            loss = runner.take(run)
            self.logged = runner.logged(run)
        return loss

    # --- state ---

    @property
    def _world(self) -> int:
        return 1 if self.group is None else self.group.world

    def state_dict(self) -> dict:
        """As ``Step.state_dict``, with the size of macro-batches: what is drawn depends on it."""
        found = super().state_dict() | {"macro_batch": self.first_stage.num_seeds * self._world}
        return found | room_of(self.plan) if self.group is None else found  # ranks have rooms of their own

    def load_state_dict(self, state: Mapping) -> None:
        """As ``Step.load_state_dict``; macro-batches are as large as they were, whatever was planned here."""
        if isinstance(state, Mapping):
            check_room(state)
        super().load_state_dict(state)
        if "macro_batch" in state:
            self.first_stage.num_seeds = max(1, state["macro_batch"] // self._world)
            if self.group is None:
                if self.growth is not None:
                    self.plan = self.growth.as_in(state, self.plan, self._forget_arena)
                compare_room(state, self.plan)

    # --- inference ---

    def _checked(self, seeds) -> Tensor:
        return check_seeds(seeds, self.whole)

    def _outputs(self, executor, seeds: Tensor):
        number = -1 - self._calls
        with contextlib.closing(self._feed(seeds, seeds.numel(), number)) as feed:
            _, slots = self._shown(feed, executor.program, seeds.numel(), number, 0)
            return logits(executor, slots, executor.program.batch, self._seed, 0, self._calls)

    def predict(self, idx: Tensor, batch_size: int | None = None, full: bool = False):
        """As ``Step.predict``; ``idx`` and what is returned are on the CPU.

        Args:
            batch_size: by default 1,024, or the number of seeds per step that was planned for, if that is smaller.

        Raises:
            ConfigError: for ``full``, which needs the graph on the device.
        """
        seeds = self._seeds(idx)
        batch = min(PREDICTED, self.plan.batch * self._world) if batch_size is None else check_batch_size(batch_size)
        self._check("predict")
        if full:
            raise ConfigError(
                "full=True reads every neighbour of every node, layer by layer, from the model's device: it is not "
                "there for a graph that is larger. Use joestar.inference(model.cpu(), graph), or fanouts of your own."
            )
        batch = min(batch, seeds.numel())
        executor = self._executor("predict")
        if self.group is None:
            results = Rows(seeds.numel(), self.whole.device)
            width = max(1, self.plan.batch) if self.in_pieces else batch
            self._put(results, executor, batches_of(seeds, batch, width))
            return executor.program.assembled(results.tensors)
        return self._predicted_together(executor, seeds, batch)

    def _predicted_together(self, executor, seeds: Tensor, batch: int):
        """Every rank carries out a part; what has more seeds than was planned for, in pieces."""
        group, results = self.group, Rows(seeds.numel(), self.whole.device, torch.zeros)
        agree_on(group, self.model, seeds, batch, self._seed)
        with group.board.at("step.predict or step.evaluate", long=True):
            own = batches_of(seeds, batch, max(1, self.plan.batch), group.rank, group.world)
            if own.starts:
                self._put(results, executor, own)
            else:  # of fewer steps than ranks, this one has none: only shapes are wanted
                some = Rows(batch, self.whole.device)
                self._put(some, executor, batches_of(seeds[: own.width], own.width, own.width))
                results.make(some.tensors)
            group.exchange("the end of step.predict or step.evaluate")
        return executor.program.assembled(group.join_rows(results.tensors))

    def _put(self, results: Rows, executor, batches: Batches) -> None:
        """Carries out batches."""
        width = batches.width
        with contextlib.closing(self._feed(batches.order, width, PREDICTIONS)) as feed:
            slots, first = None, 0
            self._look_around(executor, feed, width, PREDICTIONS, 0)
            for step in range(feed.total):
                if step == 0:
                    first, slots = self._shown(feed, executor.program, width, PREDICTIONS, 0)
                elif (shown := self.ensured(feed, step)) is not None:
                    first, slots = shown
                    executor.program.refresh()
                if first == step and executor.execution == "padded":
                    executor.prepare(slots, width, self._seed, PREDICTIONS)
                start = batches.starts[step]
                part = slots[start - batches.starts[first] :][: batches.counts[step]]
                number = batches.batches[step]
                results.put(start, logits(executor, part, width, self._seed, PREDICTIONS, number, whole=False))


def _sample(first_stage: LargeBatch, picked: bool, whole: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]):
    """A macro-batch; not while a program is traced: ``torch.compiler.is_compiling()`` is true in all threads then."""
    with TRACING:
        return drawn(first_stage, picked, whole, sampler, seeds, key)


def borders(steps: int, total: int) -> list[int]:
    """The first step of every macro-batch of ``steps``, then ``total``.

    Of the first one there is a quarter alone: the sooner steps begin, the less they wait for.
    """
    first = -(-steps // SOONER) if total > steps else steps
    return [0, *range(first, total, steps), total]


def over(sampler, graph: Graph):
    """The sampler as it is, over another graph."""
    other = copy.copy(sampler)
    other.graph = graph
    return other
