"""Whole epochs on the processes of a job: what each of them runs for ``joestar bench epoch --gpus``.

    python -m joestar.bench.ranks TASK FILE

``TASK`` is a ``Task`` as JSON; rank 0 writes the rows to ``FILE``.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.measure import PeakMemory
from joestar.bench.setting import Setting, machine
from joestar.bench.step import graph_of, network, orders

SUMS = 20
"""Sums over the ranks that are timed together, and times that they are."""


@dataclass
class Task:
    """What all processes do.

    Attributes:
        setting: see ``bench.step.Setting``; ``batch_size`` is per process.
        backend: of ``joestar.compile``.
    """

    setting: Setting
    backend: str = "inductor"

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> "Task":
        """What ``text`` gave."""
        values = json.loads(text)
        tuples = {name: tuple(value) for name, value in values["setting"].items() if isinstance(value, list)}
        return Task(Setting(**{**values["setting"], **tuples}), values["backend"])


@dataclass
class Row:
    """What was measured of a model on so many processes.

    Attributes:
        seconds: of every epoch, wall clock from before its first step until all ranks are done; the first compiles.
        setup: seconds for the graph and the model, before. steps: of an epoch; batch: seeds of one, of all ranks.
        reduced_bytes: of the buffer that is summed in every step; link_bytes: what a rank reads of the others
            for it, or sends to its neighbour in a ring, per step. reduce_us: microseconds of that sum alone (on
            a GPU captured, as in a step).
        share: of it in the time of a step. memory: peak of rank 0 in bytes, beyond what was there before.
        loss: mean of the last epoch. speedup: against the first number of processes, over the same seeds.
        note: why there is nothing.
    """

    model: str
    world: int
    device: str = ""
    seconds: list[float] = field(default_factory=list)
    setup: float = 0.0
    steps: int = 0
    batch: int = 0
    seeds_per_second: float = 0.0
    reduced_bytes: int = 0
    link_bytes: int = 0
    reduce_us: float = 0.0
    share: float = 0.0
    memory: int = 0
    overflows: int = 0
    loss: float = float("nan")
    speedup: float | None = None
    note: str = ""
    machine: str = ""

    @property
    def median(self) -> float:
        """Seconds of an epoch, the first left out."""
        return statistics.median(self.seconds[1:] or self.seconds)


def measure(task: Task) -> list[dict]:
    """Rows of all models, as plain values; the same on all ranks but for memory and times."""
    setting = task.setting
    group = joestar.distributed.init(device=setting.device)
    device = torch.device(setting.device) if group is None else group.device
    torch.backends.cuda.matmul.allow_tf32 = setting.precision != "fp32"
    start = time.perf_counter()
    graph = graph_of(orders(setting)[0], device, setting)
    made = time.perf_counter() - start
    return [asdict(_row(name, graph, task, group, device, made)) for name in setting.models]


def _row(name: str, graph, task: Task, group, device: torch.device, made: float) -> Row:
    setting, start, memory = task.setting, time.perf_counter(), PeakMemory(device)
    model = network(name, graph, setting)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting.precision)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, autocast=autocast, backend=task.backend)
    world = joestar.distributed.world_size()
    row = Row(name, world, str(device), machine=machine(device), setup=made + time.perf_counter() - start)
    for _ in range(1 + setting.epochs):
        seconds, row.loss = _epoch(step, graph.train_idx, setting.batch_size, group, device)
        row.seconds.append(seconds)
        if len(row.seconds) == 1:
            memory.forget()
    row.steps, row.batch = len(step.epoch(graph.train_idx, setting.batch_size)), world * setting.batch_size
    row.seeds_per_second = graph.train_idx.numel() / row.median
    row.memory, row.overflows = memory.bytes(), step.counters.overflows
    if group is not None:
        reduction = step._runner.ranks.reduction
        row.reduced_bytes, row.link_bytes = reduction.bytes, reduction.read_bytes
        row.reduce_us = _sum_us(group, reduction.again, device)
        row.share = row.reduce_us * row.steps / (row.median * 1e6)
    return row


def _epoch(step, idx, batch: int, group, device: torch.device) -> tuple[float, float]:
    """(seconds, mean loss) of an epoch that all ranks begin and end together."""
    _together(group, device, "an epoch that is timed")
    start = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64, device=device)
    number = 0
    for loss in step.epoch(idx, batch):
        total += loss
        number += 1
    mean = float(total) / number
    _together(group, device, "the end of an epoch that is timed")
    return time.perf_counter() - start, mean


def _together(group, device: torch.device, what: str) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        group.exchange(what)


def _sum_us(group, again: Callable[[], None], device: torch.device) -> float:
    """Microseconds of the sum over the ranks, as steps make it."""
    group.exchange("the timing of sums")

    def sums() -> None:
        for _ in range(SUMS):
            again()

    sums()
    launch = sums
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sums()
        launch = graph.replay
    found = []
    for _ in range(SUMS):
        _together(None, device, "")
        start = time.perf_counter()
        launch()
        _together(None, device, "")
        found.append((time.perf_counter() - start) * 1e6 / SUMS)
    if device.type == "cuda":
        graph.reset()  # before the communicator that it holds on to
    return statistics.median(found)


def main(task: str, file: str) -> None:
    """Measures, and writes on rank 0."""
    rows = measure(Task.read(task))
    if joestar.distributed.is_first():
        with open(file, "w") as out:
            json.dump(rows, out)
    joestar.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
