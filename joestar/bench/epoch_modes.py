"""What ``joestar bench epoch`` compares: ways of feeding a device, as epochs of steps and what is expected of them.

All but ``cpu`` run the same compiled step with the same sampler.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import joestar
from joestar.bench.match import WINDOW, Change, MatchedEpoch, RowBuffer, Windows, window_bytes
from joestar.bench.setting import Setting
from joestar.errors import ConfigError
from joestar.graph_api import Block, Graph, SamplingContext
from joestar.runtime.seeds import shuffled
from joestar.staged.planning import CLAIMS, Planner
from joestar.stages import Pipeline
from joestar.store import FeatureStore, Pinned, host_gather, pin
from joestar.store.bandwidth import seconds_of
from joestar.store.hot import choose_hot, count_needed
from joestar.store.pinned import host_empty

COUNTED, CHECKED = 64, 2 * WINDOW
"""Mini-batches from which is counted which rows a cache holds; others, from which is counted what is then missing."""
MACRO_BATCHES, PARTS, PART_NODES = 12, 1024, 64
"""Of ``partitions``: macro-batches of an epoch, parts at most, nodes of a part at least."""
TRIED = 8
"""Of the batches looked at, those whose rows are read to see how long that takes."""
SLACK = 1.05
"""Room in a row buffer beyond twice the largest batch that was looked at."""


@dataclass
class Job:
    """What a mode is given: a graph in host memory, a model on the device, and bytes of the device."""

    graph: Graph
    net: nn.Module
    optimizer: torch.optim.Optimizer
    setting: Setting
    budget: int
    device: torch.device

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.graph.train_idx.numel() // self.setting.batch_size)

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of products, if it is not that of the parameters."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.setting.precision)

    @property
    def row_bytes(self) -> int:
        """Of a node's features, as they are stored."""
        x = self.graph.ndata["x"]
        return x[:1].numel() * x.element_size()

    def sampler(self, graph: Graph):
        """The sampler of all modes."""
        return joestar.NeighborSampler(graph, list(self.setting.fanouts))

    def compiled(self, graph: Graph, **further):
        """The compiled step of all modes."""
        return joestar.compile(
            self.net, self.sampler(graph), F.cross_entropy, self.optimizer, autocast=self.autocast, **further
        )

    @functools.cached_property
    def planner(self) -> Planner:
        """What plans ``large-batch``; here for its estimates."""
        sampler, batch = self.sampler(self.graph), self.setting.batch_size
        return Planner(self.net, sampler, self.budget, batch=batch, autocast=self.autocast)

    def memory(self, held: float) -> int | None:
        """Expected peak with ``held`` bytes beside the step's own; ``None`` on a CPU, where all is one memory."""
        return int(held + self.planner.workspace()) if self.device.type == "cuda" else None

    def seconds(self, rows: float = 0.0, beside: tuple[float, ...] = ()) -> float:
        """Expected time of an epoch whose steps wait so long for rows, each, and beside which so much else is done."""
        return self.steps * max((self.planner.step_seconds() + rows, *beside))

    def seconds_of_each(self, reads: Iterable[Callable[[], object]]) -> float:
        """What one of these reads of rows takes: some are tried, as how fast the bus is depends on where rows lie in a
        table of this size, and on how many of its pages a batch needs."""
        some = list(itertools.islice(reads, TRIED))

        def one_by_one() -> None:
            for read in some:
                read()  # what it returns is let go

        return seconds_of(self.device, one_by_one) / len(some)


@dataclass
class Fed:
    """A mode, ready to run.

    Attributes:
        epoch: the losses of a new epoch's steps; an iterator with ``close``.
        seconds, memory: expected of an epoch, before the first one; ``None`` where nothing is expected.
        bus: bytes over the bus in the latest epoch; match: share of its rows that the batch before left there.
        planned: seconds of an epoch by who needs them; stages: those that the pipeline's stages have taken so far.
    """

    epoch: Callable[[], Iterator[Tensor]]
    seconds: float | None = None
    memory: int | None = None
    bus: Callable[[], float | None] = lambda: None
    match: Callable[[], float | None] = lambda: None
    planned: dict[str, float] = field(default_factory=dict)
    stages: Callable[[], dict[str, float]] = dict


