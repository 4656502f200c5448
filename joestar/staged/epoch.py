"""Epochs over macro-batches."""

import time
from typing import TYPE_CHECKING

from torch import Tensor

from joestar.runtime.epochs import Epoch
from joestar.runtime.state import Run
from joestar.stages.feed import Feed

if TYPE_CHECKING:
    from joestar.staged.step import StagedStep


class StagedEpoch(Epoch):
    """An epoch over macro-batches, whole ones of which are timed."""

    def __init__(self, step: "StagedStep", *given, **further):
        super().__init__(*given, **further)
        self._step = step
        self._since = 0.0
        self._seeds_in_order: Tensor | None = None
        self._feed: Feed | None = None

    def _started(self, order: Tensor) -> Run:
        step = self._step
        own, end = step.divided(order, self.batch_size)
        self._seeds_in_order = own[:end]
        self._feed = step._feed(own[:end], self.batch_size, self.number)
        with step.at_macro_batches():
            return step.begin(self._feed, order, self.batch_size, self.number, self._position)

    def _ahead(self) -> None:
        run = self._run
        shown = self._step.ensured_together(self._feed, run.position)
        if shown is None:
            return
        try:
            first, slots = shown
            self._runner.state.let_go()
            run.filled = self._step.fill_in(run.order, self._feed, run.batch, first, slots)
            self._step.swapped(run)
        except BaseException:  # an interrupt: the run does not know its seeds' slots
            self._feed.forget()
            raise

    def __next__(self) -> Tensor | tuple[Tensor, Tensor]:
        if not self.begun:
            self._since = time.perf_counter()
        taken = super().__next__()
        if not self.running and self._position == 0:  # else an earlier process took some of it
            self._step.traffic.epochs.append(time.perf_counter() - self._since)
        return taken

    def _taken(self, position: int) -> Tensor:
        owned = self._run.owned
        if owned is not None and position >= owned:  # this rank's seed only fills the step
            return self._seeds_in_order[:0].clone()
        return self._seeds_in_order[position * self.batch_size : (position + 1) * self.batch_size].clone()

    def close(self) -> None:
        super().close()
        if self._feed is not None:
            self._feed.close()
