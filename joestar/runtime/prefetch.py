"""Samples and rows of the next step, made while this one computes (``joestar.compile(..., prefetch=True)``).

What a batch is made of is a pure function of (seed, epoch, step) and of tensors that no step changes: the front of a
program (``lowering.split``). So it may run a step early. What was made for another step than the one that is asked for
is dropped, and so is what was made from tensors that were written since; the step's own front then runs first.

Launched one by one, fronts and backs run in turn. On a GPU there are two graphs of the front and two of the back, which
take turns, since a back reads what a front has left in its own memory:

    steps' stream    back 0 of step i       back 1 of step i+1     back 0 of step i+2
                   /                    \\ /                    \\ /
    fronts' stream   front 1 of step i+1    front 0 of step i+2    front 1 of step i+3

Where rows come from elsewhere (over a bus, from other GPUs), links work most of the time and the device does not. Then
a front is two graphs: rows are read on the fronts' stream, and what says which is sampled behind the back, a step
earlier, into the place that this back has just left.

    steps' stream    back 0 of step i, samples 0 of step i+2       back 1 of step i+1, samples 1 of step i+3
                   /                                         \\ /                                         \\
    fronts' stream   rows 1 of step i+1                            rows 0 of step i+2

The streams fork before and join behind every step: whoever works on the steps' stream between two steps finds nothing
under way.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joestar.profile.ledger import Counters
from joestar.runtime.program import Program
from joestar.runtime.seeds import version
from joestar.runtime.state import Run, StepState
from joestar.runtime.step_graph import GraphMemory, StepGraph
from joestar.streams import own_stream


@dataclass(frozen=True)
class Batch:
    """Seeds ``[program.batch]``, their true number (0-d int64), and what the program's front gave for them."""

    seeds: Tensor
    count: Tensor
    made: list[Tensor] | None


def read(program: Program, state: StepState, key: Tensor) -> Batch:
    """The batch of the step that ``key`` names, of the run that ``state`` holds; of a whole program its seeds."""
    return fetch(program, sample(program, state, key), key)


def sample(program: Program, state: StepState, key: Tensor) -> Batch:
    """The same, as far as it does not read rows from elsewhere."""
    seeds, count = torch.ops.joestar.take_batch(state.order, state.run, key, program.batch)
    return Batch(seeds, count, None if program.halves is None else program.sampled(seeds, count, key))


def fetch(program: Program, sampled: Batch, key: Tensor) -> Batch:
    """With these rows."""
    if program.halves is None:
        return sampled
    return replace(sampled, made=program.fetched(sampled.seeds, sampled.count, key, sampled.made))


class Ahead:
    """The batch of the next step, where it has been made already, and what it was made for.

    Args:
        state: of the steps.

    Attributes:
        early: of steps that are launched one by one, whether the next front comes before this step's back. It changes
            nothing: the tests have both.
    """

    def __init__(self, state: StepState, counters: Counters):
        self.state, self.counters = state, counters
        self.early = False
        self._made: Batch | None = None
        self._promised: tuple | None = None
        self._sampled: tuple | None = None

    def drop(self) -> None:
        """The next step makes its batch itself."""
        self._made = self._promised = self._sampled = None

    def _facts(self, program: Program, run: Run, position: int) -> tuple | None:
        """What the batch of a step is made from, as far as it can change; ``None`` if that cannot be told."""
        halves, roles = program.halves, program.padded.roles
        inputs = [roles[place].tensor for place in halves.front_inputs if roles[place].held]
        written = [version(tensor) for tensor in inputs]
        if position >= run.steps or None in written:
            return None
        frames = program.graph.ndata, program.graph.edata
        sources = [source.written() for frame in frames for source in getattr(frame, "sources", {}).values()]
        return run, position, program, program.compiles, self.state.holds, written, sources

    def _is_ready(self, program: Program, run: Run) -> bool:
        """Whether the batch at hand is that of the run's next step."""
        promised, self._promised = self._promised, None
        ready = promised is not None and promised == self._facts(program, run, run.position)
        self.counters.prefetched += ready
        return ready

    # --- launched one by one ---

    def batch(self, program: Program, run: Run | None) -> Batch:
        """That of the step which comes next, of this run if there is one."""
        made, self._made = self._made, None
        if program.halves is not None and run is not None and self._is_ready(program, run):
            return made
        return self._read(program, self.state.key)

    @contextlib.contextmanager
    def beside(self, program: Program, run: Run | None) -> Iterator[None]:
        """Makes the batch of the step behind the one that is launched within."""
        wanted = run is not None and program.halves is not None
        if wanted and self.early:
            self._read_next(program, run)
        yield
        if wanted and not self.early:
            self._read_next(program, run)

    def _read_next(self, program: Program, run: Run) -> None:
        facts = self._facts(program, run, run.position + 1)
        if facts is None:
            return
        key = self.state.key.clone()
        key[2] = run.position + 1
        with contextlib.suppress(Exception):  # that step will say what is wrong
            self._made = self._read(program, key)
            self._promised = facts

    def _read(self, program: Program, key: Tensor) -> Batch:
        start = time.perf_counter()
        batch = read(program, self.state, key)
        self.counters.add_time("forward", time.perf_counter() - start)
        return batch

    # --- captured ---

    def launch(self, graph: "StepGraph | PrefetchGraphs", program: Program, run: Run) -> None:
        """The step of a run that comes next."""
        if program.halves is None:
            graph.replay()
            return
        position = run.position
        ready, facts = self._is_ready(program, run), self._facts(program, run, position + 1)
        behind = None if program.halves.far is None else self._facts(program, run, position + 2)
        sampled = ready and facts is not None and self._sampled == facts
        graph.replay(
            ready, None if facts is None else position + 1, sampled, None if behind is None else position + 2
        )  # fmt: skip
        self._promised, self._sampled = facts, behind


