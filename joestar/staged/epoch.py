"""Epochs under a memory budget: timed, and over macro-batches where not everything fits."""

import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from joestar.profile.ledger import Expected
from joestar.runtime.epochs import Epoch
from joestar.runtime.state import Run
from joestar.stages.feed import Feed
from joestar.stages.plan import Plan

if TYPE_CHECKING:
    from joestar.staged.step import StagedStep


class TimedEpoch(Epoch):
    """An epoch that notes what it took in ``times``, in seconds, if this process made all of its steps."""

    def __init__(self, times: list[float], *given, **further):
        super().__init__(*given, **further)
        self._times, self._since = times, 0.0

    def __next__(self) -> Tensor | tuple[Tensor, Tensor]:
        if not self.begun:
            self._since = time.perf_counter()
        taken = super().__next__()
        if not self.running and self._position == 0:  # else an earlier process took some of it
            self._times.append(time.perf_counter() - self._since)
        return taken


class StagedEpoch(TimedEpoch):
    """An epoch over macro-batches."""

    def __init__(self, step: "StagedStep", *given, **further):
        super().__init__(step.traffic.epochs, *given, **further)
        self._step = step
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

    def _taken(self, position: int) -> Tensor:
        owned = self._run.owned
        if owned is not None and position >= owned:  # this rank's seed only fills the step
            return self._seeds_in_order[:0].clone()
        return self._seeds_in_order[position * self.batch_size : (position + 1) * self.batch_size].clone()

    def close(self) -> None:
        super().close()
        if self._feed is not None:
            self._feed.close()


def planned_epoch(plan: Plan, times: list[float], device: torch.device) -> list[Expected]:
    """What was planned beside what came: of the epochs behind the first, which compiles; and of the device's memory."""
    found = []
    if len(times) > 1:
        what = "an epoch, s (at least)" if plan.rough else "an epoch, s"
        found.append(Expected(what, plan.epoch_seconds, statistics.median(times[1:])))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        found.append(Expected("the device at most, GiB", plan.memory / 2**30, peak / 2**30))
    return found
