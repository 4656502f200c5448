"""``joestar profile``: where the time of a training step goes, and what each stage of compiling brings.

Everything is measured on copies: the model, the optimizer and the random generators of the caller stay as they are.
"""

import copy
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import joestar
from joestar.bench import trace
from joestar.bench.measure import PeakMemory, Timing, time_steps
from joestar.bench.step import logical_bytes
from joestar.errors import ConfigError
from joestar.fusion import PASSES
from joestar.profile.ledger import KernelRecord, ProfileRecord, Report, StageRecord

TRACED = 5
"""Steps under the profiler."""
WARM_UP = {"cpu": 3, "cuda": 10}
"""Untimed steps of a stage: those launched one by one settle late on a GPU."""
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
FIXED = ("execution", "cuda_graph", "disable_passes")
"""Options of ``joestar.compile`` that the stages set."""
ON_CPU = (
    "Phases: the step's own clocks, median over the timed steps; sampling within them, and every operator, from "
    "torch.profiler over {} more steps. An operator counts without those it calls."
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

    Args:
        model, sampler, loss_fn, optimizer: as for ``joestar.compile``; none of them is changed.
        seeds: training nodes ``[n]``; batch_size: per step, at most ``n``; only full batches are timed.
        steps, warm_up: timed and untimed steps of every stage; by default 3 untimed ones, 10 on a GPU.
        ablation: also time the stages before the last: kernels without fusion, without Inductor, without CUDA graph.
        say: called with a line after every stage; options: further ones of ``joestar.compile``. With ``tune=True`` the
        last stage makes its choices by timing.

    Returns:
        The report of the last stage's step, with ``profile`` filled.

    Raises:
        ConfigError: for impossible numbers, or options that the stages set themselves.
    """
    if warm_up is None:
        warm_up = WARM_UP[sampler.graph.device.type]
    for name, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}; got {value!r}.")
    taken = sorted(set(FIXED) & options.keys())
    if taken:
        raise ConfigError(f"profile sets {taken[0]} itself: the stages of the ablation differ in it. Leave it out.")
    if seeds.numel() == 0:
        raise ConfigError("there are no seeds to profile with: expected node ids [n], got 0 of them.")
    graph, batch = sampler.graph, min(batch_size, seeds.numel())
    run = _Run(model, sampler, loss_fn, optimizer, seeds, batch, steps, warm_up)
    measured = []
    with torch.random.fork_rng([graph.device] if graph.device.type == "cuda" else []):
        for name, settings in _plan(options, graph.device, ablation):
            measured.append(run.stage(name, settings))
            say(f"{name}: {measured[-1].timing.median:.3f} ms/step")
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
        (ON_GPU if on_gpu else ON_CPU).format(TRACED),
    )  # fmt: skip
    return report


def _plan(options: dict, device: torch.device, ablation: bool) -> list[tuple[str, dict]]:
    """(stage, options of ``joestar.compile``), each with one thing more than the one before."""
    options = dict(options)
    tuned, backend = options.pop("tune", False), options.get("backend", "inductor")
    plain = {key: value for key, value in options.items() if key not in ("choices", "rewrite_limit")}
    everything = tuple(spec.name for spec in PASSES)
    plan = [
        ("eager kernels", {**plain, "backend": "eager", "disable_passes": everything, "cuda_graph": False}),
        ("+ fusion", {**options, "backend": "eager", "cuda_graph": False}),
    ]
    if backend == "inductor":
        plan.append(("+ Inductor", {**options, "cuda_graph": False}))
    launched = plan[-1]  # a CUDA graph does not say which phase a kernel is of
    if device.type == "cuda":
        plan.append(("+ CUDA graph", {**options, "cuda_graph": True}))
    if tuned:
        plan.append(("+ measured choices", {**plan[-1][1], "tune": True}))
    if ablation:
        return plan
    return [launched, plan[-1]] if device.type == "cuda" else plan[-1:]


@dataclass
class _Run:
    """What all stages share."""

    model: nn.Module
    sampler: object
    loss_fn: Callable
    optimizer: torch.optim.Optimizer
    seeds: Tensor
    batch: int
    steps: int
    warm_up: int

    def stage(self, name: str, settings: dict) -> Stage:
        """Compiles a step on copies, measures it, and frees everything again."""
        memory = PeakMemory(self.sampler.graph.device)
        result = self._measured(name, settings, memory)
        gc.collect()
        return result

    def _measured(self, name: str, settings: dict, memory: PeakMemory) -> Stage:
        from torch._inductor import config

        graph = self.sampler.graph
        model, optimizer = copy.deepcopy((self.model, self.optimizer), {id(graph): graph})
        step = joestar.compile(model, self.sampler, self.loss_fn, optimizer, **settings)
        losses, clocks = self._batches(step), []

        def timed():
            next(losses)
            clocks.append(dict(step.counters.seconds))

        on_gpu = graph.device.type == "cuda"
        with config.patch({"cpp.enable_kernel_profile": True}):  # the trace then shows Inductor's loops by name
            for _ in range(1 + self.warm_up):  # the first step compiles
                next(losses)
            memory.forget()
            clocks[:] = [dict(step.counters.seconds)]
            timing = time_steps(timed, self.steps, 0, graph.device, min(10, self.steps) if on_gpu else 1)
            peak = memory.bytes()
            events = trace.record(lambda: next(losses), TRACED, graph.device)
        losses.close()
        kernels = trace.kernels(events)
        return Stage(
            name, timing, {} if on_gpu else _cpu_phases(clocks, kernels, timing.median), kernels,
            trace.launched(events, TRACED), peak, trace.copied(events, TRACED) if on_gpu else {}, step.report(),
        )  # fmt: skip

    def _batches(self, step) -> Iterator[Tensor]:
        """Losses of full batches, epoch after epoch."""
        seeds = self.seeds[: self.seeds.numel() // self.batch * self.batch]
        while True:
            yield from step.epoch(seeds, self.batch)


def _cpu_phases(clocks: list[dict[str, float]], kernels: list[KernelRecord], total: float) -> dict[str, float]:
    """Milliseconds per phase: medians of the step's clocks, sampling taken out of the forward pass, and the rest."""
    steps = list(itertools.pairwise(clocks))
    spent = {
        name: statistics.median((after[name] - before.get(name, 0.0)) * 1e3 for before, after in steps)
        for name in clocks[0]
    }
    sampling = min(trace.phases(kernels)["sampling"], spent.get("forward", 0.0))
    found = {"sampling": sampling, "forward": spent.pop("forward", 0.0) - sampling}
    found |= {name: spent.pop(name, 0.0) for name in ("backward", "optimizer")}
    found["set-up of the epoch"] = spent.get("prepare", 0.0)
    found["rest"] = max(0.0, total - sum(found.values()))
    return found


def _gpu_phases(kernels: list[KernelRecord], total: float) -> dict[str, float]:
    """Milliseconds per phase, summed over kernels, and what the GPU is idle."""
    found = trace.phases(kernels)
    found["idle"] = max(0.0, total - sum(found.values()))
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
