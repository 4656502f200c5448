"""The tuner at work: candidates are variants of the training program, timed as whole steps that change nothing.

A step is timed from taking the batch to the optimizer, with the overflow flag set: everything that a step changes is
predicated on it. First every candidate runs without Inductor (on a GPU as one CUDA graph), then the best two and the
default with the real backend. The winner goes on as it was compiled.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from joestar.errors import ConfigError, JoestarWarning, PaddingError
from joestar.fusion import Site
from joestar.locks import synchronize
from joestar.ops.determinism import is_deterministic
from joestar.ops.step.ranks import alone
from joestar.profile import tuner
from joestar.profile.choices import Found, cache_key, recall, remember
from joestar.profile.environment import Environment
from joestar.profile.facts import graph_facts, program_hash
from joestar.profile.ledger import Counters, TuningRecord
from joestar.profile.sizes import SizeProfile, choose_bounds, step_key
from joestar.profile.slacks import slack_options
from joestar.profile.tuner import Candidate, Space
from joestar.runtime.executor import Executor
from joestar.runtime.guards import plain_attributes
from joestar.runtime.optimizer import has_gradient_hooks
from joestar.runtime.program import Program
from joestar.runtime.runner import StepRunner
from joestar.runtime.seeds import shuffled
from joestar.runtime.step_graph import GraphMemory

_HOOKS = (
    "tune=True tries nothing: hooks on gradients of parameters would be called in every trial, thousands of times. "
    "Training goes on with the default choices; tune before the hooks are registered (choices are kept on disk), or "
    "give choices=."
)
SPAN = 20.0
"""Milliseconds that a measurement takes at least: short steps are carried out several times."""
LAUNCHES = 50


class Variants:
    """The training program under other choices; nothing is traced again.

    Attributes:
        pinned: choices that are fixed: their sites are closed.
    """

    def __init__(self, program: Program):
        self.program = program
        self.pinned = dict(program.options.choices)
        self._spare: dict[tuple, Program] = {}

    def sites(self, choices: dict[str, str]) -> list[Site]:
        """The open sites of the program under these choices."""
        program = self.program
        if choices:
            program = self._spare[tuple(sorted(choices.items()))] = self.of(choices, "eager", texts=False)
        return [site for site in program.sites if site.key not in self.pinned]

    def of(self, choices: dict[str, str], backend: str, texts: bool = True) -> Program:
        """The program under these choices, not compiled; without ``texts`` its report lacks those of its graphs."""
        spare = None if texts or backend != "eager" else self._spare.pop(tuple(sorted(choices.items())), None)
        if spare is not None:
            return spare
        options = replace(self.program.options, choices={**self.pinned, **choices}, backend=backend)
        variant = self.program.variant(options, texts)
        self._share_hoisted(variant)
        return variant

    def _share_hoisted(self, variant: Program) -> None:
        """Hoisted values are as large as the graph, and do not depend on choices: all variants read the same ones."""
        shared = {id(own.value): first.value for own, first in zip(variant.hoisted, self.program.hoisted, strict=True)}
        roles = variant.captured.roles
        roles[:] = [role.holding(shared.get(id(role.tensor), role.tensor)) for role in roles]
        for own in variant.hoisted:
            own.value = shared[id(own.value)]


class StepTimer:
    """Times candidates of a runner's program (see ``profile.tuner.Timer``).

    Args:
        order: seeds of an epoch; batch: their number per step; profile: sizes, from which bounds are chosen.
        backend: ``eager`` or ``inductor``; texts: whether one of the candidates may go on, and be reported.
    """

    def __init__(
        self, runner: StepRunner, variants: Variants, order: Tensor, batch: int, profile: SizeProfile, backend: str,
        texts: bool = True,
    ):  # fmt: skip
        self.runner = runner
        self.variants = variants
        self.order = order
        self.batch = batch
        self.profile = profile
        self.backend = backend
        self.texts = texts
        self.device = runner.executor.device
        self.memory = GraphMemory() if runner.cuda_graph else None
        self.programs: dict[Candidate, Program] = {}
        self._ready: dict[Candidate, tuple] = {}

    def milliseconds(self, candidate: Candidate, round: int) -> float:
        """Time of a step now, on the batch of this round; infinite if the candidate cannot be padded or needs too
        much memory (an error, if it is the default)."""
        if candidate not in self._ready:
            try:
                self._prepare(candidate)
            except (PaddingError, torch.OutOfMemoryError):
                if not candidate.choices and candidate.slack == self.runner.executor.slack:
                    raise
                self.drop(candidate)
                return float("inf")
        _, launch, launches = self._ready[candidate]
        position = round % max(self.order.numel() // self.batch, 1)
        return self._timed(lambda: launch(position), launches)

    def _prepare(self, candidate: Candidate) -> None:
        program = self.variants.of(dict(candidate.choices), self.backend, self.texts)
        bounds = choose_bounds(self.profile, self.batch, program.graph.num_nodes, candidate.slack)
        program.compile(bounds, self.batch)
        self.programs[candidate] = program
        own = self.runner.executor
        executor = Executor(program, Counters(), candidate.slack, own.warm_up, own.patience, own.execution)
        other = StepRunner(executor, self.runner.update, self.runner.seed, self.runner.cuda_graph)
        other.memory = self.memory
        launch = other.dry_run(self.order, self.batch)
        self._ready[candidate] = other, launch, 1
        self._timed(lambda: launch(0), 1)  # the first is slower
        launches = min(LAUNCHES, max(1, round(SPAN / max(self._timed(lambda: launch(0), 1), 1e-3))))
        self._ready[candidate] = other, launch, launches

    def _timed(self, launch: Callable[[], None], launches: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(launches):
            launch()
        self._wait()
        return (time.perf_counter() - start) * 1e3 / launches

    def _wait(self) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)

    def drop(self, candidate: Candidate) -> None:
        """Frees the candidate's program, its captured graph and their memory."""
        self.programs.pop(candidate, None)
        other, *_ = self._ready.pop(candidate, (None,))
        if other is not None:
            other.drop_graph()

    def release(self, candidate: Candidate) -> Program:
        """The candidate's compiled program; all else that is held for timing is freed."""
        program = self.programs[candidate]
        self.drop(candidate)
        return program


