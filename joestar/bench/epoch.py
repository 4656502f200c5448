"""``joestar bench epoch``: whole training epochs under a memory budget, every way of feeding the device in one run.

| mode | structure | features | sampling |
|---|---|---|---|
| ``resident`` | device | device | in the step |
| ``pinned`` | device | page-locked host memory, read in place | in the step |
| ``cached`` | device | the same, hot rows on the device as far as the budget goes | in the step |
| ``large-batch`` | host | host, hot rows on the device | first stage on the CPU, then in the step |
| ``cpu`` | host | host; gathered and copied | on the CPU, ahead, in a pipeline; the model runs eagerly |

``resident`` is what everything costs that is not feeding; only the others keep to the budget.
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import joestar
from joestar.bench.measure import PeakMemory
from joestar.bench.step import Setting, check_device, graph_of, machine, network, orders
from joestar.errors import ConfigError, JoestarError
from joestar.graph_api import Block, Graph, SamplingContext
from joestar.runtime.seeds import shuffled
from joestar.staged.planning import Planner, parse_bytes
from joestar.stages import Pipeline
from joestar.store import FeatureStore, host_gather, pin, pinned_empty
from joestar.store.hot import choose_hot, count_needed

MODES = ("resident", "pinned", "cached", "large-batch", "cpu")
COUNTED = 64
"""Mini-batches from which is counted which rows the cache of ``cached`` holds."""


@dataclass
class Row:
    """What was measured of one mode.

    Attributes:
        seconds: of every epoch, wall clock; the first compiles and captures. setup: before it.
        bus: bytes over the bus in an epoch, where they are known. memory: peak in bytes; cpu: seconds of all threads
            in the last epoch. predicted_seconds, predicted_memory: of the plan, before the run.
        loss: mean of the last epoch. note: why there is nothing.
    """

    mode: str
    model: str
    seconds: list[float]
    setup: float = 0.0
    bus: float | None = None
    memory: int = 0
    cpu: float = 0.0
    predicted_seconds: float | None = None
    predicted_memory: int | None = None
    loss: float = float("nan")
    note: str = ""


def run(setting: Setting, budget: str, modes: tuple[str, ...] = MODES, say: Callable = lambda text: None) -> dict:
    """Measures every mode for every model of the setting; a dictionary that is JSON.

    Raises:
        ConfigError: for unknown modes, or a GPU that is not there.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ConfigError(f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}.")
    device, limit = check_device(setting.device), parse_bytes(budget, "--budget")
    torch.backends.cuda.matmul.allow_tf32 = setting.precision != "fp32"
    rows = []
    for ids in orders(setting):
        graph = on_host(graph_of(ids, device, setting))
        say(f"{graph!r}")
        for model in setting.models:
            for mode in modes:
                rows.append(_row(mode, model, graph, setting, limit, device))
                say(line(rows[-1]))
    found = {**asdict(setting), "budget": limit}
    return {"machine": machine(device), "setting": found, "rows": [asdict(row) for row in rows]}


def line(row: Row) -> str:
    """A row as text."""
    if row.note:
        return f"{row.mode:12} {row.note}"
    bus = "" if row.bus is None else f", {row.bus / 1e9:.1f} GB over the bus"
    return (
        f"{row.mode:12}{min(row.seconds[1:] or row.seconds):8.3f} s/epoch{bus}, peak {row.memory / 2**30:.2f} GiB, "
        f"CPU {row.cpu:.1f} s"
    )


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


def _row(mode: str, model: str, graph: Graph, setting: Setting, budget: int, device: torch.device) -> Row:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(setting.seed)
    net = network(model, graph, setting).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=device.type == "cuda" and mode == "cpu")
    memory, start = PeakMemory(device), time.perf_counter()
    memory.forget()
    _cap(device, budget if mode in ("pinned", "cached", "large-batch") else None)
    try:
        epochs = _MODES[mode](graph, net, optimizer, setting, budget, device)
        row = next(epochs)
        row.mode, row.model, row.setup = mode, model, time.perf_counter() - start
        for _ in range(1 + setting.epochs):
            _wait(device)
            start, used = time.perf_counter(), _cpu_seconds()
            row.loss = float(next(epochs))
            _wait(device)
            row.seconds.append(time.perf_counter() - start)
            row.cpu = _cpu_seconds() - used
        next(epochs, None)
    except (JoestarError, torch.OutOfMemoryError) as error:
        return Row(mode, model, [], note=str(error).splitlines()[0])
    finally:
        _cap(device, None)
    row.memory = memory.bytes()
    return row


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


# --- modes: generators of a row without figures, then the mean loss of every epoch ---


