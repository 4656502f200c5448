"""A feed: the macro-batches of one order of seeds, made ahead of their use and shown in an arena in turn."""

import bisect
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.errors import GraphError, StageError
from joestar.stages.arena import Arena
from joestar.stages.gate import Gate
from joestar.stages.loaded import Loaded, Prepared
from joestar.stages.macro import MacroBatch, Picked
from joestar.stages.pipeline import Pipeline

Sample = Callable[[Tensor, tuple[int, int, int]], MacroBatch | Picked]
"""``sample(seeds, key)``: a first stage; a pure function."""


class NoRoomError(GraphError):
    """The macro-batch of a single step, which cannot be cut, has no room.

    Args:
        text: what it has, and what there is. seeds: of the step ``[n]``. sample: makes it once more of some of these.
    """

    def __init__(self, text: str, seeds: Tensor, sample: Callable[[Tensor], MacroBatch | Picked]):
        super().__init__(text)
        self.seeds, self.sample = seeds, sample


@dataclass
class Piece:
    """Steps that find their seeds and neighbours in one macro-batch, the one of an index: ``[first, last)`` of the
    order."""

    index: int
    first: int
    last: int
    prepared: Prepared | None
    loaded: Loaded | None = None


@dataclass
class Traffic:
    """What feeding has cost so far.

    Attributes:
        macro_batches, seeds, nodes, cold, fresh, edges, bytes: sums over macro-batches; ``cold`` nodes were not among
            the hot ones, ``fresh`` ones were not left by an earlier macro-batch either.
        cut: macro-batches that had no room and were cut in two. alone: that had none beside the one before them, and
            were loaded when that was not used any more. again: that were made again, because something else used the
            arena between two steps. enlarged: times that the arena was divided anew, for a step that had no room.
        seconds: of the first stage and of loading, waiting left out, and how long steps waited.
        epochs: seconds of each whole epoch by the wall clock, with what the loop does between steps.
    """

    macro_batches: int = 0
    seeds: int = 0
    nodes: int = 0
    cold: int = 0
    fresh: int = 0
    edges: int = 0
    bytes: int = 0
    cut: int = 0
    alone: int = 0
    again: int = 0
    enlarged: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epochs: list[float] = field(default_factory=list)

    def add(self, loaded: Loaded) -> None:
        """Counts a macro-batch that was shown."""
        self.macro_batches += 1
        self.seeds += loaded.seeds.numel()
        self.nodes += loaded.nodes
        self.cold += loaded.cold
        self.fresh += loaded.fresh
        self.edges += loaded.edges
        self.bytes += loaded.bytes

    def add_seconds(self, first_stage: float, load: float, waited: float) -> None:
        """Adds the clocks of a pipeline that has ended."""
        for name, value in (("first stage", first_stage), ("load", load), ("steps waited", waited)):
            self.seconds[name] = self.seconds.get(name, 0.0) + value