def tune(runner: StepRunner, seeds: Tensor, batch: int) -> TuningRecord:
    """Makes the choices for a runner whose program was traced and not yet compiled: from the cache, or by timing.

    Args:
        seeds: of an epoch; batch: their number per step.
    """
    start = time.perf_counter()
    executor = runner.executor
    variants = Variants(executor.program)
    facts = tuning_facts(runner, batch)
    key = cache_key(facts)
    found = recall(key)
    if found is not None and _take(executor, variants, found):
        return TuningRecord(found.candidates, time.perf_counter() - start, True, key)
    if os.environ.get("JOESTAR_TUNE", "1") == "0":
        return TuningRecord([], time.perf_counter() - start, False, key)
    if has_gradient_hooks(runner.optimizer.optimizer):
        warnings.warn(_HOOKS, JoestarWarning, stacklevel=2)
        return TuningRecord([], time.perf_counter() - start, False, key)
    with state_restored(runner):
        found = _search(runner, variants, shuffled(seeds, runner.seed, 0), batch)
    remember(key, found, facts)
    seconds = time.perf_counter() - start
    executor.counters.add_time("tuning", seconds)
    return TuningRecord(found.candidates, seconds, False, key)


def tune_together(runner: StepRunner, seeds: Tensor, batch: int) -> TuningRecord:
    """Rank 0 makes the choices, by steps of its own, and all go on with them."""
    ranks, executor = runner.ranks, runner.executor
    record, variants = TuningRecord([], 0.0, False, ""), Variants(executor.program)
    with ranks.long("timing of choices (tune=True)"):
        if ranks.rank == 0:
            runner.ranks = None
            try:
                with alone():
                    record = tune(runner, seeds, batch)
            finally:
                runner.ranks = ranks
        own = {site.key: site.taken for site in executor.program.sites if site.key not in variants.pinned}
        first, *_ = ranks.group.exchange("the end of tuning", {"choices": own, "slack": executor.slack})
        _take(executor, variants, Found(first["choices"], first["slack"], record.candidates))
    return record


