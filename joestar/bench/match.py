"""Match-Reorder (FastGL, section 4.1), with steps that are compiled as all others: what is fed in a better order.

The structure is on the device, so that the mini-batches of a window can be sampled ahead, to know which rows they need.
*Match*: rows of the batch before stay; only those that it did not need cross the bus. *Reorder*: the batches of a
window are taken in an order in which neighbours share many rows: always the one that matches the latest best.

Rows lie in a ``RowBuffer``, beside hot ones if there is room for them. Loading goes on beside the steps, with ascending
ids: a slot is written when the last step that read it has ended. That is more than FastGL does, which loads and trains
in turns. What a step draws depends on the number of its batch alone, not on when it is taken.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.graph_api.row_source import RowSource
from joestar.locks import TRACING
from joestar.runtime.epochs import Epoch
from joestar.runtime.state import Run
from joestar.stages import Pipeline
from joestar.step import Step
from joestar.store import Pinned, fill_rows, slot_table
from joestar.streams import own_stream

WINDOW = 16
"""Mini-batches that are sampled, and put in order, at a time; at most 30."""


def window_bytes(largest: int) -> int:
    """Bytes of the device that windows ahead take, if no batch needs more rows: ids of three, and match degrees."""
    return largest * (3 * WINDOW * 12 + (WINDOW + 1) * 12)


class RowBuffer(RowSource):
    """Rows in page-locked host memory, some of which are on the device: hot ones for good, others in ``room`` slots.

    Args:
        rows: all rows. hot: ids of those that stay, int64 ``[H]`` on the device. room: slots for others.
    """

    def __init__(self, rows: Pinned, hot: Tensor, room: int):
        self.table, self.hot, self.room = rows.view, hot.numel(), room
        self.cache = rows.view.new_empty((self.hot + room, *rows.view.shape[1:]))
        self.slot_of = slot_table(hot, rows.view.shape[0])
        self.load(hot, torch.arange(self.hot, dtype=torch.int32, device=hot.device))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.table[:1].numel() * self.table.element_size()

    def load(self, ids: Tensor, slots: Tensor) -> None:
        """Brings rows into slots, on the current stream; ``ids`` ascend."""
        fill_rows(self.table, ids, slots, self.cache)
        self.slot_of[ids.long()] = slots

    def forget(self, ids: Tensor) -> None:
        """These rows are not in their slots any more."""
        self.slot_of[ids.long()] = -1

    def clear(self) -> None:
        """Only hot rows are on the device."""
        self.slot_of[self.slot_of >= self.hot] = -1

    def to(self, device) -> "RowBuffer":
        """Itself."""
        return self

    def __deepcopy__(self, memo) -> "RowBuffer":
        return self


def match_degrees(batches: list[Tensor], marks: Tensor) -> Tensor:
    """How much of the smaller of two batches is in the other one, too; float64 ``[n, n]`` on the CPU, 0 with itself.

    Args:
        batches: ids, each once. marks: int32 ``[N]``, all 0, as they are again afterwards.
    """
    bits = torch.arange(len(batches), dtype=torch.int32, device=marks.device)
    for bit, ids in enumerate(batches):
        marks[ids] = marks[ids] | (1 << bit)
    shared = torch.stack([((marks[ids].unsqueeze(1) >> bits) & 1).sum(0) for ids in batches]).cpu()
    for ids in batches:
        marks[ids] = 0
    sizes = torch.tensor([ids.numel() for ids in batches], dtype=torch.float64, device="cpu")
    return (shared / torch.minimum(sizes.unsqueeze(1), sizes).clamp(min=1)).fill_diagonal_(0)


def greedy_order(degrees: Tensor, first: int = 0) -> list[int]:
    """FastGL's algorithm 1: from ``first`` on always the batch, of those left, that matches the latest best."""
    table, order = degrees.tolist(), [first]
    left = [index for index in range(len(table)) if index != first]
    while left:
        latest = table[order[-1]]
        order.append(max(left, key=lambda index: latest[index]))  # the first of equals
        left.remove(order[-1])
    return order


@dataclass
class Change:
    """What must happen before a batch is trained on: ``gone`` rows forgotten, then rows of ``ids`` put into ``slots``.

    Attributes:
        position: number of the batch. needed: rows beside hot ones; missing: those that cross the bus, also where there
            was no slot left and the step reads them over the bus itself.
    """

    position: int
    gone: Tensor
    ids: Tensor
    slots: Tensor
    needed: int
    missing: int


class Slots:
    """Which slot holds which row, one batch after the other; ahead of the loading.

    While a batch's rows are loaded, steps run on the one before: its slots are not touched, all others are free.
    """

    def __init__(self, first: int, room: int, device: torch.device, dtype: torch.dtype = torch.int32):
        self.first, self.room = first, room
        self.ids = torch.empty(0, dtype=dtype, device=device)
        self.slots = torch.empty(0, dtype=torch.int32, device=device)
        self._gone = self.ids

    def take(self, position: int, ids: Tensor) -> Change:
        """The next batch needs these rows, ``ids`` ascending."""
        there, at = _found(self.ids, ids)
        new = ids[~there]
        taken = torch.zeros(self.room, dtype=torch.bool, device=ids.device)
        taken[self.slots.long() - self.first] = True
        free = (torch.nonzero(~taken).flatten()[: new.numel()] + self.first).to(torch.int32)
        loaded = new[: free.numel()]  # the rest stays on the host
        change = Change(position, self._gone, loaded, free, ids.numel(), new.numel())
        kept = torch.zeros(self.ids.numel(), dtype=torch.bool, device=ids.device)
        kept[at[there]] = True
        self._gone = self.ids[~kept]
        both = torch.cat([self.ids[at[there]], loaded]), torch.cat([self.slots[at[there]], free])
        order = torch.argsort(both[0])
        self.ids, self.slots = (tensor[order] for tensor in both)
        return change


