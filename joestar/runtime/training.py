"""The training step: batch, forward, backward, clipping, optimizer, with a sticky overflow flag (decision 4).

Everything that a step changes lives in tensors on the device and is predicated on ``ok``: while the flag is set, steps
that were launched meanwhile change nothing. The host looks at the flag now and then, redoes the batch that did not fit
exactly, clears the flag and launches the rest again: the result equals an exact-only run. On a GPU the step is one CUDA
graph, and its last node copies the flag to host memory: looking at it waits for nothing.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from joestar.profile.sizes import step_key
from joestar.runtime.executor import Executor
from joestar.runtime.optimizer import SkippableOptimizer
from joestar.runtime.seeds import shuffled
from joestar.runtime.state import StepState
from joestar.runtime.step_graph import GraphMemory, StepGraph


class Trainer:
    """Training steps over shuffled seeds.

    Args:
        executor: of the ``train`` program; optimizer: wrapped by ``SkippableOptimizer``; seed: first word of the key.
        check_every: steps between two looks at the flag; ``None``: every step, on a GPU without waiting for it.
        cuda_graph: whether padded steps on a GPU are captured.

    Attributes:
        memory: what the captured graph shares with others, ``None`` for nothing.
    """

    def __init__(
        self, executor: Executor, optimizer: SkippableOptimizer, seed: int, check_every: int | None, cuda_graph: bool
    ):
        self.executor = executor
        self.optimizer = optimizer
        self.counters = executor.counters
        self.state = StepState(seed, executor.device)
        self.waits = check_every is not None or not cuda_graph
        self.check_every = check_every or 1
        self.cuda_graph = cuda_graph
        self.graph: StepGraph | None = None
        self._captured: tuple = ()
        self.memory: GraphMemory | None = None
        executor.before_compile.append(self.drop_graph)
        self._seen = torch.zeros(2, dtype=torch.int64, pin_memory=cuda_graph, device="cpu")
        self._one: Tensor | None = None
        self._flag_seen = self._seen.numpy()

    @property
    def key(self) -> Tensor:
        """(seed, epoch, step), int64 ``[3]``."""
        return self.state.key

    @property
    def flag(self) -> Tensor:
        """The sticky overflow flag, 0-d bool."""
        return self.state.flag

    def restart(self, seed: int) -> None:
        """Forgets the optimizer's state and draws under another seed."""
        self.optimizer.reset()
        self.key.copy_(step_key(seed, 0, 0, self.executor.device))
        self.flag.zero_()

    def drop_graph(self) -> None:
        """Frees the captured graph, if there is one."""
        graph, self.graph = self.graph, None
        if graph is not None:
            self.optimizer.zero_grad()
            graph.free()

    def epoch(self, seeds: Tensor, batch: int, epoch: int, shuffle: bool) -> Iterator[Tensor]:
        """Trains over the seeds once; yields the loss of every step, a 0-d view into one array of the epoch."""
        self.key.copy_(step_key(int(self.key[0]), epoch, 0, self.executor.device))
        order = shuffled(seeds, self.key) if shuffle else seeds
        self.executor.prepare(order, batch, self.key)
        steps = -(-order.numel() // batch)
        if steps == 1 and self.graph is not None:
            batch = max(batch, self._captured[0])
        run = _Epoch(order, batch, steps, self.state.begin(order, steps, self._num_sets()))
        self._prepare_graph(run)
        try:
            for position in range(run.steps):
                self._launch(run)
                run.launched += 1
                if self._must_settle(run):
                    self._settle(run)
                yield run.losses[position]
        finally:
            if not sys.is_finalizing():
                with _without_tracing():
                    self._settle(run)

    def rehearsal(self, order: Tensor, batch: int) -> Callable[[], None]:
        """A function that carries out a whole step with the flag set: it takes as long, and changes nothing.

        The optimizer may allocate its state, as zeros, and gradients are left behind. The program must be compiled.
        """
        steps = -(-order.numel() // batch)
        run = _Epoch(order, batch, steps, self.state.begin(order, steps, self._num_sets()))
        self.flag.fill_(True)
        self._prepare_graph(run)
        return lambda: self._launch(run)

    def _num_sets(self) -> int:
        padded = self.executor.program.padded
        return 0 if padded is None else len(padded.checked)

    def _must_settle(self, run: "_Epoch") -> bool:
        if run.launched == run.steps:
            return True
        if self.waits or self.executor.execution == "exact":
            return run.launched - run.done >= self.check_every
        return bool(self._flag_seen[0])

    # --- one step ---

    def _launch(self, run: "_Epoch") -> None:
        """One step on the device; it changes nothing if the flag is set or becomes set."""
        if self.executor.execution == "exact":
            self._exact(run)
        elif self.cuda_graph:
            if self.optimizer.refresh() or self.graph is None:
                self._prepare_graph(run)
            self.graph.replay()
        else:
            self._step(run.batch)

    def _step(self, batch: int) -> None:
        """The padded step, launched operation by operation."""
        ops, state, program = torch.ops.joestar, self.state, self.executor.program
        start = time.perf_counter()
        seeds, count = ops.take_batch(state.order, state.num_seeds, state.key, batch, program.batch)
        (loss,), counts, ok = program.step(seeds, count, state.key, state.flag)
        self._update(loss, ok, time.perf_counter() - start)
        ops.finish_step(
            state.key, state.flag, state.losses, state.history, state.progress, state.offset, loss.detach(), ok, counts
        )

    def _update(self, loss: Tensor, ok: Tensor, forward: float) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        if self._one is None or self._one.dtype != loss.dtype:
            self._one = torch.ones_like(loss, requires_grad=False)
        loss.backward(self._one)  # autograd would make a one in every step
        backward = time.perf_counter()
        self.optimizer.step(ok)
        self.counters.add_time("forward", forward)
        self.counters.add_time("backward", backward - start)
        self.counters.add_time("optimizer", time.perf_counter() - backward)

    def _prepare_graph(self, run: "_Epoch") -> None:
        """Captures the step, unless the graph at hand is up to date."""
        if not self.cuda_graph or self.executor.execution == "exact":
            return
        wanted = (run.batch, self.executor.program.compiles, self.state.version, self.optimizer.fingerprint())
        if self.graph is not None and self._captured == wanted:
            return
        self.drop_graph()
        seconds = dict(self.counters.seconds)

        def step():
            self._step(run.batch)
            self._seen.copy_(self.state.progress, non_blocking=True)

        raised = self.flag.clone()
        self.flag.fill_(True)  # nothing that the warm-up does may last
        try:
            self.graph = StepGraph(step, self.executor.device, self.memory)
        finally:  # out of memory, or interrupted: the next use captures again
            self.flag.copy_(raised)
        self.executor.program.note_overlap(self.graph.overlapped)
        self._flag_seen[:] = 0
        self.counters.seconds.clear()
        self.counters.seconds.update(seconds)
        self.counters.add_time("capture", self.graph.seconds)
        self.counters.captures += 1
        self._captured = (*wanted[:3], self.optimizer.fingerprint())

    # --- what did not fit ---

    def _settle(self, run: "_Epoch") -> None:
        """Makes sure that every launched step has happened."""
        while True:
            if bool(self.flag):
                self._redo(run)
            elif int(self.key[2]) == run.launched:
                break
            else:
                self._launch(run)
        for counts in self.state.history[run.done : run.launched].tolist():
            if counts and counts[0] >= 0:
                self.executor.note(counts)
        self.counters.steps += run.launched - run.done
        run.done = run.launched

    def _redo(self, run: "_Epoch") -> None:
        """Carries out the batch that overflowed exactly, and clears the flag."""
        self.counters.fallbacks += 1
        self.flag.zero_()
        self._exact(run)
        self._flag_seen[:] = 0
        compiles = self.executor.program.compiles
        self.executor.after_overflow()
        if self.executor.program.compiles != compiles:
            self.state.expect(run.steps, self._num_sets())
            self._prepare_graph(run)

    def _exact(self, run: "_Epoch") -> None:
        step = int(self.key[2])
        start = time.perf_counter()
        (loss,) = self.executor.exact(run.order[step * run.batch : (step + 1) * run.batch], self.key)
        self._update(loss, torch.ones_like(self.flag), time.perf_counter() - start)
        run.losses[step] = loss.detach()
        self.key[2] += 1
        self.counters.exact_steps += 1


@contextlib.contextmanager
def _without_tracing() -> Iterator[None]:
    """Real tensors within: an abandoned epoch may be closed, by the garbage collector, while another program is traced,
    and even within an operation on its shapes."""
    shapes_only = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(False)
    try:
        with _disable_current_modes():
            yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(shapes_only)


class _Epoch:
    """Seeds in order, where their losses go, and how far the epoch has got."""

    def __init__(self, order: Tensor, batch: int, steps: int, losses: Tensor):
        self.order = order
        self.batch = batch
        self.steps = steps
        self.losses = losses
        self.launched = self.done = 0