def _search(runner: StepRunner, variants: Variants, order: Tensor, batch: int) -> Found:
    executor = runner.executor
    profile = executor.profile(order, batch, runner.seed, 0)
    slacks = slack_options(profile, batch, executor.program.graph.num_nodes, executor.slack)
    redo = _redo_milliseconds(runner, order[:batch]) if any(slacks.values()) else 0.0
    space = Space(variants.sites, {slack: risk * redo for slack, risk in slacks.items()})
    backend = executor.program.options.backend
    screening = StepTimer(runner, variants, order, batch, profile, "eager", texts=False)
    final = StepTimer(runner, variants, order, batch, profile, backend)
    outcome = tuner.tune(space, screening, final)
    winner = outcome.winner
    executor.use(final.release(winner), winner.slack)
    return Found(dict(winner.choices), winner.slack, outcome.candidates)


def _redo_milliseconds(runner: StepRunner, seeds: Tensor) -> float:
    """What an overflow costs: a step with true sizes, the second of two."""
    elapsed = 0.0
    for _ in range(2):
        start = time.perf_counter()
        key = step_key(runner.seed, 0, 0, runner.executor.device)
        (loss, *_), _ = runner.executor.program.exact(seeds, key)
        loss.backward()
        float(loss.detach())
        elapsed = (time.perf_counter() - start) * 1e3
    return elapsed


def _take(executor: Executor, variants: Variants, found: Found) -> bool:
    """Goes on with a stored result; false if the program lacks its sites (a damaged file)."""
    try:
        program = variants.of(found.choices, executor.program.options.backend)
    except ConfigError:
        return False
    executor.use(program, found.slack)
    return True


@contextlib.contextmanager
def state_restored(runner: StepRunner) -> Iterator[None]:
    """Whatever runs inside, afterwards all is as before, bit for bit: buffers, gradients, optimizer, random generators.

    Parameters and the tensors of the optimizer's state are not written by steps whose flag is set.
    """
    program, optimizer = runner.executor.program, runner.optimizer.optimizer
    model = program.model
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    written = {id(tensor): tensor for tensor in (*model.buffers(), *program.written)}  # of the loss, of attributes
    buffers = [(buffer, buffer.clone()) for buffer in written.values()]
    state = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    called = getattr(optimizer, "_opt_called", None)
    devices = [runner.executor.device] if runner.executor.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        if called is not None:
            optimizer._opt_called = called
        else:
            vars(optimizer).pop("_opt_called", None)


def tuning_facts(runner: StepRunner, batch: int) -> dict:
    """Everything that the best choices depend on, in JSON's types."""
    executor, program = runner.executor, runner.executor.program
    environment = asdict(Environment.of(executor.device))
    environment.pop("python")
    sampler, optimizer = program.sampler, runner.optimizer
    settings = {k: repr(v) for k, v in sorted(plain_attributes(sampler).items()) if k != "seed"}
    return {
        "graph": graph_facts(program.graph),
        "program": program_hash(program.lowered),
        "sites": [[site.key, *site.options] for site in program.sites],
        "sampler": [type(sampler).__name__, settings],
        "batch": batch,
        "optimizer": [type(optimizer.optimizer).__name__, optimizer.clip_grad_norm, optimizer.clip_grad_value],
        "update": [runner.update.accumulate, runner.update.scale is not None, runner.update.average is not None],
        "options": {k: repr(v) for k, v in sorted(vars(program.options).items())},
        "bounds": [executor.slack, executor.warm_up],
        "cuda_graph": runner.cuda_graph,
        "deterministic": is_deterministic(),
        "environment": environment,
    }
