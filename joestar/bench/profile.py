"""``joestar profile``: where the time of a training step goes, what for, and what each stage of compiling brings.

Everything is measured on copies: model, loss, optimizer and random generators of the caller stay as they are, and so
does what steps write beside them (what a function closes over, data of the graph).
"""

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import joestar
from joestar.bench import events, origins, trace
from joestar.bench.beside import NotComparableError, pyg_name, pyg_step
from joestar.bench.measure import PeakMemory, Timing, time_steps
from joestar.bench.step import logical_bytes
from joestar.errors import ConfigError
from joestar.fusion import PASSES
from joestar.profile.ledger import KernelRecord, ProfileRecord, Report, StageRecord
from joestar.profile.phases import BOOKKEEPING, IDLE, SET_UP
from joestar.profile.sizes import step_key
from joestar.runtime.seeds import check_seeds
from joestar.whole_numbers import is_whole, plain

TRACED = 5
"""Steps under the profiler."""
WARM_UP = {"cpu": 3, "cuda": 10}
"""Untimed steps of a stage: those launched one by one settle late on a GPU."""
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
FIXED = ("execution", "cuda_graph", "disable_passes")
"""Options of ``joestar.compile`` that the stages set."""
EAGER, FUSED, COMPILED, REPLAYED, TUNED = (
    "Joestar eager, no passes", "+ fusion", "+ Inductor", "+ CUDA graph", "+ measured choices",
)  # fmt: skip
"""Names of the stages."""
ON_CPU = (
    "Phases are the step's own clocks, averaged over the middle of the timed steps (p20 to p80), as shares of the "
    "median step. Sampling within the forward pass, and every operator, are from torch.profiler over {} more steps; an "
    "operator counts without those it calls."
)
ON_GPU = (
    "Kernels of {} steps launched one by one, without the CUDA graph, each under the phase of the call that launched "
    "it, from torch.profiler. Idle is what they leave of the median step."
)


@dataclass
class Stage:
    """What was measured of one stage: times, memory, kernels, and the report of its step."""

    name: str
    timing: Timing
    phases: dict[str, float]
    kernels: list[KernelRecord]
    launched: float
    memory: int
    bus: dict[str, int]
    report: Report

    def record(self) -> StageRecord:
        """Its bar in the ablation."""
        return StageRecord(self.name, self.timing.median, self.launched, self.memory)