def _found(known: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(whether each of ``ids`` is among the ``known``, where); both ascend."""
    if not known.numel():
        return torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.int64)
    at = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
    return known[at] == ids, at


class Windows:
    """What changes from batch to batch, a window of batches at a time: ``windows(i)`` for i = 0, 1, ... in turn.

    Args:
        needs: ids ``[n]``, each once, of the rows that a batch needs, by its number, of this dtype. batches:
            how many there are. buffer: where rows go. reorder: in the order of match degrees, else as they come.
    """

    def __init__(
        self, needs: Callable[[int], Tensor], batches: int, buffer: RowBuffer, reorder: bool, dtype=torch.int32
    ):  # fmt: skip
        self.needs, self.batches, self.reorder = needs, batches, reorder
        device = buffer.slot_of.device
        self.is_hot = buffer.slot_of >= 0 if buffer.hot else None
        self.slots = Slots(buffer.hot, buffer.room, device, dtype)
        self.marks = torch.zeros(buffer.slot_of.numel() if reorder else 0, dtype=torch.int32, device=device)
        self._stream = own_stream("windows ahead", device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def count(self) -> int:
        """Windows of an epoch."""
        return -(-self.batches // WINDOW)

    @torch.no_grad()
    def __call__(self, window: int) -> list[Change]:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            positions = range(window * WINDOW, min(self.batches, (window + 1) * WINDOW))
            rows = [self._cold(position) for position in positions]
            order = range(len(rows))
            if self.reorder:  # from the latest batch of the window before, if there is one
                latest = [self.slots.ids] if window else []
                degrees = match_degrees([*latest, *rows], self.marks)
                order = [index - 1 for index in greedy_order(degrees)[1:]] if window else greedy_order(degrees)
            changes = [self.slots.take(positions[index], rows[index]) for index in order]
            if self._stream is not None:
                self._stream.synchronize()
            return changes

    def _cold(self, position: int) -> Tensor:
        ids = torch.sort(self.needs(position)).values
        return ids if self.is_hot is None else ids[~self.is_hot[ids]]


@dataclass
class Matched:
    """Of an epoch so far: the ``order`` of its batches; rows ``needed`` beside hot ones, and ``missing`` ones, which
    crossed the bus, of batches that were loaded."""

    needed: int = 0
    missing: int = 0
    order: list[int] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Of the rows needed, those that the batch before had left; ``None`` if all are hot."""
        return 1 - self.missing / self.needed if self.needed else None


class MatchedEpoch(Epoch):
    """An epoch whose batches are taken in the order of ``Windows``, each when its rows are there.

    Every batch is the one that it would be in any other order: its number is part of the key. Not to be resumed.
    """

    def __init__(self, step: Step, seeds: Tensor, batch: int, buffer: RowBuffer, reorder: bool):
        super().__init__(step._needs_runner("epoch"), step._seeds(seeds), batch, -1, True, step._prepare)
        self.buffer, self.reorder, self.seen = buffer, reorder, Matched()
        self._step = step
        self._pipeline: Pipeline | None = None
        device = buffer.slot_of.device
        self._stream = own_stream("rows of batches", device) if device.type == "cuda" else None
        self._ended: torch.cuda.Event | None = None

    @property
    def position(self) -> int:
        """Steps that were taken."""
        return len(self.seen.order)

    def _started(self, order: Tensor) -> Run:
        run = super()._started(order)
        key = self._runner.seed, self.number
        needs = functools.partial(needed_rows, self._step.sampler, self._step.graph, order, self.batch_size, key)
        self.buffer.clear()
        windows = Windows(needs, self.steps, self.buffer, self.reorder, self._step.graph.indices.dtype)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._pipeline = Pipeline(windows, windows.count)
        self._loads = self._loading()
        self._next = next(self._loads)
        return run

    def _loading(self) -> Iterator[tuple[Change, "torch.cuda.Event | None"]]:
        """Loads the rows of one batch after the other, when asked for, behind the steps that were taken by then."""
        for change in itertools.chain.from_iterable(self._pipeline):
            self.seen.needed += change.needed
            self.seen.missing += change.missing
            if self._stream is None:
                self._change(change)
                yield change, None
                continue
            with torch.cuda.stream(self._stream):
                if self._ended is not None:
                    self._stream.wait_event(self._ended)
                self._change(change)
                ready = torch.cuda.Event()
                ready.record(self._stream)
            yield change, ready

    def _change(self, change: Change) -> None:
        for tensor in (change.gone, change.ids, change.slots) if self._stream is not None else ():
            tensor.record_stream(self._stream)
        self.buffer.forget(change.gone)
        self.buffer.load(change.ids, change.slots)

    def __next__(self) -> Tensor:
        if not self.running:
            raise StopIteration
        if self._run is None:
            self._begin()
        change, ready = self._next
        self._next = next(self._loads, None)  # loaded beside this step, behind the one before
        if ready is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(ready)
        self._runner.seek(self._run, change.position)
        loss = self._runner.take(self._run)
        self.seen.order.append(change.position)
        if ready is not None:
            self._ended = torch.cuda.Event()
            self._ended.record(torch.cuda.current_stream(self._stream.device))
        return loss

    def close(self) -> None:
        super().close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def needed_rows(sampler, graph: Graph, order: Tensor, batch: int, key: tuple[int, int], position: int) -> Tensor:
    """Ids of the rows that a batch needs: what a compiled step draws for it under this (seed, epoch)."""
    with TRACING:  # while a program is traced, all threads would seem to be
        seeds = order[position * batch : (position + 1) * batch]
        return sampler.sample(graph.keyed(*key, position), seeds)[0].srcs
