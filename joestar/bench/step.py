"""``joestar bench step``: training steps and whole epochs, Joestar against expert eager, in one run on one graph."""

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import joestar
from joestar.bench.measure import (
    Epochs,
    PeakMemory,
    Timing,
    check_words,
    kernel_times,
    launches,
    time_epochs,
    time_steps,
)
from joestar.bench.planted import planted
from joestar.bench.setting import BASELINES, PRECISIONS, Row, Setting, check_device, machine
from joestar.errors import ConfigError
from joestar.graph_api import Graph

COUNTED = 20
"""Batches whose nodes and edges are counted."""


def mean_sizes(sampler, graph: Graph, batches: Iterable[Tensor], seed: int) -> tuple[list[int], list[int]]:
    """Means over batches of seeds: (nodes per hop, the seeds first; edges of every layer, input side first)."""
    counts, edges = [], []
    for batch in batches:
        blocks = sampler.sample(graph.keyed(seed), batch)
        counts.append([blocks[-1].num_dst, *(block.num_src for block in blocks[::-1])])
        edges.append([block.num_edges for block in blocks])
    return tuple([round(statistics.fmean(column)) for column in zip(*rows, strict=True)] for rows in (counts, edges))


def logical_bytes(counts: list[int], edges: list[int], features: int, hidden: int, size: int) -> int:
    """Bytes that a GraphSAGE step must move if every intermediate is written once and read where it is used.

    Per layer, input side first: rows gathered over its edges and for its destinations, the joined matrix written and
    read by the product and by the gradient of the weights, the result written, its gradient written and read, and the
    result read again for the mask. See ``docs/benchmarks-history.md``.

    Args:
        counts: nodes per hop, the seeds first; edges: of every layer, input side first; size: bytes of a number.
    """
    total = 0
    for layer, sampled in enumerate(edges):
        destinations = counts[len(edges) - 1 - layer]
        width = hidden if layer else features
        total += (sampled + destinations) * width + 3 * destinations * 2 * width
        if layer < len(edges) - 1:
            total += 4 * destinations * hidden
        if layer:  # the gradient of the joined matrix
            total += 2 * destinations * 2 * width
    return total * size


def run(setting: Setting, say: Callable[[str], None] = lambda text: None) -> dict:
    """Measures every model and variant; a dictionary that is JSON but for the rows' tuples.

    Raises:
        ConfigError: for unknown names, or a GPU that is not there.
    """
    setting.check()
    check_words(
        precision=([setting.precision], PRECISIONS),
        baseline=(setting.baselines, BASELINES),
    )
    device = check_device(setting.device)
    torch.backends.cuda.matmul.allow_tf32 = setting.precision != "fp32"
    absent = _absent(setting.baselines)
    for reason in absent.values():
        say(reason)
    variants = ("joestar", *(how for how in setting.baselines if how not in absent))
    rows = [row for ids in orders(setting) for row in _run_graph(ids, variants, device, setting, say)]
    return {
        "machine": machine(device),
        "setting": asdict(setting),
        "rows": [asdict(row) for row in rows],
        "absent": absent,
    }


def orders(setting: Setting) -> tuple[str, ...]:
    """Orders of ids to measure; a dataset has its own."""
    return ("own",) if setting.dataset is not None else setting.ids


