"""Epochs: the order of the seeds, and an iterator over the losses that may be left, resumed, and run beside others."""

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from joestar.runtime.runner import StepRunner
from joestar.runtime.seeds import shuffled
from joestar.runtime.state import Run


class Epoch(Iterator[Tensor]):
    """Iterator over the losses of one epoch, made by ``Step.epoch``: asking for the next loss is what trains.

    Between two losses the state is that after the last one: evaluate, save, change the learning rate, take other
    steps, run another epoch. ``len()`` is the number of steps still to come.

    Args:
        runner: carries out the steps; seeds: ids ``[n]``; batch: seeds per step; number: the epoch's, the second word
            of the key; shuffle: by a permutation keyed by (seed, number). prepare: called once, before the first step.
        position: steps that an earlier process has taken.
    """

    def __init__(
        self, runner: StepRunner, seeds: Tensor, batch: int, number: int, shuffle: bool,
        prepare: Callable[["Epoch"], None], position: int = 0,
    ):  # fmt: skip
        self.seeds = seeds
        self.batch_size = batch
        self.number = number
        self.shuffle = shuffle
        self._runner = runner
        self._prepare = prepare
        self._position = position
        self._run: Run | None = None
        self._closed = False

    @property
    def steps(self) -> int:
        """Steps of the whole epoch."""
        return -(-self.seeds.numel() // self.batch_size)

    @property
    def position(self) -> int:
        """Steps that were taken."""
        return self._position if self._run is None else self._run.position

    @property
    def running(self) -> bool:
        """Whether steps are still to come."""
        return not self._closed and self.position < self.steps

    def __len__(self) -> int:
        return self.steps - self.position

    def __iter__(self) -> "Epoch":
        return self

    def __next__(self) -> Tensor:
        if not self.running:
            raise StopIteration
        try:
            if self._run is None:
                self._begin()
            return self._runner.take(self._run)
        except StopIteration as error:  # of the user's code: the loop would take it for the end of the epoch
            raise RuntimeError("sampler, model, loss or optimizer raised StopIteration within a step.") from error

    def _begin(self) -> None:
        self._prepare(self)
        order = shuffled(self.seeds, self._runner.seed, self.number) if self.shuffle else self.seeds
        run = self._runner.begin(order, self.batch_size, self.number)
        run.position = self._position
        self._run = run

    def close(self) -> None:
        """No more steps; what was trained stays."""
        self._closed = True

    def state_dict(self) -> dict:
        """What it takes to go on with this epoch in another process."""
        return {
            "number": self.number, "position": self.position, "batch_size": self.batch_size, "shuffle": self.shuffle,
            "seeds": self.seeds.numel(), "digest": digest(self.seeds),
        }  # fmt: skip


def digest(seeds: Tensor) -> str:
    """A hash of ids, in their order."""
    return hashlib.sha256(seeds.detach().to("cpu", torch.int64).numpy().tobytes()).hexdigest()[:32]
