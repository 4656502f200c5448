"""The arena: an ordinary ``Graph`` on the device whose nodes are slots that macro-batches' nodes take.

Slots ``[0, H)`` belong to hot nodes for good, the others to the nodes of the macro-batch that steps run on, of the
next one, whose missing rows are loaded meanwhile, and of earlier ones as long as nobody needs the place
(``stages/slots.py``). A macro-batch's local ids on the device *are* slots, so that compiled programs read features in
place, as of any graph. All addresses are fixed, until the arena is made anew (``remake``). The structure of the next
macro-batch is built in a second buffer and copied where it is, in the stream of the steps.

On a GPU rows come over the bus on a stream that does nothing else. Slots are taken, structure is built, and hidden rows
come and go, on another one beside it, so that the bus goes from the rows of one macro-batch straight to those of the
next, and what waits for hidden rows does not wait for features.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.kernels import find
from joestar.locks import synchronize
from joestar.stages.arena_graph import (
    EdgeTensors,
    Source,
    edge_tensors,
    graph_of_slots,
    next_structure,
    placed_edges,
    show_edges,
)
from joestar.stages.device_slots import DeviceSlots, Placed
from joestar.stages.exchange import Exchange
from joestar.stages.loaded import Begun, Loaded, Prepared
from joestar.stages.macro import MacroBatch, Picked
from joestar.stages.slots import Slots
from joestar.store import fill_rows, place_structure

ROOM = 1.03
"""Of buffers, beyond the first macro-batch's sizes."""