def graph_of(ids: str, device: str | torch.device, setting: Setting) -> Graph:
    """The setting's graph with ids in this order, in its precision.

    Raises:
        ConfigError: the dataset has no training nodes.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting.precision, torch.float32)
    if setting.dataset is None:
        return planted(
            setting.shape, device, dtype, shuffled=ids == "shuffled", scale=setting.scale, features=setting.features
        )
    graph = joestar.load(setting.dataset).to(device)
    if graph.train_idx is None:
        raise ConfigError(f"--dataset {setting.dataset}: it has no training nodes.")
    graph.ndata["x"] = graph.ndata["x"].to(dtype)
    return graph


def _run_graph(ids: str, variants: tuple[str, ...], device: torch.device, setting: Setting, say: Callable) -> list[Row]:
    """The rows of one graph, which is freed afterwards.

    Launches are looked at behind all that is timed: CUPTI stays in the process when the profiler is done, and launches
    take longer from then on.
    """
    start = time.perf_counter()
    graph = graph_of(ids, device, setting)
    say(f"{graph!r}, made in {time.perf_counter() - start:.1f} s")
    rows, looks = [], []
    for model in setting.models:
        for how in variants:
            row = _measured(model, how, graph, replace(setting, ids=(ids,)), looks)
            row.ids = ids
            rows.append(row)
            whole = "" if row.epochs is None else f", whole epochs {row.epochs.ms_per_step:.3f}"
            note = f", {row.note}" if row.note else ""
            first = f", first step {row.first_step_seconds:.1f} s"
            say(f"{model:5} {how:8}{row.step.median:9.3f} ms/step{whole}{first}{note}")
    for look in looks:
        look()
    return rows


def _absent(baselines: tuple[str, ...]) -> dict[str, str]:
    """Baselines that cannot run here, and why."""
    if "loader" not in baselines:
        return {}
    from joestar.bench.loader import missing

    reason = missing()
    return {} if reason is None else {"loader": reason}


def _batch(graph, setting: Setting) -> int:
    """Seeds per step: all there are, if they are fewer than a batch."""
    return min(setting.batch_size, graph.train_idx.numel())


def _seeds(graph, setting: Setting) -> Iterator[Tensor]:
    """Shuffled full batches without end."""
    random, batch = torch.Generator(graph.device).manual_seed(setting.seed), _batch(graph, setting)
    while True:
        order = torch.randperm(graph.train_idx.numel(), generator=random, device=graph.device)
        for part in graph.train_idx[order].split(batch):
            if part.numel() == batch:
                yield part


def _autocast(setting: Setting) -> torch.dtype | None:
    return torch.bfloat16 if setting.precision == "bf16" else None


def network(name: str, graph, setting: Setting) -> nn.Module:
    """The library's model, on the graph's device: a layer per fanout."""
    torch.manual_seed(setting.seed)
    channels, layers = graph.ndata["x"].shape[1], len(setting.fanouts)
    common = {"out_channels": graph.num_classes, "dropout": setting.dropout}
    if name == "gat":
        net = joestar.nn.GAT(channels, setting.hidden, layers, heads=setting.heads, add_self_loops=False, **common)
    else:
        kind = {"sage": joestar.nn.GraphSAGE, "gcn": joestar.nn.GCN, "gin": joestar.nn.GIN}[name]
        net = kind(channels, setting.hidden, layers, **common)
    return net.to(graph.device)


def _joestar(name: str, how: str, graph, setting: Setting, looks: list[Callable[[], None]]) -> Row:
    memory = PeakMemory(graph.device)
    net = network(name, graph, setting)
    sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    step = joestar.compile(
        net, sampler, F.cross_entropy, optimizer, autocast=_autocast(setting), prefetch=setting.prefetch
    )

    batch = _batch(graph, setting)

    def batches() -> Iterator[Tensor]:
        full = graph.train_idx.numel() // batch * batch
        while True:
            yield from step.epoch(graph.train_idx[:full], batch)

    def epoch(steps: int | None) -> None:
        for _loss in step.epoch(graph.train_idx[: None if steps is None else steps * batch], batch):
            pass

    start, losses = time.perf_counter(), batches()
    next(losses)
    _wait(graph)
    first = time.perf_counter() - start
    memory.forget()
    group = 10 if graph.device.type == "cuda" else 1
    timing = time_steps(lambda: next(losses), setting.steps, setting.warm_up, graph.device, group)
    row = Row(name, how, timing, _epoch(timing, graph, setting), first, memory.bytes())
    if graph.device.type != "cuda":
        row.sampling = _sampling(sampler, graph, setting)
    row.counts, edges = mean_sizes(sampler, graph, itertools.islice(_seeds(graph, setting), COUNTED), setting.seed)
    losses.close()
    if setting.epochs:
        epoch(None)  # may compile again
        before = step.counters.fallbacks
        row.epochs = _epochs(epoch, row, graph, setting)
        if redone := step.counters.fallbacks - before:
            row.note = f"{redone} batches of the whole epochs redone exactly"
    if name == "sage":
        x = graph.ndata["x"]
        row.logical_bytes = logical_bytes(row.counts, edges, x.shape[1], setting.hidden, x.element_size())
    if graph.device.type == "cuda":
        more = batches()
        looks.append(lambda: _look(row, lambda: next(more), setting.kernels))
    return row


def _look(row: Row, step: Callable[[], object], kernels: bool = False) -> None:
    """What the profiler sees of a step on a GPU."""
    row.launches = launches(step)
    if kernels:
        row.kernels = kernel_times(step)


def _sampling(sampler, graph, setting: Setting) -> Timing:
    """Structure alone, every hop compacted."""
    seeds, keys = _seeds(graph, setting), iter(range(1 << 30))
    return time_steps(
        lambda: sampler.sample(graph.keyed(setting.seed, 0, next(keys)), next(seeds)), setting.steps, setting.warm_up,
        graph.device,
    )  # fmt: skip


def _measured(name: str, how: str, graph, setting: Setting, looks: list[Callable[[], None]]) -> Row:
    """A row; on a GPU ``looks`` gets what notes launches in it, for later.

    On a CPU every row has a process of its own: allocator and resident memory are as if nothing else had run.
    """
    if graph.device.type == "cuda":
        return _row(name, how, graph, setting, looks)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_alone, name, how, setting, torch.get_num_threads()).result()


def _alone(name: str, how: str, setting: Setting, threads: int) -> Row:
    torch.set_num_threads(threads)
    return _row(name, how, graph_of(setting.ids[0], "cpu", setting), setting, [])


def _row(name: str, how: str, graph, setting: Setting, looks: list[Callable[[], None]]) -> Row:
    return {"joestar": _joestar, "loader": _loaded}.get(how, _eager)(name, how, graph, setting, looks)


def _block_model(name: str, graph, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of PyG's layers and its optimizer."""
    from joestar.bench.baselines import BlockModel

    torch.manual_seed(setting.seed)
    model = BlockModel(
        name, graph.ndata["x"].shape[1], setting.hidden, len(setting.fanouts), graph.num_classes, setting.heads,
        setting.dropout,
    ).to(graph.device)  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), 1e-3, fused=True)


