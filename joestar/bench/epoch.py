"""``joestar bench epoch``: whole training epochs under a memory budget, every way of feeding the device in one run.

| mode | structure | features | sampling |
|---|---|---|---|
| ``resident`` | device | device | in the step |
| ``pinned`` | device | page-locked host memory, read in place | in the step |
| ``match`` | device | the same, rows of the batch before stay (``bench/match.py``) | ahead, and in the step |
| ``match-reorder`` | device | the same, batches in an order in which they share rows | ahead, and in the step |
| ``cached`` | device | as ``pinned``, hot rows on the device as far as the budget goes | in the step |
| ``cached-match`` | device | as ``match-reorder``, the same hot rows | ahead, and in the step |
| ``large-batch`` | host | host, hot rows on the device | first stage on the CPU, then in the step |
| ``large-batch-cold`` | host | host, no hot rows | the same |
| ``partitions`` | host | host, no hot rows | groups of parts with historical embeddings, then in the step |
| ``cpu`` | host | host; gathered and copied | on the CPU, ahead, in a pipeline; the model runs eagerly |

``resident`` is what everything costs that is not feeding; only the others but ``cpu`` keep to the budget.
"""

import gc
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from joestar.bench import epoch_modes
from joestar.bench.busy import busy_share
from joestar.bench.epoch_modes import Fed, Job
from joestar.bench.measure import PeakMemory, check_some, check_words
from joestar.bench.setting import PRECISIONS, Setting, check_device, machine
from joestar.bench.step import graph_of, network, orders
from joestar.errors import JoestarError
from joestar.graph_api import Graph
from joestar.kernels.scratch import release_tables
from joestar.profile.numbers import parse_bytes
from joestar.store import speeds

MODES = tuple(epoch_modes.MODES)