class Arena:
    """Slots on a device for hot nodes and macro-batches.

    Args:
        whole: the user's graph, in host memory. device: of the arena.
        hot: ids of the nodes that stay, ascending, ``[H]``. pool: slots for other nodes, best enough for two
            macro-batches. edges: room for edges.
        sources: node tensors by name, as ``Source``s.
        reuse: whether rows stay until others need their slots (``Slots``).
        own_book: whether the device keeps the book of slots (``DeviceSlots``), of macro-batches without history.
        repeats: whether steps repeat the first stage's draws (``Graph.first_key``).

    Attributes:
        graph: what programs are compiled on, ``H + pool`` nodes; its ``ids`` are those that the nodes in slots
            have in the whole graph (``whole.ids``, else their positions), its ``positions`` those positions.
        hot_ids: of the hot nodes, ``[H]``. slots: who has which slot.
        with_degrees: whether ``graph.whole_degrees`` are kept up; else they are not to be read.
        holder: the feed whose macro-batches the arena holds; preparing, loading: held while one is.
        exchange: of historical embeddings, which come and go with macro-batches; ``None`` without.
    """

    def __init__(self, whole: Graph, device: torch.device, hot: Tensor, pool: int, edges: int,
                 sources: dict[str, Source], reuse: bool = True, own_book: bool = False,
                 repeats: bool = False):  # fmt: skip
        self.whole, self.device = whole, torch.device(device)
        self.own_book, self.reuse, self.repeats = own_book, reuse, repeats
        self.sources = sources
        on_gpu = self.device.type == "cuda"
        self._stream, self._beside = (
            torch.cuda.Stream(self.device, priority=-1) if on_gpu else None for _ in range(2)
        )  # the bus waits for nobody
        self._in_use: torch.cuda.Event | None = None
        self._read: torch.cuda.Event | None = None
        self.holder: weakref.ref | None = None
        self.preparing, self.loading = threading.Lock(), threading.Lock()
        self.exchange: Exchange | None = None
        self._buffers: dict[str, Tensor | None] = {}
        self._known = None if whole.ids is None else whole.ids.to(self.device)
        self.graph = self._made(hot, pool, edges)
        self._fill_hot(self.hot_ids)
        self._read_on((self._stream, self._beside), *self._tables())

    def _made(self, hot: Tensor, pool: int, edges: int) -> Graph:
        """A graph and a book for a layout, in which nothing is."""
        self.hot_ids, self.hot, self.pool, self.edges = hot, hot.numel(), pool, edges
        self.with_degrees, self._forget = True, False
        slots = (self.hot + pool) | 1  # no number that a program has for other reasons (``lowering.slots``)
        graph = graph_of_slots(self.whole, self.device, slots, edges, self.sources, self.repeats)
        self._next = next_structure(graph)
        book = hot.cpu(), pool, self.whole.num_nodes, self.reuse
        self.slots = DeviceSlots(*book, self.device) if self.own_book else Slots(*book)
        for stream in (self._stream, self._beside) if self._stream is not None else ():
            stream.wait_stream(torch.cuda.current_stream(self.device))  # the book is there
        return graph

    @torch.inference_mode(False)
    @torch.no_grad()
    def remake(self, hot: Tensor, pool: int, edges: int) -> None:
        """Another layout, in which no macro-batch is; the graph is the same object, with other tensors.

        What is there is freed before: nobody may hold on to the graph's tensors. If there is no memory, all is as it
        was, but for the macro-batches.

        Args:
            hot, pool, edges: as of the arena.

        Raises:
            RuntimeError: PyTorch's, for want of memory.
        """
        if self.holder is not None and (feed := self.holder()) is not None:
            feed.close()
        self.holder = None
        with self.preparing, self.loading:
            before, failed = (self.hot_ids, self.pool, self.edges), None
            try:
                self._divide(hot, pool, edges)
            except BaseException as error:  # also an interrupt
                failed = error.with_traceback(None)  # whose frames hold on to what there was memory for
            if failed is not None:
                self._divide(*before)
                raise failed

    def _divide(self, hot: Tensor, pool: int, edges: int) -> None:
        empty = self.graph.indptr[:0].clone(), self.graph.indices[:0].clone()
        vars(self.graph).update(vars(Graph(*empty)))
        self._next, self.slots, self._buffers = empty, None, {}
        if self._stream is not None:
            synchronize(self.device)
            torch.cuda.empty_cache()
        vars(self.graph).update(vars(self._made(hot, pool, edges)))  # samplers and programs know the object
        self._fill_hot(self.hot_ids)
        self._read_on((self._stream, self._beside), *self._tables())
        self.close_epoch()

    def _tables(self) -> list[Tensor]:
        """All that loads read or write, on the device."""
        graph = self.graph
        found = [*graph.ndata.values(), *graph.edata.values(), graph.ids, graph.positions, graph.whole_degrees]
        found += [graph.ranks, *self._next, self._known]
        found += [source.rows for source in self.sources.values() if not source.host]
        found += vars(self.slots).values()
        return [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.device == graph.indptr.device]

    @staticmethod
    def _read_on(streams: tuple[torch.cuda.Stream | None, ...], *tensors: Tensor) -> None:
        """Memory of these is given to nobody before what the streams do with it is over, whoever frees it and when."""
        for stream in streams:
            for tensor in tensors if stream is not None else ():
                tensor.record_stream(stream)

    def bring_history(self, exchange: Exchange) -> None:
        """From now on hidden rows come and go with macro-batches: into tables that the current stream has made."""
        self.exchange = exchange
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self.device))
        self._read_on((self._beside,), *exchange.device.tensors)

    def held_by(self, feed) -> bool:
        """Whether the arena holds macro-batches of this feed."""
        return self.holder is not None and self.holder() is feed

    def _fill_hot(self, hot: Tensor) -> None:
        if self.hot:
            self._fill(hot.to(self.device), torch.arange(self.hot, dtype=torch.int32, device=self.device))
        self.fill_degrees()

    def fill_degrees(self) -> None:
        """From now on degrees are kept up, those of hot nodes at once; others are loaded anew.

        For a feed that begins anew now: what it has prepared is without degrees.
        """
        self.with_degrees, self._forget = True, True
        self.graph.whole_degrees[: self.hot] = self._degrees(self.hot_ids.cpu()).to(self.device)

    def forget(self) -> None:
        """No row outside of the hot ones is found again by the feed that begins next."""
        self._forget = True

    def _degrees(self, ids: Tensor) -> Tensor:
        ids, offsets = ids.long(), self.whole.indptr
        known = self.whole.whole_degrees
        return offsets[ids + 1] - offsets[ids] if known is None else known[ids]

    def begin(self) -> None:
        """A feed begins: nobody reads a macro-batch any more but steps that are launched, or prepares one."""
        with self.preparing, self.loading, self._on(self._beside):
            self.slots.begin()
            if self._forget:
                self.slots.clear()
            self._forget = False
        self.touched()
        self.close_epoch()

    def _fill(self, ids: Tensor, slots: Tensor) -> None:
        """Rows and ids of nodes into slots.

        Through ``.data``: a step that runs meanwhile reads other slots of the same tensors, and autograd would take
        the count of writes for a change of what it has saved. ``touched`` counts, when the rows are shown.
        """
        self._fill_far(ids, slots)
        self._fill_near(ids, slots)

    def _fill_far(self, ids: Tensor, slots: Tensor) -> None:
        """What comes over the bus."""
        for name, source in self.sources.items():
            if source.host:
                fill_rows(source.rows, ids, slots, self.graph.ndata[name])

    def _fill_near(self, ids: Tensor, slots: Tensor) -> None:
        """What is on the device."""
        for name, source in self.sources.items():
            if not source.host:
                self._put_near(source.rows, ids, slots, self.graph.ndata[name])
        self._put_near(None, ids, slots, self.graph.positions)
        if self._known is not None:
            self._put_near(self._known, ids, slots, self.graph.ids)

    def _put_near(self, table: Tensor | None, ids: Tensor, slots: Tensor, out: Tensor) -> None:
        """``out[slots] = table[ids]``, or the ids: one kernel where the device keeps the book."""
        if self.own_book and not out.is_complex() and (table is None or table.is_contiguous()):
            find("gpu_book.fill_near")(table, ids, slots, out.data)
            return
        rows = ids if table is None else table.index_select(0, ids)
        out.data.index_copy_(0, slots.long(), rows.to(out.dtype))

    # --- loading, beside the steps ---

    @torch.no_grad()
    def prepare(self, macro: MacroBatch | Picked, key: tuple[int, int, int] | None = None) -> Prepared | None:
        """Slots for a macro-batch's nodes, beside those of the one before it if there are enough; ``None`` if it has no
        room at all. Uses the CPU alone; one thread at a time (``Gate.prepare``). Where the device keeps the book, edges
        are looked at here, and slots are taken when it is loaded. ``key``: that it was drawn with,
        which may be left out if no draws are repeated."""
        if self.repeats and key is None:
            raise ValueError("steps repeat what a macro-batch was drawn with: its key is needed")
        if macro.num_edges > self.edges or not (self.exchange is None or self.exchange.fits(macro)):
            return None
        edges = edge_tensors(self.whole, macro, self.repeats, self._new)
        edata = {name: self._copied(value) for name, value in edges}
        if self.own_book:
            picked = Picked.of(macro) if isinstance(macro, MacroBatch) else macro
            parts = (self._copied(tensor) for tensor in (picked.indptr, picked.sources, picked.seeds))
            return Prepared(False, *parts, edata, rows=self._copied(picked.rows), key=key)
        taken, alone = self.slots.take(macro.ids, self._new), False
        if taken is None:
            taken, alone = self.slots.take(macro.ids, self._new, alone=True), True
        if taken is None:
            return None
        parts = (self._copied(tensor) for tensor in (macro.indptr, macro.indices, macro.seeds))
        degrees = self._copied(self._degrees(taken.fresh)) if self.with_degrees else None
        history = None if self.exchange is None else self.exchange.prepare(macro, taken.slots, taken.turn % 2)
        return Prepared(alone, *parts, edata, taken, degrees, history=history, key=key)

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._stream is not None)

    def _copied(self, tensor: Tensor) -> Tensor:
        ready = self._stream is None or tensor.is_pinned()
        return tensor if ready else self._new(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, made: Prepared) -> bool:
        """Brings a macro-batch's structure and finds the slots of its nodes, beside the loads and steps before it: not
        before the latest one was loaded. ``False`` if the device keeps the book, and too few slots are free.

        On a GPU on a stream beside that of loads, from any thread; waits for the device's book alone.
        """
        with self._on(self._beside):
            indptr, indices = self._brought("indptr", made.indptr), self._brought("indices", made.indices)
            placed = self._placed(made, indices)
            if placed is None:
                return False
            degrees = made.degrees if made.taken is not None else self._fresh_degrees(placed.fresh)
            made.begun = Begun(indptr, indices, placed, degrees, self._event())
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, made: Prepared, stopped: Callable[[], bool] | None = None) -> Loaded | None:
        """Brings a macro-batch into its slots, which no step to come may read unless it is ``alone``; ``None`` if the
        device keeps the book, and too few slots are free.

        On a GPU on streams of its own, from any thread; nothing waits for the device but its book, unless slots were
        taken before, and, of historical embeddings on several ranks, for these, unless ``stopped()``.
        """
        if made.begun is None and not self.take(made):
            return None
        begun, made.begun = made.begun, None
        placed = begun.placed
        with self._on(self._stream):
            self._wait(begun.taken, self._read)  # the last step that read what rows are written over
            self._read_on((self._stream,), placed.fresh, placed.fresh_slots)  # also if this is given up below
            self._fill_far(placed.fresh, placed.fresh_slots)
        with self._on(self._beside):
            self._wait(self._in_use)  # what is replaced below is what the macro-batch before was shown from
            # Behind no features: this waits for what steps have pushed.
            moved = 0 if made.history is None else self.exchange.load(made.history, stopped)
            seeds, edata, done = self._build(made, begun)
        with self._on(self._stream):
            self._wait(done)
            ready = self._event()
        fresh = placed.fresh.numel()
        moved += fresh * sum(source.row_bytes for source in self.sources.values() if source.host) + made.nbytes
        moved += 0 if made.taken is not None or begun.degrees is None else begun.degrees.nbytes
        self.slots.loaded(placed)
        counts = placed.nodes, placed.cold, fresh, made.indices.numel(), moved
        return Loaded(seeds, *counts, edata, ready, made.history, made.key)

    def _build(self, made: Prepared, begun: Begun) -> tuple[Tensor, EdgeTensors, torch.cuda.Event | None]:
        """All but what comes over the bus, when the macro-batch before is shown: (slots of the seeds, edge tensors)."""
        placed = begun.placed
        self._fill_near(placed.fresh, placed.fresh_slots)
        if begun.degrees is not None:
            there = begun.degrees.to(self.device, non_blocking=True)
            self.graph.whole_degrees.data.index_copy_(0, placed.fresh_slots.long(), there)
        place_structure(begun.indptr, begun.indices, placed.rows, *self._next, table=placed.table)
        edata = placed_edges(made.edata, begun.indptr, placed.rows, self._next[0])
        seeds = torch.index_select(placed.table, 0, made.seeds.to(self.device, non_blocking=True))
        return seeds.to(self.graph.indices.dtype), edata, self._event()

    def _placed(self, made: Prepared, sources: Tensor) -> Placed | None:
        """Slots on the device; ``sources`` of the picked edges."""
        if made.taken is None:
            return self.slots.take(self._brought("rows", made.rows), sources, made.alone)
        taken, rows = made.taken, made.indptr.numel() - 1
        table = self._brought("slots", taken.slots)
        fresh, places = (t.to(self.device, non_blocking=True) for t in (taken.fresh, taken.fresh_slots))
        return Placed(table[:rows], table, fresh, places, table.numel(), taken.cold, taken.turn)

    def _fresh_degrees(self, fresh: Tensor) -> Tensor | None:
        """Degrees of nodes that the device found, if they are kept up."""
        return self._copied(self._degrees(fresh.cpu())) if self.with_degrees else None

    def _brought(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor on the device, in memory of its own: there one macro-batch is built behind another."""
        if self._stream is None:
            return tensor
        room = self._buffers.get(name)
        if room is None or room.numel() < tensor.numel():
            self._buffers[name] = room = None  # freed before it is replaced
            self._buffers[name] = room = tensor.new_empty(int(tensor.numel() * ROOM), device=self.device)
        return room[: tensor.numel()].copy_(tensor, non_blocking=True)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None):
        """On a GPU: on this stream."""
        if stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def _event(self) -> torch.cuda.Event | None:
        """On a GPU: when the current stream has come so far."""
        if self._stream is None:
            return None
        found = torch.cuda.Event()
        found.record(torch.cuda.current_stream(self.device))
        return found

    def _wait(self, *events: torch.cuda.Event | None) -> None:
        """On the current stream, not on the host."""
        for event in events:
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def close_epoch(self) -> None:
        """Steps launched so far come before what is loaded from now on."""
        self._read = self._in_use = self._event()

    # --- showing ---

    @torch.no_grad()
    def show(self, loaded: Loaded) -> None:
        """Makes a loaded macro-batch what the graph is, on the current stream, behind the steps launched so far."""
        read = self._event()
        if loaded.ready is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(loaded.ready)
            for tensor in (loaded.seeds, *loaded.edata.values()):
                tensor.record_stream(now)
        graph = self.graph
        graph.indptr.copy_(self._next[0])
        graph.indices.copy_(self._next[1])
        show_edges(graph, loaded.edata, loaded.key)
        if loaded.history is not None:
            self.exchange.show(loaded.history, loaded.nodes)
        self.touched()
        self._read, self._in_use = read, self._event()

    def touched(self) -> None:
        """Tells autograd that rows were, or are about to be, written by kernels of ours."""
        graph = self.graph
        for tensor in {
            id(t): t for t in (graph.ids, graph.positions, graph.whole_degrees, *graph.ndata.values())
        }.values():
            torch.autograd.graph.increment_version(tensor)