def _steps(step, seeds: Tensor, setting: Setting) -> Iterator:
    number = -(-seeds.numel() // setting.batch_size)
    for _ in range(1 + setting.epochs):
        total = torch.zeros(())
        for loss in step.epoch(seeds, setting.batch_size):
            total = total.to(loss.device) + loss.detach()
        yield total / number


def _resident(graph: Graph, net, optimizer, setting: Setting, budget: int, device: torch.device) -> Iterator:
    graph = graph.to(device)
    step = _compiled(graph, net, optimizer, setting)
    yield Row("", "", [])
    yield from _steps(step, graph.train_idx, setting)


def _from_store(graph: Graph, net, optimizer, setting: Setting, budget: int, device: torch.device, hot: bool):
    near = Graph.from_csc(graph.indptr.to(device), graph.indices.to(device), validate=False)
    near.ndata["y"], near.train_idx, near.num_classes = graph.ndata["y"].to(device), graph.train_idx, graph.num_classes
    near.train_idx = graph.train_idx.to(device)
    rows, count = pin(graph.ndata["x"], device), COUNTED if hot else 4
    sampler = joestar.NeighborSampler(near, list(setting.fanouts))
    order = shuffled(near.train_idx, 1, 0).to(near.indices.dtype)
    batches = _needs(sampler, near, order, setting.batch_size, count)
    needed = sum(ids.numel() for ids in batches) / len(batches)
    keep = None
    if hot:
        score = count_needed(batches, near.num_nodes, torch.zeros(near.num_nodes, dtype=torch.int32, device=device))
        score = score.float() + torch.bincount(near.indices, minlength=near.num_nodes).clamp(max=2**20) / 2**21
        held = near.indptr.nbytes + near.indices.nbytes + near.ndata["y"].nbytes + 4 * near.num_nodes
        room = budget - held - Planner(net, joestar.NeighborSampler(graph, list(setting.fanouts)), budget).workspace()
        keep = choose_hot(score, max(0, int(room // (graph.ndata["x"][:1].numel() * 4 + 8))))
        if not keep.numel():
            raise ConfigError("the structure alone fills the budget: no room for a cache.")
        is_hot = torch.zeros(near.num_nodes, dtype=torch.bool, device=device)
        is_hot[keep] = True
        needed *= 1 - float(torch.cat([is_hot[ids.long()] for ids in batches]).float().mean())
        del score, is_hot
    del batches
    near.ndata["x"] = FeatureStore(rows, device, hot=keep)
    step = _compiled(near, net, optimizer, setting)
    number = -(-near.train_idx.numel() // setting.batch_size)
    yield Row("", "", [], bus=needed * number * near.ndata["x"][:1].numel() * 4)
    yield from _steps(step, near.train_idx, setting)


def _needs(sampler, graph: Graph, order: Tensor, batch: int, count: int) -> list[Tensor]:
    number = min(count, max(1, order.numel() // batch))
    return [sampler.sample(graph.keyed(1, 0, i), order[i * batch : (i + 1) * batch])[0].srcs for i in range(number)]


def _pinned(*given) -> Iterator:
    yield from _from_store(*given, hot=False)


def _cached(*given) -> Iterator:
    yield from _from_store(*given, hot=True)


def _large_batch(graph: Graph, net, optimizer, setting: Setting, budget: int, device: torch.device) -> Iterator:
    step = _compiled(graph, net, optimizer, setting, memory=budget, batch_size=setting.batch_size)
    if step.plan.fits:
        yield Row("", "", [], bus=0, predicted_memory=step.plan.memory)
        yield from _steps(step, graph.train_idx, setting)
        return
    row = Row("", "", [], predicted_seconds=step.plan.epoch_seconds, predicted_memory=step.plan.memory)
    yield row
    for loss in _steps(step, graph.train_idx, setting):
        yield loss
        row.bus = step.traffic.bytes / len(row.seconds or [0])


def _cpu(graph: Graph, net, optimizer, setting: Setting, budget: int, device: torch.device) -> Iterator:
    sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    number = -(-graph.train_idx.numel() // setting.batch_size)
    moved = [0.0]

    def sampled(epoch: int) -> Callable:
        order = shuffled(graph.train_idx, 0, epoch).to(graph.indices.dtype)

        def sample(index: int):
            key = torch.tensor([0, epoch, index], dtype=torch.int64)
            seeds = order[index * setting.batch_size : (index + 1) * setting.batch_size]
            return sampler.sample(graph.with_context(SamplingContext(key)), seeds)

        return sample

    def gathered(blocks: list) -> tuple:
        ids = blocks[0].srcs
        shape = (ids.numel(), *graph.ndata["x"].shape[1:])
        rows = pinned_empty(shape, graph.ndata["x"].dtype, "cpu").host if device.type == "cpu" else None
        if rows is None:
            rows = torch.empty(shape, dtype=graph.ndata["x"].dtype, pin_memory=True)
        host_gather(graph.ndata["x"], ids, rows)
        moved[0] += rows.nbytes + sum(t.nbytes for b in blocks for t in (b.indptr, b.indices))
        return blocks, rows, graph.ndata["y"][blocks[-1].dsts.long()]

    yield (row := Row("", "", []))
    for epoch in range(1 + setting.epochs):
        total, moved[0] = torch.zeros((), device=device), 0.0
        with Pipeline(sampled(epoch), number, gathered, depth=2) as pipeline:
            for blocks, rows, labels in pipeline:
                near = [_block_to(block, device) for block in blocks]
                loss = F.cross_entropy(net(near, rows.to(device, non_blocking=True)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
        row.bus = moved[0]
        yield total / number


def _block_to(block: Block, device: torch.device) -> Block:
    parts = (block.indptr, block.indices, block.srcs, block.dsts)
    return Block(*(part.to(device, non_blocking=True) for part in parts), None)


def _compiled(graph: Graph, net, optimizer, setting: Setting, **further):
    sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    autocast = torch.bfloat16 if setting.precision == "bf16" else None
    return joestar.compile(net, sampler, F.cross_entropy, optimizer, autocast=autocast, **further)


_MODES = {
    "resident": _resident,
    "pinned": _pinned,
    "cached": _cached,
    "large-batch": _large_batch,
    "cpu": _cpu,
}