def resident(job: Job) -> Fed:
    """Structure and features on the device."""
    planner = job.planner  # of the graph on the CPU
    graph = job.graph.to(job.device)
    step = job.compiled(graph)
    memory = sum(planner.resident().values()) if job.device.type == "cuda" else None
    return Fed(lambda: step.epoch(graph.train_idx, job.setting.batch_size), job.seconds(), memory)


# --- structure on the device, features on the host ---


class _Near:
    """The structure on the device, page-locked features, and what sampled batches need of them.

    Attributes:
        needs: ids of the rows that each of some mini-batches needs; check: of others, if there are so many.
        further: mini-batches behind those of ``needs`` that may be looked at.
        held: bytes of the device that every step needs beside its workspace: structure, labels, gathered rows.
    """

    def __init__(self, job: Job, count: int):
        graph, device = job.graph, job.device
        near = Graph.from_csc(graph.indptr.to(device), graph.indices.to(device), validate=False)
        near.ndata["y"], near.num_classes = graph.ndata["y"].to(device), graph.num_classes
        near.train_idx = graph.train_idx.to(device)
        self.job, self.graph = job, near
        self.rows: Pinned = pin(graph.ndata["x"], device)
        self._sampler, self._order = job.sampler(near), shuffled(near.train_idx, 1, 0).to(near.indices.dtype)
        whole = max(1, self._order.numel() // job.setting.batch_size)
        self.needs = [self.sampled(number) for number in range(min(count, whole))]
        self._first = max(0, min(count, whole - CHECKED))
        self.check = [self.sampled(number) for number in range(self._first, min(whole, self._first + CHECKED))]
        self.further = min(whole - self._first, 3 * WINDOW)
        self.largest = max(ids.numel() for ids in (*self.needs, *self.check))
        structure = near.indptr.nbytes + near.indices.nbytes + near.ndata["y"].nbytes
        structure += CLAIMS.get(device.type, 0) * near.num_nodes
        self.held = structure + int(self.largest * SLACK * job.row_bytes)

    def sampled(self, number: int) -> Tensor:
        """Ids of the rows that a mini-batch needs, by its number."""
        seeds = self._order[number * self.job.setting.batch_size :][: self.job.setting.batch_size]
        return self._sampler.sample(self.graph.keyed(1, 0, number), seeds)[0].srcs

    def checked(self, number: int) -> Tensor:
        """Those of one of the ``further`` batches that begin with those of ``check``, sampled now."""
        return self.sampled(self._first + number)

    def hottest(self, room: float) -> Tensor:
        """As many of the rows needed most as so many bytes hold, ascending ids; node 0, which padding is, among them.

        Raises:
            ConfigError: there is no room.
        """
        near, count = self.graph, int(room // (self.job.row_bytes + 8))  # and the id
        if count < 1:
            raise ConfigError("the structure alone fills the budget: no room for a cache.")
        score = torch.zeros(near.num_nodes, dtype=torch.int32, device=self.job.device)
        score = count_needed(self.needs, near.num_nodes, score).float()
        score += torch.bincount(near.indices, minlength=near.num_nodes).clamp_(max=2**20) / 2**21
        score[0] = torch.inf
        return choose_hot(score, count)

    def missing(self, hot: Tensor | None) -> list[int]:
        """Rows that each of the batches looked at needs beside hot ones."""
        if hot is None:
            return [ids.numel() for ids in self.check]
        is_hot = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device=self.job.device)
        is_hot[hot] = True
        return [int((~is_hot[ids.long()]).sum()) for ids in self.check]

    def free(self, beside: float) -> float:
        """Bytes of the budget that are free: an allocator may hold as much as a step needs in pieces that are too
        small."""
        return self.job.budget - self.held - beside - 2 * self.job.planner.workspace()


def pinned(job: Job) -> Fed:
    """Features in page-locked host memory, read in place."""
    near = _Near(job, 1)
    if near.free(0) < 0:
        raise ConfigError("the structure and the rows of a batch do not fit into the budget.")
    return _stored(near, None)


def cached(job: Job) -> Fed:
    """The same, rows that are needed most on the device as far as the budget goes."""
    near = _Near(job, COUNTED)
    return _stored(near, near.hottest(near.free(4 * near.graph.num_nodes)))


def _stored(near: _Near, hot: Tensor | None) -> Fed:
    job, graph, counts = near.job, near.graph, near.missing(hot)  # ids of the batches looked at go with `near`
    missing = sum(counts) / len(counts)
    graph.ndata["x"] = store = FeatureStore(near.rows, job.device, hot=hot)
    held = near.held + store.device_bytes if hot is not None else near.held
    rows = job.seconds_of_each(functools.partial(store.rows, ids) for ids in near.check)
    step = job.compiled(graph)
    return Fed(
        lambda: step.epoch(graph.train_idx, job.setting.batch_size), job.seconds(rows), job.memory(held),
        lambda: missing * job.steps * job.row_bytes,
    )  # fmt: skip


def match(job: Job, reorder: bool = False) -> Fed:
    """Features in page-locked host memory; rows of the batch before stay."""
    return _matched(_Near(job, 1), torch.zeros(1, dtype=torch.int64, device=job.device), reorder)


def cached_match(job: Job) -> Fed:
    """Match-Reorder for what is not hot."""
    near = _Near(job, COUNTED)
    row, tables = job.row_bytes, _tables(near, True)
    hot = near.hottest(near.free(tables + _room(near.largest) * row))
    room = _room(max(near.missing(hot)))  # less, as hot rows need none
    return _matched(near, near.hottest(near.free(tables + room * row)), True)


def _room(largest: int) -> int:
    """Slots for two batches."""
    return int(2 * largest * SLACK) + 64


def _tables(near: _Near, reorder: bool) -> int:
    """Bytes for slots, which nodes are hot, marks of batches, and batches that are known ahead, sampled on a stream of
    their own: half of the tables of claims once more."""
    claims = CLAIMS.get(near.job.device.type, 0) // 2
    return ((9 if reorder else 5) + claims) * near.graph.num_nodes + window_bytes(near.largest)


def _matched(near: _Near, hot: Tensor, reorder: bool) -> Fed:
    job, graph = near.job, near.graph
    room = min(graph.num_nodes - hot.numel(), _room(max(near.missing(hot))))
    held = near.held + _tables(near, reorder) + (hot.numel() + room) * job.row_bytes
    if near.free(held - near.held) < 0:
        raise ConfigError("the structure and the rows of two batches do not fit into the budget.")
    graph.ndata["x"] = buffer = RowBuffer(near.rows, hot, room)
    windows = Windows(near.checked, near.further, buffer, reorder, graph.indices.dtype)
    rows, each = _rows_beside_windows(job, windows, buffer)
    buffer.clear()
    step, latest = job.compiled(graph), []

    def epoch() -> MatchedEpoch:
        latest[:] = [MatchedEpoch(step, graph.train_idx, job.setting.batch_size, buffer, reorder)]
        return latest[0]

    return Fed(
        epoch, job.seconds(beside=(rows, each)), job.memory(held), lambda: latest[0].seen.missing * job.row_bytes,
        lambda: latest[0].seen.share,
    )  # fmt: skip


def _rows_beside_windows(job: Job, windows: Windows, buffer: RowBuffer) -> tuple[float, float]:
    """Seconds of a batch's rows, alone, and of those of a window while the next one is sampled, as it is in an epoch:
    both want the device. The latter is 0 where there is only one window; those before the last two warm up."""
    changes: list[Change] = []
    for window in range(max(1, windows.count - 1)):
        changes = windows(window)
    later = changes[1:] or changes
    rows = job.seconds_of_each(functools.partial(buffer.load, change.ids, change.slots) for change in later)
    if windows.count == 1:
        return rows, 0.0
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as ahead:
        next_one = ahead.submit(windows, windows.count - 1)
        for change in changes:
            buffer.load(change.ids, change.slots)
        next_one.result()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return rows, (time.perf_counter() - start) / len(changes)


# --- everything on the host ---


def large_batch(job: Job) -> Fed:
    """Macro-batches sampled on the CPU, hot rows on the device: ``joestar.compile(memory=...)``."""
    return _staged(job, None)


def large_batch_cold(job: Job) -> Fed:
    """The same without hot rows."""
    return _staged(job, joestar.LargeBatch(hot=0))


def partitions(job: Job) -> Fed:
    """Groups of parts with historical embeddings in 16 bits, picked ahead of time, without hot rows."""
    parts = max(MACRO_BATCHES, min(PARTS, job.graph.num_nodes // PART_NODES))
    made = joestar.partition(job.graph, parts, passes=1)
    group = -(-parts // MACRO_BATCHES)
    ahead = list(job.setting.fanouts)
    return _staged(job, joestar.Partitions(made, group, ahead=ahead, dtype=torch.bfloat16, hot=0))


def _staged(job: Job, first_stage) -> Fed:
    size = job.setting.batch_size
    step = job.compiled(job.graph, memory=job.budget, batch_size=size, first_stage=first_stage)
    if step.plan.fits:
        return Fed(lambda: step.epoch(job.graph.train_idx, size), job.seconds(), step.plan.memory, lambda: 0)
    before = [0]

    def epoch() -> Iterator[Tensor]:
        before[0] = step.traffic.bytes
        return step.epoch(job.graph.train_idx, size)

    return Fed(
        epoch, step.plan.epoch_seconds, step.plan.memory, lambda: step.traffic.bytes - before[0],
        planned=dict(step.plan.seconds), stages=lambda: dict(step.traffic.seconds),
    )  # fmt: skip


def cpu(job: Job) -> Fed:
    """Mini-batches sampled and gathered on the CPU, ahead, and copied; the model runs eagerly."""
    moved, number = [0.0], iter(range(1 << 30))
    scaler = torch.amp.GradScaler(job.device.type, enabled=job.autocast == torch.float16)

    def epoch() -> Iterator[Tensor]:
        moved[0] = 0.0
        with Pipeline(_sampled(job, next(number)), job.steps, _gathered(job, moved), depth=2) as pipeline:
            for blocks, rows, labels in pipeline:
                yield _trained(job, scaler, blocks, rows, labels)

    return Fed(epoch, bus=lambda: moved[0])


def _sampled(job: Job, epoch: int) -> Callable[[int], list[Block]]:
    graph, batch, sampler = job.graph, job.setting.batch_size, job.sampler(job.graph)
    order = shuffled(graph.train_idx, 0, epoch).to(graph.indices.dtype)

    def sample(index: int) -> list[Block]:
        key = torch.tensor([0, epoch, index], dtype=torch.int64)
        return sampler.sample(graph.with_context(SamplingContext(key)), order[index * batch : (index + 1) * batch])

    return sample


def _gathered(job: Job, moved: list[float]) -> Callable[[list[Block]], tuple]:
    x, y, on_gpu = job.graph.ndata["x"], job.graph.ndata["y"], job.device.type == "cuda"

    def gather(blocks: list[Block]) -> tuple[list[Block], Tensor, Tensor]:
        ids = blocks[0].srcs
        shape = (ids.numel(), *x.shape[1:])
        rows = torch.empty(shape, dtype=x.dtype, pin_memory=True) if on_gpu else host_empty(shape, x.dtype)
        host_gather(x, ids, rows)
        moved[0] += rows.nbytes + sum(t.nbytes for b in blocks for t in (b.indptr, b.indices))
        return blocks, rows, y[blocks[-1].dsts.long()]

    return gather


def _trained(job: Job, scaler, blocks: list[Block], rows: Tensor, labels: Tensor) -> Tensor:
    """A step of plain PyTorch."""
    near, rows = [_block_to(block, job.device) for block in blocks], rows.to(job.device, non_blocking=True)
    with torch.autocast(job.device.type, job.autocast, enabled=job.autocast is not None):
        loss = F.cross_entropy(job.net(near, rows).float(), labels.to(job.device))
    job.optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(job.optimizer)
    scaler.update()
    return loss.detach()


def _block_to(block: Block, device: torch.device) -> Block:
    parts = (block.indptr, block.indices, block.srcs, block.dsts)
    return Block(*(part.to(device, non_blocking=True) for part in parts), None)


MODES: dict[str, Callable[[Job], Fed]] = {
    "resident": resident,
    "pinned": pinned,
    "match": match,
    "match-reorder": functools.partial(match, reorder=True),
    "cached": cached,
    "cached-match": cached_match,
    "large-batch": large_batch,
    "large-batch-cold": large_batch_cold,
    "partitions": partitions,
    "cpu": cpu,
}
KEEP = tuple(name for name in MODES if name not in ("resident", "cpu"))
"""Modes that keep to the budget."""
