"""Runs one program: padded where it fits, exact where it does not, with bounds chosen by a structure-only warm-up."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from joestar.errors import CheckpointError, DomainError, JoestarWarning
from joestar.ops.scratch import own_tables
from joestar.profile.ledger import Counters
from joestar.profile.sizes import SizeProfile, choose_bounds, record, step_key, widen
from joestar.runtime.halves import NAME as PREFETCH
from joestar.runtime.program import Program
from joestar.runtime.replay import ReplayedProgram
from joestar.runtime.seeds import spread_nodes

_LATER = 1000
"""Observations that are added up together."""


class SizeBook:
    """Running minimum, mean and maximum of the sizes of every set."""

    def __init__(self):
        self._sizes: dict[int, list[float]] = {}
        self._later: list[tuple[Sequence[int], Sequence[int]]] = []

    def note(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        """Notes one observation of sizes, which nobody changes any more: within a step there is no time for more."""
        self._later.append((indices, sizes))
        if len(self._later) == _LATER:
            self._add()

    @property
    def sizes(self) -> dict[int, list[float]]:
        """Index of a size -> number of observations, the smallest, their sum, the largest."""
        self._add()
        return self._sizes

    def _add(self) -> None:
        noted, self._later = self._later, []
        for indices, sizes in noted:
            for index, size in zip(indices, sizes, strict=True):
                seen = self._sizes.setdefault(index, [0, float("inf"), 0.0, 0])
                seen[0] += 1
                seen[1] = min(seen[1], size)
                seen[2] += size
                seen[3] = max(seen[3], size)


GROWTH = (1.0, 1.15, 1.5, 2.0, 3.0)
"""Room beyond the demand that each widening of the bounds leaves. There are no more than these, whatever the input, of
all programs of a step together (several ranks: of each): afterwards batches that do not fit run exactly."""


class Executor:
    """Runs one program padded, falling back on exact execution; shared by training, callable form and prediction.

    Args:
        program: the captured program; counters: where events are counted.
        slack: fraction added to observed sizes; warm_up: batches whose structure is sampled to choose bounds;
        patience: overflows after which bounds are widened and the program is compiled again;
        execution: ``"padded"`` or ``"exact"``; cuda_graph: whether padded runs are captured.

    Attributes:
        widened: recompilations so far because batches outgrew the bounds.
        spent: the ``recompilations`` that count together: of all programs of a step; of several ranks, its own.
        agree: (what, sizes) -> the largest of every size over the ranks, where there are several; else ``None``.
    """

    def __init__(
        self, program: Program, counters: Counters, slack: float, warm_up: int, patience: int, execution: str,
        cuda_graph: bool = False,
    ):  # fmt: skip
        self.program = program
        self.counters = counters
        self.slack = slack
        self.warm_up = warm_up
        self.patience = patience
        self.execution = execution
        self.book = SizeBook()
        self.observed: SizeProfile | None = None
        self.overflows = 0
        self.widened = 0
        self.spent: Callable[[], int] = lambda: self.recompilations
        self.cuda_graph = cuda_graph
        self.before_compile: list[Callable[[], None]] = [self._drop_replay]
        self.resumed: dict | None = None
        self.agree: Callable[[str, list[int]], list[int]] | None = None
        self._replayed: ReplayedProgram | None = None
        self._looked: tuple[int, SizeProfile] | None = None

    @property
    def device(self) -> torch.device:
        """Where the graph lives."""
        return self.program.graph.device

    def prepare(self, seeds: Tensor, batch: int, seed: int, epoch: int) -> None:
        """Captures, chooses bounds from batches all over ``seeds``, and compiles, as far as that is still due.

        A larger batch than the program's compiles it again, unless that has happened too often.
        """
        start = time.perf_counter()
        if self.program.captured is None:
            self.program.trace(seeds[:batch], step_key(seed, epoch, 0, self.device))
        if self.execution == "padded":
            if self.resumed is not None:
                self._resume()
            if self.program.run is None or (batch > self.program.batch and self._may_recompile()):
                room = batch if self.widened < 2 else max(batch, self.program.batch * 2 ** (self.widened - 1))
                self._choose(seeds, min(room, max(batch, self.program.graph.num_nodes)), seed, epoch)
        self.counters.add_time("prepare", time.perf_counter() - start)

    def is_ready(self, batch: int) -> bool:
        """Whether ``prepare`` for batches of this size has nothing left to do."""
        if self.program.captured is None or self.program.lags:
            return False
        compiled = self.program.run is not None and batch <= self.program.batch and self.resumed is None
        return self.execution != "padded" or compiled

    @property
    def lacks_bounds(self) -> bool:
        """Whether bounds are yet to be chosen from batches."""
        return self.execution == "padded" and self.program.run is None and self.resumed is None

    def needs(self, seeds: Tensor) -> bool:
        """Whether batches of this size are yet to be compiled for."""
        return self.execution == "padded" and (self.program.run is None or seeds.numel() > self.program.batch)

    def _choose(self, seeds: Tensor, batch: int, seed: int, epoch: int) -> None:
        looked, self._looked = self._looked, None
        seen = looked is not None and looked[0] == batch
        self.observed = profile = looked[1] if seen else self.profile(seeds, batch, seed, epoch)
        bounds = choose_bounds(profile, batch, self.program.graph.num_nodes, self.slack)
        if self.program.run is not None:  # what was widened once stays wide
            bounds = [max(new, old) for new, old in zip(bounds, self.program.bounds, strict=True)]
        self.compile(bounds if self.agree is None else self.agree("bounds of sampled sets", bounds), batch)

    @property
    def recompilations(self) -> int:
        """``widened``, with those of a run that goes on here."""
        return self.widened if self.resumed is None else self.resumed["widened"]

    def _may_recompile(self) -> bool:
        widened = self.spent()
        if widened < len(GROWTH):
            return True
        self._say_once(
            f"programs were compiled again {widened} times because batches outgrew their bounds; from here on, batches "
            "that do not fit run exactly, which is slower. Larger bounds from the start: slack=, warm_up=, or the "
            "largest batch size first."
        )
        return False

    def _say_once(self, text: str) -> None:
        if text not in self.counters.notes:
            self.counters.notes.append(text)
            warnings.warn(text, JoestarWarning, stacklevel=2)

    def forget(self) -> None:
        """The graph's tensors are about to be replaced: the program is traced, and bounds are chosen, anew."""
        for release in self.before_compile:
            release()
        self.program.forget()
        self._looked = None

    def compile(self, bounds: list[int], batch: int) -> None:
        """Compiles for these bounds, counting a recompilation if there was one before."""
        for release in self.before_compile:
            release()
        again, outgrown = self.program.compiles > 0, self.program.run is not None
        self.program.compile(bounds, batch)
        for place in self.program.places:
            if place.pattern == PREFETCH and not place.fired:
                self._say_once(f"prefetch=True has no effect on this step: {place.detail}, at {place.source}")
        self.counters.recompiles += again
        self.widened += outgrown
        self.overflows = 0

    def use(self, program: Program, slack: float) -> None:
        """Goes on with a variant of the program, as far as it is compiled, and with another slack of its bounds."""
        for release in self.before_compile:
            release()
        program.phases.seconds = {**self.program.phases.seconds, **program.phases.seconds}
        self.program, self.slack = program, slack

    def look(self, seeds: Tensor, batch: int, seed: int, epoch: int, trials: int) -> None:
        """Notes sizes of so many batches of these seeds: what is noted when bounds are chosen is what they are of."""
        found = self.profile(seeds, batch, seed, epoch, trials)
        if self._looked is not None and self._looked[0] == batch:
            found.batches = self._looked[1].batches + found.batches
        self._looked = batch, found

    def profile(self, seeds: Tensor, batch: int, seed: int, epoch: int, trials: int | None = None) -> SizeProfile:
        """Sizes of ``trials`` batches (``warm_up``) spread over all of ``seeds``, structure only."""
        trials = self.warm_up if trials is None else trials
        if seeds.numel() < batch:  # a short prediction: fill up with nodes from all over the graph
            seeds = torch.cat([seeds, spread_nodes(batch - seeds.numel(), self.program.graph, seed, epoch)])
        full = max(1, seeds.numel() // batch)
        batches = []
        for trial in range(trials):
            part = trial * full // trials if full >= trials else trial % full
            again = 0 if full >= trials else trial // full
            chosen = seeds[part * batch : (part + 1) * batch]
            batches.append((chosen, step_key(seed, epoch + again, part, self.device)))
        self.counters.warm_up_batches += len(batches)
        with own_tables({}):  # a CUDA graph will have its own
            return record(self.program.sampler, self.program.graph, batches)

    # --- state, for a run that goes on elsewhere ---

    def state_dict(self) -> dict | None:
        """Bounds, choices and what decides about the next ones; ``None`` before anything was compiled."""
        if self.resumed is not None:  # loaded, and not gone on with yet
            return dict(self.resumed)
        if self.program.captured is None or (self.program.run is None and self.execution == "padded"):
            return None
        return {
            "bounds": list(self.program.bounds), "batch": self.program.batch, "slack": float(self.slack),
            "overflows": self.overflows, "widened": self.widened,
            "choices": {site.key: site.taken for site in self.program.sites},
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        """Goes on with these bounds and choices from the next batch on."""
        choices = state["choices"]
        if self.program.captured is None:
            self.program.options = replace(self.program.options, choices=dict(choices), fitted=True)
        elif choices != {site.key: site.taken for site in self.program.sites}:
            options = replace(self.program.options, choices=dict(choices), fitted=True)
            self.use(self.program.variant(options), state["slack"])
        self.slack = state["slack"]
        self.resumed = state

    def _resume(self) -> None:
        state, self.resumed = self.resumed, None
        if not state["bounds"] and self.program.captured.labels:
            return  # of exact execution, which has none: they are chosen as in a run that begins
        if len(state["bounds"]) != len(self.program.captured.labels):
            raise CheckpointError(
                f"the checkpoint has bounds of {len(state['bounds'])} sets, the {self.program.kind} program has "
                f"{len(self.program.captured.labels)}: expected the sampler that it was saved with."
            )
        if (self.program.bounds, self.program.batch) != (state["bounds"], state["batch"]) or self.program.run is None:
            self.compile(state["bounds"], state["batch"])
        self.overflows, self.widened = state["overflows"], state["widened"]

    def forward(self, seeds: Tensor, count: int, key: Tensor) -> tuple[list[Tensor], list[int], bool]:
        """One padded run of a ``logits`` or ``predict`` program: (outputs, true counts, whether everything fitted).

        Args:
            seeds: ``[program.batch]``, of which the first ``count`` are meant.
        """
        if self.cuda_graph:
            if self._replayed is None:
                start = time.perf_counter()
                self._replayed = ReplayedProgram(self.program)
                self.counters.captures += 1
                self.counters.add_time("capture", time.perf_counter() - start)
            return self._replayed.run(seeds, count, key)
        number = torch.full((), count, dtype=torch.int64, device=self.device)
        flag = torch.zeros((), dtype=torch.bool, device=self.device)
        gates = self.program.gates()
        try:
            outputs, counts, ok = self.program.step(seeds, number, key, flag, leaves=gates)
        except DomainError:  # of this batch, or only of the part of it that fits: an exact run tells
            return [], [], False
        if gates is not None:
            gates.follow(outputs)
        return outputs, counts.tolist(), bool(ok)

    def _drop_replay(self) -> None:
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.free()

    def exact(self, seeds: Tensor, key: Tensor) -> list[Tensor]:
        """Runs one batch exactly and notes its sizes."""
        outputs, sizes = self.program.exact(seeds, key)
        self.book.note(range(len(sizes)), sizes)
        self.last_sizes = sizes
        return outputs

    def note(self, counts: list[int]) -> None:
        """Notes the true counts of a padded step."""
        self.book.note([index for index, _ in self.program.padded.checked], counts)

    def after_overflow(self) -> None:
        """Widens the bounds once they were exceeded repeatedly; call it after the exact redo."""
        self.overflows += 1
        self.counters.overflows += 1
        if self.overflows >= self.patience and self._may_recompile():
            program = self.program
            growth = GROWTH[self.widened]
            sizes = self.last_sizes
            sizes = sizes if self.agree is None else self.agree("sizes of sampled sets that did not fit", sizes)
            self.compile(
                widen(
                    program.bounds, sizes, program.captured.labels, program.batch, program.graph.num_nodes,
                    self.slack, growth,
                ),
                program.batch,
            )  # fmt: skip