def _loaded(name: str, how: str, graph, setting: Setting, looks: list[Callable[[], None]]) -> Row:
    from joestar.bench.loader import LoaderStep, neighbor_loader, time_rounds, workers_here

    memory = PeakMemory(graph.device)
    model, optimizer = _block_model(name, graph, setting)
    workers = workers_here() if setting.workers is None else setting.workers
    loader = neighbor_loader(graph, list(setting.fanouts), _batch(graph, setting), workers)
    step = LoaderStep(loader, model, optimizer, graph.device, _autocast(setting))
    start = time.perf_counter()
    step()
    _wait(graph)
    first = time.perf_counter() - start
    memory.forget()
    timing = time_rounds(step, setting.steps, setting.warm_up, workers, graph.device)
    row = Row(name, how, timing, _epoch(timing, graph, setting), first, memory.bytes())
    if setting.epochs:
        row.epochs = _epochs(step.epoch, row, graph, setting)

    if graph.device.type == "cuda":
        looks.append(lambda: (_look(row, step), step.close()))
    else:
        step.close()
    return row


def _eager(name: str, how: str, graph, setting: Setting, looks: list[Callable[[], None]]) -> Row:
    from joestar.bench.baselines import EagerStep

    memory = PeakMemory(graph.device)
    model, optimizer = _block_model(name, graph, setting)
    forward = torch.compile(model, dynamic=True) if how == "compile" else None
    step = EagerStep(graph, list(setting.fanouts), model, optimizer, forward, _autocast(setting))
    seeds = _seeds(graph, setting)
    start = time.perf_counter()
    step(next(seeds))
    _wait(graph)
    first = time.perf_counter() - start
    memory.forget()
    group = 10 if graph.device.type == "cuda" else 1
    timing = time_steps(lambda: step(next(seeds)), setting.steps, setting.warm_up, graph.device, group)
    row = Row(name, how, timing, _epoch(timing, graph, setting), first, memory.bytes())
    sampled = time_steps(lambda: step.sampler.blocks(next(seeds)), setting.steps, setting.warm_up, graph.device, group)
    row.sampling = sampled
    if graph.device.type == "cuda":
        looks.append(lambda: _look(row, lambda: step(next(seeds))))

    def epoch(steps: int | None) -> None:
        order = torch.randperm(graph.train_idx.numel(), device=graph.device)
        for part in itertools.islice(graph.train_idx[order].split(_batch(graph, setting)), steps):
            step(part)

    if setting.epochs:
        row.epochs = _epochs(epoch, row, graph, setting)
    return row


def _steps(graph, setting: Setting) -> int:
    """Of an epoch, a smaller last one included."""
    return -(-graph.train_idx.numel() // _batch(graph, setting))


def _epoch(timing: Timing, graph, setting: Setting) -> float:
    return timing.median / 1e3 * _steps(graph, setting)


def _epochs(epoch: Callable[[int | None], None], row: Row, graph, setting: Setting) -> Epochs:
    return time_epochs(epoch, _steps(graph, setting), row.step.median, graph.device, setting.epochs)


def _wait(graph) -> None:
    if graph.device.type == "cuda":
        torch.cuda.synchronize(graph.device)
