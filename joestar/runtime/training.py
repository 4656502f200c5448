"""The training step: batch, forward, backward, clipping, optimizer, with a sticky overflow flag (decision 4).

Everything that a step changes lives in tensors on the device and is predicated on ``ok``: while the flag is set, steps
that were launched meanwhile change nothing. The host looks at the flag every ``check_every`` steps, redoes the batch
that did not fit exactly, clears the flag and launches the rest again: the result equals an exact-only run.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.profile.sizes import step_key
from joestar.runtime.executor import Executor
from joestar.runtime.optimizer import SkippableOptimizer
from joestar.runtime.seeds import batch_at, shuffled


class Trainer:
    """Training steps over shuffled seeds.

    Args:
        executor: of the ``train`` program; optimizer: wrapped by ``SkippableOptimizer``.
        seed: first word of the key; check_every: steps between two looks at the flag.
    """

    def __init__(self, executor: Executor, optimizer: SkippableOptimizer, seed: int, check_every: int):
        self.executor = executor
        self.optimizer = optimizer
        self.counters = executor.counters
        self.check_every = check_every
        device = executor.device
        self.key = step_key(seed, 0, 0, device)
        self.flag = torch.zeros((), dtype=torch.bool, device=device)

    def restart(self, seed: int) -> None:
        """Forgets the optimizer's state and draws under another seed."""
        self.optimizer.reset()
        self.key.copy_(step_key(seed, 0, 0, self.executor.device))
        self.flag.zero_()

    def epoch(self, seeds: Tensor, batch: int, epoch: int, shuffle: bool) -> Iterator[Tensor]:
        """Trains over the seeds once; yields the loss of every step, a 0-d view into one array of the epoch."""
        self.key.copy_(step_key(int(self.key[0]), epoch, 0, self.executor.device))
        order = shuffled(seeds, self.key) if shuffle else seeds
        self.executor.prepare(order, batch, self.key)
        run = _Epoch(order, batch, self.executor)
        try:
            for position in range(run.steps):
                self._launch(run)
                run.launched += 1
                if run.launched - run.done >= self.check_every or run.launched == run.steps:
                    self._settle(run)
                yield run.losses[position]
        finally:
            self._settle(run)

    def _launch(self, run: "_Epoch") -> None:
        """One step on the device; it changes nothing if the flag is set or becomes set."""
        if self.executor.execution == "exact":
            self._exact(run)
            return
        program = self.executor.program
        seeds, count = batch_at(run.order, self.key[2], run.batch)
        start = time.perf_counter()
        (loss,), counts, ok = program.step(filled(seeds, program.batch), count, self.key, self.flag)
        self._update(loss, ok, time.perf_counter() - start)
        row = self.key[2].clone().view(1)
        kept = torch.where(ok, loss.detach().float(), run.losses.index_select(0, row)[0])
        run.losses.index_copy_(0, row, kept.view(1))
        run.counts.index_copy_(0, row, torch.where(ok, counts, -1).view(1, -1))
        self.flag.copy_(~ok)
        self.key[2] += ok

    def _update(self, loss: Tensor, ok: Tensor, forward: float) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step(ok)
        self.counters.add_time("forward", forward)
        self.counters.add_time("backward", backward - start)
        self.counters.add_time("optimizer", time.perf_counter() - backward)

    def _settle(self, run: "_Epoch") -> None:
        """Makes sure that every launched step has happened."""
        while True:
            if bool(self.flag):
                self._redo(run)
            elif int(self.key[2]) == run.launched:
                break
            else:
                self._launch(run)
        for counts in run.counts[run.done : run.launched].tolist():
            if counts and counts[0] >= 0:
                self.executor.note(counts)
        self.counters.steps += run.launched - run.done
        run.done = run.launched

    def _redo(self, run: "_Epoch") -> None:
        """Carries out the batch that overflowed exactly, and clears the flag."""
        self.counters.fallbacks += 1
        self.flag.zero_()
        self._exact(run)
        self.executor.after_overflow()

    def _exact(self, run: "_Epoch") -> None:
        step = int(self.key[2])
        start = time.perf_counter()
        (loss,) = self.executor.exact(run.order[step * run.batch : (step + 1) * run.batch], self.key)
        self._update(loss, torch.ones_like(self.flag), time.perf_counter() - start)
        run.losses[step] = loss.detach()
        self.key[2] += 1
        self.counters.exact_steps += 1


class _Epoch:
    """Seeds in order, and what the steps of one epoch leave behind: losses, true counts, progress."""

    def __init__(self, order: Tensor, batch: int, executor: Executor):
        self.order = order
        self.batch = batch
        self.steps = -(-order.numel() // batch)
        self.losses = torch.zeros(self.steps, device=order.device)
        checked = executor.program.padded.checked if executor.program.padded is not None else []
        self.counts = torch.full((self.steps, len(checked)), -1, dtype=torch.int64, device=order.device)
        self.launched = self.done = 0


def filled(seeds: Tensor, size: int) -> Tensor:
    """Seeds padded to ``size`` with their first entry."""
    if seeds.numel() == size:
        return seeds
    return torch.cat([seeds, seeds[:1].expand(size - seeds.numel())])