def profile(
    model: nn.Module,
    sampler,
    loss_fn: Callable,
    optimizer: torch.optim.Optimizer,
    seeds: Tensor,
    batch_size: int = 1000,
    *,
    steps: int = 20,
    warm_up: int | None = None,
    ablation: bool = True,
    say: Callable[[str], None] = lambda text: None,
    **options,
) -> Report:
    """Measures padded training steps: time per phase and kernel, memory, and the stages of compiling (figure 5.14).

    Where PyG is installed and has the same model, its layers in plain PyTorch are timed, too: ``profile.baselines``.

    Args:
        model, sampler, loss_fn, optimizer: as for ``joestar.compile``; none of them is changed.
        seeds: training nodes ``[n]``, as ``step.epoch`` takes them; batch_size: per step, at most ``n``; only full
            batches are timed.
        steps, warm_up: timed and untimed steps of every stage; by default 3 untimed ones, 10 on a GPU.
        ablation: also time the stages before the last: kernels without fusion, without Inductor, without CUDA graph.
        say: called with a line after every stage; options: further ones of ``joestar.compile``. With ``tune=True`` the
        last stage makes its choices by timing.

    Returns:
        The report of the last stage's step, with ``profile`` filled.

    Raises:
        ConfigError: for impossible numbers, or options that the stages set themselves.
        SeedError: unless ``seeds`` are ids of nodes, at least one.
    """
    if warm_up is None:
        warm_up = WARM_UP[sampler.graph.device.type]
    steps, warm_up, batch_size = plain((steps, warm_up, batch_size))
    for name, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0), ("batch_size", batch_size, 1)):
        if not is_whole(value) or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}; got {value!r}.")
    taken = sorted(set(FIXED) & options.keys())
    if taken:
        raise ConfigError(f"profile sets {taken[0]} itself: the stages of the ablation differ in it. Leave it out.")
    graph, seeds = sampler.graph, check_seeds(seeds, sampler.graph)
    batch = min(batch_size, seeds.numel())
    run = _Run(model, sampler, loss_fn, optimizer, seeds, batch, steps, warm_up)
    measured = []
    with torch.random.fork_rng([graph.device] if graph.device.type == "cuda" else []):
        for name, settings in _plan(options, graph.device, ablation):
            measured.append(run.stage(name, settings))
            say(f"{name}: {measured[-1].timing.median:.3f} ms/step")
        baselines, missing = run.beside(say, options.get("autocast")) if ablation else ([], "")
        bandwidth = copy_bandwidth(graph.device)
    last = measured[-1]
    kernels = next((stage.kernels for stage in reversed(measured) if stage.kernels), [])
    on_gpu = graph.device.type == "cuda"
    phases = _gpu_phases(kernels, last.timing.median) if on_gpu else last.phases
    report = last.report
    report.profile = ProfileRecord(
        last.timing.median, last.timing.p20, last.timing.p80, last.timing.steps, phases, kernels,
        [stage.record() for stage in measured] if ablation else [], last.memory,
        _logical_bytes(model, sampler, seeds[:batch]), bandwidth, last.bus, -(-seeds.numel() // batch),
        (ON_GPU if on_gpu else ON_CPU).format(TRACED), baselines, missing,
    )  # fmt: skip
    report.settings = {**run.settings(), **{name: str(value) for name, value in options.items()}}
    return report


def _plan(options: dict, device: torch.device, ablation: bool) -> list[tuple[str, dict]]:
    """(stage, options of ``joestar.compile``), each with one thing more than the one before."""
    options = dict(options)
    tuned, backend = options.pop("tune", False), options.get("backend", "inductor")
    plain = {key: value for key, value in options.items() if key not in ("choices", "rewrite_limit")}
    everything = tuple(spec.name for spec in PASSES)
    plan = [
        (EAGER, {**plain, "backend": "eager", "disable_passes": everything, "cuda_graph": False}),
        (FUSED, {**options, "backend": "eager", "cuda_graph": False}),
    ]
    if backend == "inductor":
        plan.append((COMPILED, {**options, "cuda_graph": False}))
    launched = plan[-1]  # a CUDA graph does not say which phase a kernel is of
    if device.type == "cuda":
        plan.append((REPLAYED, {**options, "cuda_graph": True}))
    if tuned:
        plan.append((TUNED, {**plan[-1][1], "tune": True}))
    if ablation:
        return plan
    return [launched, plan[-1]] if device.type == "cuda" else plan[-1:]


@dataclass
class _Run:
    """What all stages share; ``shared``: what steps have beside their copies, once a stage has shown it."""

    model: nn.Module
    sampler: object
    loss_fn: Callable
    optimizer: torch.optim.Optimizer
    seeds: Tensor
    batch: int
    steps: int
    warm_up: int
    shared: "_Shared | None" = None

    def settings(self) -> dict[str, str]:
        """What it takes to repeat the run, as text."""
        loss = getattr(self.loss_fn, "__name__", None) or repr(self.loss_fn)
        options = ", ".join(f"{name}={value}" for name, value in self.optimizer.defaults.items() if value is not None)
        values = {
            "model": repr(self.model), "loss": loss, "optimizer": f"{type(self.optimizer).__name__}({options})",
            "batch_size": self.batch, "training nodes": self.seeds.numel(), "timed steps": self.steps,
            "untimed steps": self.warm_up, "seed": getattr(self.sampler, "seed", 0),
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}

    def beside(self, say: Callable[[str], None], autocast) -> tuple[list[StageRecord], str]:
        """The same training in PyG's layers without Joestar, or nothing and why."""
        try:
            with contextlib.nullcontext() if self.shared is None else self.shared.restored():
                return [self._beside(say, autocast)], ""
        except NotComparableError as reason:
            return [], str(reason)
        except Exception as error:  # of another library: no reason to lose the profile
            return [], f"Plain PyTorch could not be timed: {type(error).__name__}, {str(error).partition(chr(10))[0]}."

    def _beside(self, say: Callable[[str], None], autocast) -> StageRecord:
        memory = PeakMemory(self.sampler.graph.device)
        step = pyg_step(self.model, self.sampler, self._copies()[2], self.optimizer, autocast)
        name, device = pyg_name(), self.sampler.graph.device
        batches = self._full(lambda seeds: seeds[torch.randperm(seeds.numel(), device=device)].split(self.batch))
        memory.forget()
        timing = time_steps(lambda: step(next(batches)), self.steps, self.warm_up, device)
        peak = memory.bytes()
        launched = trace.launched(events.record(lambda: step(next(batches)), TRACED, device), TRACED)
        say(f"{name}: {timing.median:.3f} ms/step")
        return StageRecord(name, timing.median, launched, peak)

    def stage(self, name: str, settings: dict) -> Stage:
        """Compiles a step on copies, measures it, and frees everything again."""
        memory = PeakMemory(self.sampler.graph.device)
        result = self._measured(name, settings, memory)
        gc.collect()
        return result

    def _measured(self, name: str, settings: dict, memory: PeakMemory) -> Stage:
        graph = self.sampler.graph
        model, optimizer, loss_fn = self._copies()
        step = joestar.compile(model, self.sampler, loss_fn, optimizer, **settings)
        program = step._runner.executor.program
        program.trace(self.seeds[: self.batch], step_key(step.seed, 0, 0, graph.device))
        copies = [each for each in (model, loss_fn) if isinstance(each, nn.Module) and each is not self.loss_fn]
        self.shared = _Shared(program, copies)
        with self.shared.restored():
            return self._timed(name, settings, memory, step)

    def _copies(self) -> tuple[nn.Module, torch.optim.Optimizer, Callable]:
        """Of model, optimizer and loss, which refer to one another; of what cannot be copied, the loss itself."""
        given, graph = (self.model, self.optimizer, self.loss_fn), self.sampler.graph
        owner = getattr(self.loss_fn, "__self__", self.loss_fn)
        if not isinstance(owner, nn.Module):  # a trainer's method would bring its data along
            return *copy.deepcopy(given[:2], {id(graph): graph}), self.loss_fn
        try:
            return copy.deepcopy(given, {id(graph): graph})
        except Exception:  # a loss that holds a file, a lock, a result of autograd
            return *copy.deepcopy(given[:2], {id(graph): graph}), self.loss_fn

    def _timed(self, name: str, settings: dict, memory: PeakMemory, step) -> Stage:
        from joestar.torch_private import inductor_config as config

        graph, program = self.sampler.graph, step._runner.executor.program
        origins.mark(program.captured.gm.graph, program.lowered)
        losses = self._full(lambda seeds: step.epoch(seeds, self.batch))
        on_gpu, clocks = graph.device.type == "cuda", _Clocks(step)
        with config.patch({"cpp.enable_kernel_profile": True}), _programs(settings) as compiled:
            for _ in range(1 + self.warm_up):  # the first step compiles
                next(losses)
            memory.forget()
            with clocks:
                timing = time_steps(
                    lambda: clocks.time(lambda: next(losses)), self.steps, 0, graph.device,
                    min(10, self.steps) if on_gpu else 1,
                )  # fmt: skip
            peak = memory.bytes()
            traced = events.record(lambda: next(losses), TRACED, graph.device)
        losses.close()
        program = step._runner.executor.program  # another one, if choices were measured
        kernels = trace.kernels(traced, origins.eager_program(program.padded.gm), compiled)
        origins.unmark(program.captured.gm.graph)
        return Stage(
            name, timing, {} if on_gpu else _cpu_phases(clocks.steps, kernels, timing.median), kernels,
            trace.launched(traced, TRACED), peak, events.copied(traced, TRACED) if on_gpu else {}, step.report(),
        )  # fmt: skip

    def _full(self, epoch: Callable[[Tensor], Iterable[Tensor]]) -> Iterator[Tensor]:
        """What ``epoch`` gives for the seeds of full batches, again and again."""
        seeds = self.seeds[: self.seeds.numel() // self.batch * self.batch]
        while True:
            yield from epoch(seeds)


class _Shared:
    """What steps of a traced program write, and what gets gradients, besides parameters and buffers of the copies."""

    def __init__(self, program, copies: list[nn.Module]):
        own = {id(tensor) for module in copies for tensor in (*module.parameters(), *module.buffers())}
        held = [role.tensor for role in program.captured.roles if role.held and id(role.tensor) not in own]
        self._leaves = [tensor for tensor in held if tensor.is_leaf and tensor.requires_grad]
        self._written = [tensor for tensor in program.written if id(tensor) not in own]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever runs inside, afterwards it is as before."""
        gradients = [leaf.grad for leaf in self._leaves]
        values = [tensor.detach().clone() for tensor in self._written]
        for leaf in self._leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, gradient in zip(self._leaves, gradients, strict=True):
                leaf.grad = gradient
            with torch.no_grad():
                for tensor, value in zip(self._written, values, strict=True):
                    tensor.copy_(value)


def _programs(settings: dict) -> contextlib.AbstractContextManager[list[origins.Program]]:
    """Collects what Inductor compiles, where it does."""
    return contextlib.nullcontext([]) if settings.get("backend") == "eager" else origins.recorded()


class _Clocks:
    """Milliseconds per step: ``total``, ``take`` (the step without what an epoch adds), and the step's own clocks."""

    OWN = ("forward", "backward", "optimizer")

    def __init__(self, step):
        self.steps: list[dict[str, float]] = []
        self._counters, self._runner, self._taken = step.counters, step._runner, 0.0

    def __enter__(self) -> "_Clocks":
        take = self._runner.take

        def timed(run) -> Tensor:
            start = time.perf_counter()
            try:
                return take(run)
            finally:
                self._taken += time.perf_counter() - start

        self._runner.take = timed
        return self

    def __exit__(self, *error) -> None:
        del self._runner.take

    def time(self, call: Callable[[], object]) -> None:
        """Notes one step."""
        before, taken, start = dict(self._counters.seconds), self._taken, time.perf_counter()
        call()
        found = {"total": time.perf_counter() - start, "take": self._taken - taken}
        found |= {name: self._counters.seconds.get(name, 0.0) - before.get(name, 0.0) for name in self.OWN}
        self.steps.append({name: seconds * 1e3 for name, seconds in found.items()})


def _cpu_phases(steps: list[dict[str, float]], kernels: list[KernelRecord], median: float) -> dict[str, float]:
    """Milliseconds per phase, whose sum is the median step: means over the middle steps (p20 to p80), scaled to it.

    Steps far from the median, which something else has disturbed, do not count. Sampling is a share of the forward
    pass, as the trace has it. What the step's clocks leave of a step is bookkeeping, what is outside of it the epoch's.
    """
    ordered = sorted(steps, key=lambda step: step["total"])
    cut = len(ordered) // 5
    middle = ordered[cut : len(ordered) - cut]
    mean = {name: statistics.fmean(step[name] for step in middle) for name in middle[0]}
    traced = trace.phases(kernels)
    share = traced["sampling"] / ((traced["sampling"] + traced["forward"]) or 1.0)
    own = sum(mean[name] for name in _Clocks.OWN)
    found = {
        "sampling": mean["forward"] * share,
        "forward": mean["forward"] * (1 - share),
        "backward": mean["backward"],
        "optimizer": mean["optimizer"],
        BOOKKEEPING: max(0.0, mean["take"] - own),
        SET_UP: max(0.0, mean["total"] - max(mean["take"], own)),
    }
    scale = median / (sum(found.values()) or 1.0)
    return {name: spent * scale for name, spent in found.items()}


def _gpu_phases(kernels: list[KernelRecord], total: float) -> dict[str, float]:
    """Milliseconds per phase, summed over kernels, and what the GPU is idle."""
    found = trace.phases(kernels)
    found[IDLE] = max(0.0, total - sum(found.values()))
    return found


def _logical_bytes(model: nn.Module, sampler, seeds: Tensor) -> int | None:
    """Bytes that a step must move; known for GraphSAGE without normalisation and jumping knowledge only."""
    if type(model) is not joestar.nn.GraphSAGE or model.norm is not None or model.jk_mode is not None:
        return None
    graph = sampler.graph
    blocks, x = sampler.sample(graph.keyed(0), seeds), graph.ndata["x"]
    counts = [blocks[-1].num_dst, *(block.num_src for block in blocks[::-1])]
    edges = [block.num_edges for block in blocks]
    return logical_bytes(counts, edges, x.shape[1], model.hidden_channels, x.element_size())


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory, median of ten."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    timing = time_steps(lambda: target.copy_(source), 10, 3, device)
    return 2 * size / timing.median * 1e3
