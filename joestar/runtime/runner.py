"""The training step: batch, forward, backward, clipping, optimizer, all or nothing.

Everything that a step changes lives in tensors on the device and is predicated on ``ok``: a batch that exceeds the
bounds changes nothing. The host learns that while the step is under way (``runtime.mailbox``), and redoes such a batch
exactly before it hands out the loss: what a loop gets is final, and the state that it sees is the state after that
step. On a GPU the step is one CUDA graph.
"""

import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.distributed.words import HostWords
from joestar.errors import DistributedError, DomainError
from joestar.locks import synchronize
from joestar.profile.ledger import FIRST_BACKWARD
from joestar.runtime.executor import Executor
from joestar.runtime.interrupts import Whole
from joestar.runtime.leaves import Leaves
from joestar.runtime.mailbox import Mailbox
from joestar.runtime.prefetch import Ahead, Batch, PrefetchGraphs
from joestar.runtime.ranks import Ranks
from joestar.runtime.recorded import RecordedSteps, nothing
from joestar.runtime.state import Run, StepState
from joestar.runtime.step_graph import GraphMemory, StepGraph, StreamOrder
from joestar.runtime.undone import Undone
from joestar.runtime.update import Update


class StepRunner(RecordedSteps):
    """Launches steps of any number of runs, one after the other, and redoes what did not fit.

    Args:
        executor: of the ``train`` program; update: of the parameters; seed: first word of the key.
        cuda_graph: whether padded steps are captured.

    Attributes:
        memory: what the captured graph shares with others, ``None`` for nothing.
        push: takes the hidden rows that a step gives, and whether it happened (``stages.device_history``).
        ranks: this process among several, or ``None``.
        ahead: the batch of the next step, of programs whose front runs a step early.
    """

    def __init__(self, executor: Executor, update: Update, seed: int, cuda_graph: bool):
        self.executor = executor
        self.update = update
        self.optimizer = update.optimizer
        self.counters = executor.counters
        self.state = StepState(seed, executor.device)
        self.cuda_graph = cuda_graph and executor.execution == "padded"
        self.graph: StepGraph | PrefetchGraphs | None = None
        self.ahead = Ahead(self.state, self.counters)
        self.memory: GraphMemory | None = None
        self._mailbox: Mailbox | None = None
        self._words: HostWords | None = None
        self._captured: tuple = ()
        self._differentiated: tuple = ()
        self._streams = StreamOrder(executor.device)
        self._rehearsing = self._under_way = False
        self._undo = Undone()
        self.push: Callable[[list[Tensor], Tensor], None] | None = None
        self.ranks: Ranks | None = None
        self._join: Callable[[], None] = nothing
        self._found: Callable[[Tensor], None] = nothing
        executor.before_compile += [self.drop_graph, self._undo.forget]

    @property
    def seed(self) -> int:
        """First word of the key."""
        return self.state.seed

    @property
    def world(self) -> int:
        """Number of ranks that train together."""
        return 1 if self.ranks is None else self.ranks.world

    def restart(self, seed: int) -> None:
        """Forgets the optimizer's state and draws under another seed."""
        self.update.reset()
        self.state.seed = seed
        self.state.let_go()

    def begin(self, order: Tensor, batch: int, epoch: int, population: Tensor | None = None) -> Run:
        """A run over these seeds, in this order; bounds are chosen, and the program compiled, if that is still due.

        Where there are several ranks, the seeds are those of all, and the run is over this rank's.

        Args:
            population: seeds to choose bounds from, unless they are those of the run.
        """
        if self.ranks is not None:
            return self._begin_share(order, batch, epoch, population)
        self.executor.prepare(order if population is None else population, batch, self.seed, epoch)
        return self._new_run(order, batch, epoch)

    def _begin_share(self, order: Tensor, batch: int, epoch: int, population: Tensor | None) -> Run:
        self.ranks.prepare(order, batch, self.seed, epoch, population)
        own, end, shares = self.ranks.divided(order, batch, epoch)
        return self._own_run(own, end, shares, self.ranks.owned(order, batch), batch, epoch)

    def begin_own(
        self, own: Tensor, end: int, order: Tensor, batch: int, epoch: int, population: Tensor
    ) -> Run:  # fmt: skip
        """A run over this rank's seeds, which have other numbers on its device than in the ``order`` of all ranks.

        Args:
            own: ids on the device ``[steps * batch]``, of which ``end`` are meant; order: ids in the whole graph.
        """
        self.ranks.prepare(order, batch, self.seed, epoch, population)
        shares = self.ranks.shares(order, batch, epoch).to(own.device)
        return self._own_run(own, end, shares, self.ranks.owned(order, batch), batch, epoch)

    def _own_run(self, own: Tensor, end: int, shares: Tensor, owned: int, batch: int, epoch: int) -> Run:
        run = self._new_run(own, batch, epoch)
        run.end, run.shares, run.owned = end, shares, owned
        return run

    def _new_run(self, order: Tensor, batch: int, epoch: int) -> Run:
        program = self.executor.program
        dtype = torch.float64 if program.loss_dtype == torch.float64 else torch.float32
        return self.state.begin(order, batch, epoch, dtype, len(program.logged))

    # --- one step ---

    def take(self, run: Run) -> Tensor:
        """The next step of the run; returns its loss, which has happened in the order of the current stream."""
        position, self._under_way = run.position, False
        if self.state.device.type == "cuda":
            self._streams.follow()
        try:
            if self.ranks is None:
                self._carry_out(run)
            else:
                with self.ranks.step(run, long=self._compiles_within):
                    self._carry_out(run)
            run.position = position + 1  # in here: an interrupt in front of it finds that the step has happened
        except DistributedError:  # a device that waits for other ranks cannot say how far it has come
            self.state.let_go()
            raise
        except BaseException as error:
            self._recover(run)
            if self.ranks is not None and self._under_way:
                self.ranks.part(run, error)
            raise
        self.counters.steps += 1
        return run.loss(position)

    def _carry_out(self, run: Run) -> None:
        self.update.switch(run)
        self.state.hold(run)
        if self._is_padded(run):
            fits, counts = self._launched(run)
            if fits:
                self.executor.note(counts)
            else:
                self._redo(run)
        else:
            self._exact(run)

    def seek(self, run: Run, position: int) -> None:
        """Makes another step of the run the next one: its seeds, its key, its place among the losses."""
        run.position = position
        self.state.hold(run)
        self.state.key[2] = position

    def logged(self, run: Run) -> dict[str, Tensor]:
        """What the loss returned beside in the run's latest step: name -> 0-d tensor of its own."""
        names = self.executor.program.logged
        return dict(zip(names, run.logged(run.position - 1).unbind(), strict=True)) if names else {}

    def _is_padded(self, run: Run) -> bool:
        if self._lacks_program or self.executor.program.captured is None:
            self.executor.prepare(run.known, run.batch, self.seed, run.epoch)
        return self.executor.execution == "padded" and run.batch <= self.executor.program.batch

    @property
    def _lacks_program(self) -> bool:
        """Flags were changed, or another run had it traced anew: it is compiled within the next step."""
        return self.executor.execution == "padded" and self.executor.program.run is None

    @property
    def _compiles_within(self) -> bool:
        """The next step takes long: it compiles the backward pass, if not all."""
        return self._lacks_program or self._differentiated != self._compiled

    def _launched(self, run: Run) -> tuple[bool, list[int]]:
        """``_launch``; a loss may find values that it cannot take in a batch that does not fit: an exact step tells."""
        try:
            return self._launch(run)
        except DomainError:
            if self.ranks is not None:
                raise
            return False, []

    def _launch(self, run: Run) -> tuple[bool, list[int]]:
        """One padded step on the device: (whether it fitted, true sizes). It changes nothing unless it fits."""
        if not self.cuda_graph:
            self.optimizer.refresh()
            self._under_way = True
            with self._undone(run), self._held():
                return self._step(run)
        self._prepare_graph()
        self._under_way = True
        self.ahead.launch(self.graph, self.executor.program, run)
        fits, counts = self._mailbox.wait()
        return fits if self._words is None else self._words.all(fits, self.ranks.waiting), counts

    def _step(self, run: Run | None = None) -> tuple[bool, list[int]]:
        """The padded step, launched operation by operation; as far as its forward pass, if it does not fit."""
        program, ahead = self.executor.program, self.ahead
        with program.fixed_order():
            batch = ahead.batch(program, run)
            with ahead.beside(program, run):
                ok, counts, finish = self._forward(batch)
                if self.ranks is not None:  # the others may fit, and wait for this one
                    return bool(finish()), counts.tolist()
                if not self._rehearsing and not bool(ok):
                    self.state.flag.zero_()
                    return False, counts.tolist()
                finish()
        return True, counts.tolist()

    def _forward(self, batch: Batch, leaves: Leaves | None = None) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """The forward pass: (ok, true sizes, the rest of the step, which says whether it happened).

        Args:
            leaves: what is differentiated in place of parameters, or ``None`` for the parameters themselves.
        """
        if self.ranks is not None:
            self.ranks.before(self.state)
        ops, state, program = torch.ops.joestar, self.state, self.executor.program
        start = time.perf_counter()
        outputs, counts, ok = program.step(batch.seeds, batch.count, state.key, state.flag, batch.made, leaves)
        loss, logged, pushed = program.split(outputs)
        forward = time.perf_counter() - start

        def finish() -> Tensor:
            value, values, happens = self._gradients(loss, logged, ok, forward, leaves)
            with Whole():
                self._apply(happens)
                state.note(values, happens)
                self._push(pushed, happens)
                ops.finish_step(state.key, state.flag, state.losses, state.run, value.detach(), happens)
            return happens

        return ok, counts, finish

    def _gradients(
        self, loss: Tensor, logged: list[Tensor], ok: Tensor, forward: float, leaves: Leaves | None = None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Backward pass: (loss, what is logged, ok), of all ranks together."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        share = None if self.ranks is None else self.state.share()
        if share is None:
            self.update.backward(loss)
        else:
            self.update.backward(loss, share[0])
        if leaves is not None:
            leaves.hand_over()
        backward = time.perf_counter()
        clock = self._backward_clock()
        if self.ranks is not None:
            if clock == FIRST_BACKWARD:
                self.ranks.meet("the first backward pass")
            self._join()
            trained = [parameter for parameter in self.optimizer.parameters() if parameter.grad is not None]
            loss, logged, ok = self.ranks.reduce(trained, loss, logged, ok, share)
            self._found(ok)
        self.counters.add_time("forward", forward)
        self.counters.add_time(clock, backward - start)
        return loss, logged, ok

    def _apply(self, ok: Tensor) -> None:
        """The optimizer's step."""
        start = time.perf_counter()
        self.update.apply(ok, self.state)
        self.counters.add_time("optimizer", time.perf_counter() - start)

    def _push(self, pushed: list[Tensor], happens: Tensor) -> None:
        """Keeps the hidden rows of a step, but for one in which this rank has no seeds of its own."""
        if pushed:
            self.push(pushed, happens if self.ranks is None else happens & self.ranks.counts(self.state))

    def _backward_clock(self) -> str:
        """The first backward pass of a program compiles it: that is no time of a step."""
        known, self._differentiated = self._differentiated, self._compiled
        return "backward" if known == self._differentiated else FIRST_BACKWARD

    @property
    def _compiled(self) -> tuple:
        """Changes with every compilation."""
        return self.executor.program, self.executor.program.compiles

    def _exact(self, run: Run) -> None:
        start = time.perf_counter()
        self.optimizer.refresh()
        self._under_way = True
        with self._undone(run), self._held(), self.executor.program.fixed_order():
            if self.ranks is not None:
                self.ranks.before(self.state)
            outputs = self.executor.exact(run.seeds(run.position), self.state.key)
            loss, logged, pushed = self.executor.program.split(outputs)
            happens = torch.ones_like(self.state.flag)
            loss, logged, _ = self._gradients(loss, logged, happens, time.perf_counter() - start)
            with Whole():
                self._apply(happens)
                self._push(pushed, happens)
                run.loss(run.position).copy_(loss.detach())
                for cell, value in zip(run.logged(run.position), logged, strict=True):
                    cell.copy_(value)
                self.state.key[2] += 1
        self.counters.exact_steps += 1

    def _redo(self, run: Run) -> None:
        """Carries out the batch that overflowed exactly; the bounds may widen for the next ones."""
        self.counters.fallbacks += 1
        self.state.flag.zero_()
        self._exact(run)
        self._under_way = False
        with contextlib.nullcontext() if self.ranks is None else self.ranks.long("compiling for larger batches"):
            self.executor.after_overflow()

    def _recover(self, run: Run) -> None:
        """After an error or an interrupt in the middle of a step: did it happen? The next one goes on from there."""
        self.state.let_go()
        with contextlib.suppress(Exception):  # a device that failed cannot say
            if self.state.device.type == "cuda":
                synchronize(self.state.device)
            self.state.flag.zero_()
            if self._mailbox is not None:
                self._mailbox.number = int(self._mailbox.sequence)
            epoch, step = self.state.key[1:].tolist()
            if epoch == run.epoch and step == run.position + 1:
                run.position = step

    def _held(self) -> contextlib.AbstractContextManager:
        """Around a step that is launched op by op: signals wait for its end, unless that may take long."""
        return contextlib.nullcontext() if self.ranks is not None or self._compiles_within else Whole()

    def _undone(self, run: Run) -> contextlib.AbstractContextManager:
        """Around such a step: if it ends in an error, what its forward pass wrote (a norm's statistics) is as before.

        Most interrupts come in steps that compile: there everything is kept.
        """
        position = run.position
        return self._undo(
            self.executor.program.written, self._compiles_within, lambda: int(self.state.key[2]) != position
        )

    def dry_run(self, order: Tensor, batch: int) -> Callable[[int], None]:
        """A function that carries out a whole step, of a position, with the flag set: as long, and changing nothing.

        The optimizer may allocate its state, as zeros, and gradients are left behind. The program must be compiled.
        """
        run = self._new_run(order, batch, 0)
        self.state.hold(run)
        self._rehearsing = True
        self.state.flag.fill_(True)
        if self.cuda_graph:
            self._prepare_graph()

        def step(position: int) -> None:
            self.state.key[2] = position % run.steps
            self.graph.replay() if self.cuda_graph else self._step()

        return step