class PrefetchGraphs:
    """A step as CUDA graphs that take turns, two of its front (and of what reads far rows) and two of its back.

    Args:
        front: makes the batch that a key names; back: the rest of a step, from its batch. Both as ``step`` of a
            ``StepGraph``.
        state: holds a run. parameters: whose gradients steps leave behind. memory: of the backs, shared with other
            graphs, or ``None``.
        far: adds the rows from elsewhere to what ``front`` made under a key, or ``None``.

    Attributes:
        overlapped: the programs on two streams that are part of the back.
    """

    def __init__(
        self, front: Callable[[Tensor], Batch], back: Callable[[Batch], None], state: StepState,
        parameters: list[Tensor], memory: GraphMemory | None = None,
        far: Callable[[Batch, Tensor], Batch] | None = None,
    ):  # fmt: skip
        start = time.perf_counter()
        self.state, self.device, self.parameters = state, state.device, parameters
        self.keys = [state.key.clone() for _ in range(2)]
        self.stream = own_stream("fronts", state.device)
        self.turn = 0
        self.fronts: list[StepGraph] = []
        self.fars: list[StepGraph] = []
        self.backs: list[StepGraph] = []
        self._sampled: list[Batch | None] = [None, None]
        self._batches: list[Batch | None] = [None, None] if far is not None else self._sampled
        self._gradients: list[list[Tensor | None]] = []
        try:
            self._capture(front, far, back, memory)
        except BaseException:
            self.free()
            raise
        self.overlapped = self.backs[0].overlapped
        self.seconds = time.perf_counter() - start

    def _capture(self, front: Callable, far: Callable | None, back: Callable, memory: GraphMemory | None) -> None:
        # A front must not write where the other one's batch is, nor where a back works beside it: no pool is shared
        # but by the two backs, which leave nothing to each other. Fronts run one after the other: they share tables.
        tables: dict = {}
        for turn in range(2):
            own = GraphMemory()
            own.tables = tables
            self.fronts.append(
                StepGraph(lambda turn=turn: _leave(self._sampled, turn, front(self.keys[turn])), self.device, own, True)
            )
        for turn in range(2):
            self.fronts[turn].replay()  # what was captured has not run yet, and warm-ups read it
            if far is None:
                continue
            self.fars.append(
                StepGraph(
                    lambda turn=turn: _leave(self._batches, turn, far(self._sampled[turn], self.keys[turn])),
                    self.device, GraphMemory(), True, True,
                )
            )  # fmt: skip
            self.fars[turn].replay()
        shared = GraphMemory() if memory is None else memory
        for batch in self._batches:
            self.backs.append(StepGraph(lambda batch=batch: back(batch), self.device, shared))
            self._gradients.append([parameter.grad for parameter in self.parameters])

    def replay(
        self, ready: bool = False, following: int | None = None, sampled: bool = False, behind: int | None = None
    ) -> None:
        """Launches the step that ``state.key`` names on the current stream.

        Args:
            ready: its front has run already, as the following of the step before. following: the step whose front runs
                meanwhile, if any. sampled: that one's samples have been made, as those behind of the step before.
            behind: the step after it, if its samples are to be made.
        """
        main, turn = torch.cuda.current_stream(self.device), self.turn
        if not ready:
            for key in self.keys:
                key.copy_(self.state.key)
            self.fronts[turn].graph.replay()
            if self.fars:
                self.fars[turn].graph.replay()
        if self.fars and following is not None and not sampled:
            self._sample(1 - turn, following)
        if following is not None:
            self.stream.wait_stream(main)
        for parameter, gradient in zip(self.parameters, self._gradients[turn], strict=True):
            parameter.grad = gradient
        if self.fars and following is not None:  # before the back, whose first kernel would fill the device
            with torch.cuda.stream(self.stream):
                self.fars[1 - turn].graph.replay()
        self.backs[turn].replay()
        if following is not None:
            if not self.fars:
                with torch.cuda.stream(self.stream):
                    self._sample(1 - turn, following)
            elif behind is not None:
                self._sample(turn, behind)
            main.wait_stream(self.stream)
            self.turn = 1 - turn

    def _sample(self, turn: int, position: int) -> None:
        """Launches a front for a step of the run."""
        self.keys[turn][2].fill_(position)
        self.fronts[turn].graph.replay()

    def free(self) -> None:
        """Gives the graphs' memory back."""
        for graph in (*self.fronts, *self.fars, *self.backs):
            graph.free()
        self._sampled, self._batches, self._gradients = [None, None], [None, None], []


def _leave(places: list[Batch | None], turn: int, batch: Batch) -> None:
    """Where a captured front, or far part, leaves what it made: the same tensors in every replay."""
    places[turn] = batch