class Feed:
    """Shows, for every step over an order of seeds, the macro-batch that holds them.

    Macro-batch ``i`` holds the seeds of steps ``[i * steps, (i + 1) * steps)``. While steps run on one, the next is
    being loaded, and the one after it sampled. One that has no room in the arena is cut into halves, down to single
    steps.

    Args:
        sample: the first stage. order: seeds ``[n]`` of the whole graph, on the CPU. batch: seeds of a step; steps: of
            a macro-batch. key: (seed, epoch). traffic: where costs are counted.
        borders: the first step of every macro-batch, then the number of steps, where they are not alike; ``order`` has
            -1 where a step has fewer seeds than others.
        before: called with a macro-batch's index before that one is loaded out of its turn.
    """

    def __init__(
        self, arena: Arena, sample: Sample, order: Tensor, batch: int, steps: int, key: tuple[int, int],
        traffic: Traffic, borders: list[int] | None = None, before: Callable[[int], None] | None = None,
    ):  # fmt: skip
        self.arena, self.traffic = arena, traffic
        self.total = -(-order.numel() // batch)
        self.borders = [*range(0, self.total, steps), self.total] if borders is None else borders
        self.before, self.order = before, order
        self._maker = _Maker(arena, sample, order, batch, self.borders, key, traffic)
        self._gate: Gate | None = None
        self._pipeline: Pipeline | None = None
        self._rest: list[Piece] = []
        self._shown: Piece | None = None

    def ensure(self, step: int) -> tuple[int, Tensor] | None:
        """Shows the macro-batch of a step, unless it is: (the macro-batch's first step, slots of its seeds).

        Raises:
            StageError: if a stage failed; whatever it raised is its cause.
        """
        try:
            return self._ensured(step)
        except BaseException:  # interrupted anywhere: what is shown, and whose turn it is, is not known any more
            self._abandon()
            raise

    def _ensured(self, step: int) -> tuple[int, Tensor] | None:
        arena = self.arena
        if arena.held_by(self) and self._shown is not None and self._shown.first <= step < self._shown.last:
            return None
        if not arena.held_by(self):
            if self._shown is not None:
                self.traffic.again += 1
            self._begin(step)
        while True:
            piece = self._next()
            if piece.first <= step < piece.last:
                break
            if piece.first > step:  # steps went back
                self._begin(step)
            else:
                self._leave()
        arena.show(piece.loaded)
        self._leave()
        self._shown = piece
        self.traffic.add(piece.loaded)
        slots, piece.loaded = piece.loaded.seeds, None
        if piece.last >= self.total:  # the last one: nothing is made any more
            self.close()
        return piece.first, slots

    def _begin(self, step: int) -> None:
        """Takes the arena over, at the macro-batch of a step."""
        previous = None if self.arena.holder is None else self.arena.holder()
        self.arena.holder = weakref.ref(self)  # the threads know the arena: they would keep a dropped feed, and run on
        if previous is not None and previous is not self:
            previous.close()
        self.close()
        self.arena.begin()
        first, count = self.index(step), len(self.borders) - 1
        if self.before is not None:
            self.before(first)
        self._gate, self._shown = Gate(), None
        load, make = _Loader(self.arena, self._gate), functools.partial(self._maker, self._gate)
        make.__name__ = "first stage"
        self._pipeline = Pipeline(make, count, load, start=first, wake=self._gate.close)

    def _next(self) -> Piece:
        if not self._rest:
            self._rest = next(self._pipeline)
        while self._rest[0].loaded is None:  # a part of one that was cut, or alone: its turn was not given away
            self._load_now(self._rest[0])
        return self._rest.pop(0)

    def _load_now(self, piece: Piece) -> None:
        """Loads a macro-batch, beside the steps on the one before or behind them; or cuts it."""
        made, arena = piece.prepared, self.arena
        if made.alone:
            arena.close_epoch()
        piece.loaded = self._gate.pass_through(arena, made)
        if piece.loaded is not None:
            self.traffic.alone += made.alone
            piece.prepared = None
        elif made.alone:
            try:
                self._rest[:1] = self._maker.halves(self._gate, piece)
            except GraphError as error:  # as if the thread of the first stage had seen it
                raise StageError(f"loading failed at item {piece.index}: GraphError: {error}") from error
        else:
            made.alone = True

    def _abandon(self) -> None:
        """Begins anew with the next step."""
        if self.arena.held_by(self):
            self.arena.holder = None
        self.close()

    @property
    def is_cut(self) -> bool:
        """Whether pieces of the macro-batch that is shown are still to be loaded."""
        return bool(self._rest)

    def forget(self) -> None:
        """What is shown did not reach whoever asked for it: the next step loads it again."""
        self._abandon()

    def again(self, step: int) -> tuple[int, Tensor]:
        """Loads the macro-batch of a step once more, as ``ensure``."""
        self._shown = None
        self._begin(step)
        return self.ensure(step)

    def alone(self, step: int) -> "Feed":
        """A feed of the macro-batch of a step and no other, for a look at it: nothing is counted."""
        maker, index = self._maker, self.index(step)
        order, borders = maker.order[: self.borders[index + 1] * maker.batch], self.borders[: index + 2]
        return Feed(self.arena, maker.sample, order, maker.batch, 0, maker.key, Traffic(), borders, self.before)

    def index(self, step: int) -> int:
        """Of the macro-batch of a step."""
        return bisect.bisect_right(self.borders, step) - 1

    def _leave(self) -> None:
        """Lets the next macro-batch be loaded, unless parts of this one are still to come."""
        if not self._rest:
            self._gate.leave()

    def close(self) -> None:
        """Ends the threads; what was loaded ahead is dropped."""
        gate, self._gate = self._gate, None
        pipeline, self._pipeline = self._pipeline, None
        self._rest = []
        if gate is not None:
            gate.close()
        if pipeline is not None:
            pipeline.close()
            first_stage, load, waited = pipeline.seconds().values()
            self.traffic.add_seconds(first_stage, load - gate.waited, waited)

    def __del__(self):
        gate = getattr(self, "_gate", None)
        if gate is not None:
            gate.close()


class _Maker:
    """Macro-batches of a feed, in as many pieces as it takes to fit. It does not hold the feed."""

    def __init__(self, arena, sample, order, batch, borders, key, traffic):
        self.arena, self.sample, self.order, self.batch = arena, sample, order, batch
        self.borders, self.key, self.traffic = borders, key, traffic

    def __call__(self, gate: Gate, index: int) -> list[Piece]:
        """The macro-batch of this index."""
        return self._fitting(gate, index, [(self.borders[index], self.borders[index + 1])])

    def halves(self, gate: Gate, piece: Piece) -> list[Piece]:
        """A macro-batch that has no room, in two at least."""
        return self._fitting(gate, piece.index, self._cut(piece.index, piece.first, piece.last, piece.prepared.size))

    def _fitting(self, gate: Gate, index: int, waiting: list[tuple[int, int]]) -> list[Piece]:
        found = []
        while waiting:
            first, last = waiting.pop()
            key = (*self.key, index)
            macro = self.sample(self._seeds(first, last), key)
            prepared = gate.prepare(self.arena, macro, key)
            if prepared is None:
                waiting += self._cut(index, first, last, macro.size)
            else:
                found.append(Piece(index, first, last, prepared))
        return found

    def _seeds(self, first: int, last: int) -> Tensor:
        seeds = self.order[first * self.batch : last * self.batch]
        return seeds[seeds >= 0]

    def _cut(self, index: int, first: int, last: int, size: str) -> list[tuple[int, int]]:
        """The second half, then the first, of a macro-batch that has ``size``."""
        arena = self.arena
        if last - first == 1:
            seeds, key = self._seeds(first, last), (*self.key, index)
            raise NoRoomError(
                f"the macro-batch of a single step of {seeds.numel():,} seeds has {size}: the arena has room for "
                f"{arena.pool:,} nodes besides the hot ones, and {arena.edges:,} edges{_history_room(arena)}.",
                seeds, lambda some: self.sample(some, key),
            )  # fmt: skip
        self.traffic.cut += 1
        middle = (first + last) // 2
        return [(middle, last), (first, middle)]


def _history_room(arena: Arena) -> str:
    if arena.exchange is None:
        return ""
    tables = arena.exchange.device
    pulls, pushes = (", ".join(f"{rows:,}" for rows in each) for each in (tables.pulls, tables.pushes))
    return f", and for hidden rows, by layer, of {pulls} halo and {pushes} other nodes"


class _Loader:
    """Loads the first piece of every macro-batch as soon as the one before it is shown, if that can be done beside its
    steps. Slots are taken before, while rows of the one before are on their way, if all of that one is loaded here: in
    the order in which macro-batches are used. It does not hold the feed."""

    __name__ = "load"

    def __init__(self, arena: Arena, gate: Gate):
        self.arena, self.gate = arena, gate
        self._whole = False

    def __call__(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, the first of them loaded unless it must be alone."""
        first, prepared = pieces[0], pieces[0].prepared
        with torch.inference_mode(False):
            if self._whole:
                self._take(prepared)
            self.gate.enter()
            if not self._whole:
                self._take(prepared)
            if not prepared.alone:
                first.loaded, first.prepared = self.gate.pass_through(self.arena, prepared), None
        self._whole = len(pieces) == 1 and first.loaded is not None
        return pieces

    def _take(self, prepared: Prepared) -> None:
        if not prepared.alone:
            prepared.alone = not self.gate.take(self.arena, prepared)
