"""Runs one program: padded where it fits, exact where it does not, with bounds chosen by a structure-only warm-up."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.ops.scratch import own_tables
from joestar.profile.ledger import Counters
from joestar.profile.sizes import SizeProfile, choose_bounds, record, step_key, widen
from joestar.runtime.program import Program
from joestar.runtime.replay import ReplayedProgram
from joestar.runtime.seeds import shuffled


class SizeBook:
    """Running minimum, mean and maximum of the sizes of every set."""

    def __init__(self):
        self.sizes: dict[int, list[float]] = {}

    def add(self, index: int, size: int) -> None:
        """Notes one observation of size ``index``."""
        seen = self.sizes.setdefault(index, [0, float("inf"), 0.0, 0])
        seen[0] += 1
        seen[1] = min(seen[1], size)
        seen[2] += size
        seen[3] = max(seen[3], size)


class Executor:
    """Runs one program padded, falling back on exact execution; shared by training, callable form and prediction.

    Args:
        program: the captured program; counters: where events are counted.
        slack: fraction added to observed sizes; warm_up: batches whose structure is sampled to choose bounds;
        patience: overflows after which bounds are widened and the program is compiled again;
        execution: ``"padded"`` or ``"exact"``; cuda_graph: whether padded runs are captured.
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
        self.overflows = 0
        self.cuda_graph = cuda_graph
        self.before_compile: list[Callable[[], None]] = [self._drop_replay]
        self._replayed: ReplayedProgram | None = None

    @property
    def device(self) -> torch.device:
        """Where the graph lives."""
        return self.program.graph.device

    def prepare(self, seeds: Tensor, batch: int, key: Tensor) -> None:
        """Captures, chooses bounds from the first batches of ``seeds``, and compiles, as far as that is still due."""
        start = time.perf_counter()
        self.program.trace(seeds[:batch], key)
        if self.execution == "padded" and (self.program.run is None or batch > self.program.batch):
            profile = self.profile(seeds, batch, key)
            bounds = choose_bounds(profile, batch, self.program.graph.num_nodes, self.slack)
            self.compile(bounds, batch)
        self.counters.add_time("prepare", time.perf_counter() - start)

    def compile(self, bounds: list[int], batch: int) -> None:
        """Compiles for these bounds, counting a recompilation if there was one before."""
        for release in self.before_compile:
            release()
        self.counters.recompiles += self.program.compiles > 0
        self.program.compile(bounds, batch)
        self.overflows = 0

    def adopt(self, program: Program, slack: float) -> None:
        """Goes on with a variant of the program, as far as it is compiled, and with another slack of its bounds."""
        for release in self.before_compile:
            release()
        program.phases.seconds = {**self.program.phases.seconds, **program.phases.seconds}
        self.program, self.slack = program, slack

    def profile(self, seeds: Tensor, batch: int, key: Tensor) -> SizeProfile:
        """Sizes of the first batches of ``seeds``, structure only."""
        if seeds.numel() < batch:  # a short prediction: fill up with nodes from all over the graph
            spread = torch.arange(self.program.graph.num_nodes, dtype=seeds.dtype, device=self.device)
            seeds = torch.cat([seeds, shuffled(spread, key)[: batch - seeds.numel()]])
        steps = -(-seeds.numel() // batch)
        seed, epoch = int(key[0]), int(key[1])
        batches = []
        for trial in range(self.warm_up):
            part = trial % max(steps - 1, 1) if steps > 1 else 0
            chosen = seeds[part * batch : (part + 1) * batch]
            batches.append((chosen, step_key(seed, epoch + trial // max(steps - 1, 1), part, self.device)))
        self.counters.warm_up_batches += len(batches)
        with own_tables({}):  # a CUDA graph will have its own
            return record(self.program.sampler, self.program.graph, batches)

    def forward(self, seeds: Tensor, count: int, key: Tensor) -> tuple[Tensor, list[int], bool]:
        """One padded run of a ``logits`` or ``predict`` program: (rows, true counts, whether everything fitted).

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
        (rows,), counts, ok = self.program.step(seeds, number, key, flag)
        return rows, counts.tolist(), bool(ok)

    def _drop_replay(self) -> None:
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.free()

    def exact(self, seeds: Tensor, key: Tensor) -> list[Tensor]:
        """Runs one batch exactly and notes its sizes."""
        outputs, sizes = self.program.exact(seeds, key)
        for index, size in enumerate(sizes):
            self.book.add(index, size)
        self.last_sizes = sizes
        return outputs

    def note(self, counts: list[int]) -> None:
        """Notes the true counts of a padded step."""
        for (index, _), count in zip(self.program.padded.checked, counts, strict=True):
            self.book.add(index, count)

    def after_overflow(self) -> None:
        """Widens the bounds once they were exceeded repeatedly; call it after the exact redo."""
        self.overflows += 1
        self.counters.overflows += 1
        if self.overflows >= self.patience:
            self.compile(widen(self.program.bounds, self.last_sizes, self.slack), self.program.batch)