@dataclass
class Row:
    """What was measured of one mode.

    Attributes:
        seconds: of every epoch, wall clock; the first compiles and captures. setup: before it.
        bus: bytes over the bus in an epoch, where they are known. memory: peak in bytes; cpu: seconds of all threads
            in the last epoch. predicted_seconds, predicted_memory: before the first epoch.
        match: share of the rows, beside hot ones, that the batch before had left on the device.
        planned, stages: of macro-batches, seconds of an epoch by who needs them, before the first one, and of the last
            one by the stages of the pipeline, which run beside one another.
        busy: share of the time in which kernels run, from an epoch of its own; ``None`` on a CPU.
        steps: of an epoch; every macro-batch ends in a smaller one. loss: mean of the last epoch. note: why there is
            nothing.
    """

    mode: str
    model: str
    seconds: list[float] = field(default_factory=list)
    setup: float = 0.0
    bus: float | None = None
    memory: int = 0
    cpu: float = 0.0
    predicted_seconds: float | None = None
    predicted_memory: int | None = None
    match: float | None = None
    busy: float | None = None
    steps: int = 0
    loss: float = float("nan")
    note: str = ""
    ids: str = ""
    planned: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds of an epoch, the first left out."""
        return statistics.median(self.seconds[1:] or self.seconds)


def run(
    setting: Setting, budget: str, modes: tuple[str, ...] = MODES, say: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict], None] = lambda result: None, busy: bool = True,
) -> dict:  # fmt: skip
    """Measures every mode for every model of the setting; a dictionary that is JSON.

    Args:
        say: called with a line for every row. keep: called with what there is so far after every row.
        busy: whether to measure how busy a GPU is, in a further epoch.

    Raises:
        ConfigError: for unknown words, widths that cannot be, or a GPU that is not there.
    """
    setting.check()
    check_some(mode=modes)
    check_words(mode=(modes, MODES), precision=([setting.precision], (*PRECISIONS, "fp16")))
    device, limit = check_device(setting.device), parse_bytes(budget, "--budget")
    torch.backends.cuda.matmul.allow_tf32 = setting.precision != "fp32"
    result = {"machine": machine(device), "setting": {**asdict(setting), "budget": limit}, "rows": []}
    for ids in orders(setting):
        graph = on_host(graph_of(ids, device, setting))
        say(f"{graph!r}")
        speeds(device, max(16, graph.ndata["x"][:1].nbytes))  # measured here, not in the memory of a mode
        for model in setting.models:
            for mode in modes:
                row = _row(mode, model, graph, setting, limit, device, busy)
                row.ids = ids
                result["rows"].append(asdict(row))
                say(line(row))
                keep(result)
        del graph
    return result


def line(row: Row) -> str:
    """A row as text."""
    if row.note:
        return f"{row.mode:14}{row.note}"
    bus = "" if row.bus is None else f", {row.bus / 1e9:.1f} GB over the bus"
    matched = "" if row.match is None else f", {row.match:.0%} matched"
    busy = "" if row.busy is None else f", GPU busy {row.busy:.0%}"
    seconds = _beside(row.median, row.predicted_seconds, ".3f")
    memory = _beside(row.memory, row.predicted_memory, ".2f", 2**30)
    return (
        f"{row.mode:14}{row.median:8.3f} s/epoch{seconds}{bus}{matched}{busy}, peak {row.memory / 2**30:.2f} GiB"
        f"{memory}, CPU {row.cpu:.1f} s, set-up {row.setup:.1f} s, first {row.seconds[0]:.1f} s"
    )


def _beside(found: float, expected: float | None, form: str, unit: float = 1) -> str:
    return "" if not expected else f" (plan {expected / unit:{form}}, x {found / expected:.2f})"


def on_host(graph: Graph) -> Graph:
    """The graph in host memory, large tensors part by part (none is on both sides twice)."""
    if graph.device.type == "cpu":
        return graph
    ndata = dict(graph.ndata)
    made = Graph.from_csc(_moved(graph.indptr), _moved(graph.indices), validate=False)
    made.name, made.num_classes = graph.name, graph.num_classes
    made.train_idx = graph.train_idx.cpu()
    for name in list(ndata):
        made.ndata[name] = _moved(ndata.pop(name))
    return made


def _moved(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    rows = max(1, (1 << 28) // max(1, tensor[:1].numel()))
    for first in range(0, tensor.shape[0], rows):
        host[first : first + rows].copy_(tensor[first : first + rows])
    return host


def _row(
    mode: str, model: str, graph: Graph, setting: Setting, budget: int, device: torch.device, busy: bool
) -> Row:  # fmt: skip
    gc.collect()
    if device.type == "cuda":
        release_tables()  # of the rows before, as large as their arenas
        torch.cuda.empty_cache()
    torch.manual_seed(setting.seed)
    net = network(model, graph, setting).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=device.type == "cuda" and mode == "cpu")
    memory, start = PeakMemory(device), time.perf_counter()
    memory.forget()
    _cap(device, budget if mode in epoch_modes.KEEP else None)
    try:
        job = Job(graph, net, optimizer, setting, budget, device)
        fed = epoch_modes.MODES[mode](job)
        row = Row(mode, model, predicted_seconds=fed.seconds, predicted_memory=fed.memory, planned=fed.planned)
        row.setup = time.perf_counter() - start
        for _ in range(1 + setting.epochs):
            _measure(fed, row, job)
        row.bus, row.match, row.memory = fed.bus(), fed.match(), memory.bytes()
        if busy:
            row.busy = _busy(fed, row, job)
    except (JoestarError, torch.OutOfMemoryError) as error:
        return Row(mode, model, note=str(error).splitlines()[0])
    finally:
        _cap(device, None)
    return row


def _measure(fed: Fed, row: Row, job: Job) -> None:
    """An epoch by the wall clock."""
    _wait(job.device)
    start, used, before = time.perf_counter(), _cpu_seconds(), fed.stages()
    total, row.steps = torch.zeros((), device=job.device), 0
    losses = fed.epoch()
    for loss in losses:
        total += loss.detach()
        row.steps += 1
    row.loss = float(total) / row.steps
    _wait(job.device)
    row.seconds.append(time.perf_counter() - start)
    row.cpu = _cpu_seconds() - used
    row.stages = {name: seconds - before.get(name, 0.0) for name, seconds in fed.stages().items()}
    losses.close()


def _busy(fed: Fed, row: Row, job: Job) -> float | None:
    losses = fed.epoch()
    try:
        return busy_share(losses, job.device, row.median / row.steps)
    finally:
        losses.close()


def _cap(device: torch.device, budget: int | None) -> None:
    """PyTorch takes no more of a GPU's memory than this from now on."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else min(1.0, budget / total), index)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
