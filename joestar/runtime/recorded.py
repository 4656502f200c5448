"""Training steps as CUDA graphs: recorded once, and again when what they were recorded with has changed."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from joestar.distributed.place import early_word
from joestar.runtime.leaves import Leaves
from joestar.runtime.mailbox import Mailbox
from joestar.runtime.optimizer import gradient_hooks
from joestar.runtime.prefetch import Batch, PrefetchGraphs, fetch, sample
from joestar.runtime.step_graph import StepGraph
from joestar.runtime.verdict import Verdict


def nothing(*given) -> None:
    """What happens around the sum over the ranks where no host waits for a word."""


class RecordedSteps:
    """The part of a ``StepRunner`` that records; state, optimizer, counters and the step itself are the runner's."""

    def drop_graph(self) -> None:
        """Frees the captured graph, if there is one, and what it made ahead."""
        self.ahead.drop()
        graph, self.graph = self.graph, None
        if graph is not None:
            self.optimizer.zero_grad()
            graph.free()

    def _prepare_graph(self) -> None:
        """Captures the step, unless the graph at hand is up to date."""
        program, state = self.executor.program, self.state
        held = self.optimizer.refresh()
        wanted = (program, program.compiles, state.version)
        if held and self.graph is not None and self._captured == wanted:
            return
        self.drop_graph()
        self.optimizer.hold()
        watch = None if self.ranks is None else self.ranks.waiting
        self._mailbox = Mailbox(state.device, len(program.padded.checked), watch)
        self._words = None if self.ranks is None else self.ranks.host_words()

        def rest(batch: Batch) -> None:
            if self.ranks is not None and self._words is None:
                self._step_of_ranks(batch)
                return
            with self._mailbox.open():
                *_, finish = self._forward(batch, self._own_leaves())
            finish()

        with self._raised_flag(), self._untimed(), self.executor.program.fixed_order():
            try:
                self.graph = self._captured_step(functools.partial(sample, program, state), rest)
            except BaseException:
                self.optimizer.zero_grad()  # gradients of the memory that is gone
                raise
        self._mailbox.start()
        program.note_overlap(self.graph.overlapped)
        self.counters.add_time("capture", self.graph.seconds)
        self.counters.captures += 1
        self._captured = wanted

    def _captured_step(
        self, front: Callable[[Tensor], Batch], rest: Callable[[Batch], None]
    ) -> StepGraph | PrefetchGraphs:
        state = self.state
        program = self.executor.program
        if program.halves is None:
            return StepGraph(lambda: rest(front(state.key)), state.device, self.memory)
        far = None if program.halves.far is None else functools.partial(fetch, program)
        return PrefetchGraphs(front, rest, state, self.optimizer.parameters(), self.memory, far)

    def _step_of_ranks(self, batch: Batch) -> None:
        """A captured step whose message says whether it fits on all ranks."""
        bounds = [bound for _, bound in self.executor.program.padded.checked]
        verdict = Verdict(self.ranks.group.add_up, self._mailbox, bounds, early_word() != "0")
        with verdict.asked():
            _, counts, finish = self._forward(batch, self._own_leaves())
        self._join, self._found = verdict.join, functools.partial(verdict.found, counts)
        try:
            finish()
        finally:
            self._join, self._found = nothing, nothing

    def _own_leaves(self) -> Leaves:
        """Of a recording; parameters with hooks on their gradients are differentiated themselves."""
        return Leaves(p for p in self.optimizer.parameters() if p.requires_grad and not gradient_hooks(p))

    @contextlib.contextmanager
    def _raised_flag(self) -> Iterator[None]:
        """Nothing that steps do within may last."""
        self.state.flag.fill_(True)
        try:
            yield
        finally:
            self.state.flag.fill_(self._rehearsing)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        seconds = dict(self.counters.seconds)
        try:
            yield
        finally:
            self.counters.seconds.clear()
            self.counters.seconds.update(seconds)
