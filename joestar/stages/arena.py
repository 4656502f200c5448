"""The arena: an ordinary ``Graph`` on the device whose nodes are slots that macro-batches' nodes take.

Slots ``[0, H)`` belong to hot nodes for good, the others to the nodes of the macro-batch that steps run on, of the
next one, whose missing rows are loaded meanwhile, and of earlier ones as long as nobody needs the place
(``stages/slots.py``). A macro-batch's local ids on the device *are* slots, so that compiled programs read features in
place, as of any graph. All addresses are fixed. The structure of the next macro-batch is built in a second buffer and
copied where it is, in the stream of the steps.
"""

import contextlib
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.stages.device_slots import DeviceSlots, Placed
from joestar.stages.exchange import Exchange, Rows
from joestar.stages.macro import MacroBatch, Picked
from joestar.stages.slots import Slots, Taken
from joestar.store import fill_rows, place_structure

ROOM = 1.03
"""Of buffers, beyond the first macro-batch's sizes."""


class Source:
    """One of the graph's node tensors, as rows are read from it: in place by the GPU, or resident there.

    Args:
        rows: ``[N, ...]``, on the arena's device: its own memory, or a view of page-locked memory.
        dtype: that rows have in the arena.
        host: whether reading them takes the bus.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype | None = None, host: bool = False):
        self.rows = rows
        self.dtype = rows.dtype if dtype is None else dtype
        self.host = host

    @property
    def row_bytes(self) -> int:
        """Bytes of a row where it is read."""
        return self.rows[:1].numel() * self.rows.element_size()


@dataclass(eq=False)
class Prepared:
    """A macro-batch on its way to an arena, on the CPU, for a GPU in page-locked memory.

    Attributes:
        alone: whether it must be loaded when no step reads the one before it any more.
        indptr, indices, seeds: as the macro-batch has them, or the picked edges. edata: by name, in its order.
        taken: slots of its nodes, where the CPU keeps the book; degrees: of the nodes to be loaded, in the whole graph.
        rows: of the picked edges, where the device keeps the book. history: its hidden rows.
    """

    alone: bool
    indptr: Tensor
    indices: Tensor
    seeds: Tensor
    edata: dict[str, Tensor]
    taken: Taken | None = None
    degrees: Tensor | None = None
    rows: Tensor | None = None
    history: Rows | None = None

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.indptr.numel() - 1:,} rows and {self.indices.numel():,} edges"

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        taken = () if self.taken is None else (self.taken.slots, self.taken.fresh, self.taken.fresh_slots)
        tensors = *taken, self.rows, self.indptr, self.indices, self.seeds, self.degrees, *self.edata.values()
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(eq=False)
class Loaded:
    """A macro-batch on the device, not yet what the arena's graph shows.

    Attributes:
        seeds: slots of its seeds ``[m]``, in their order; nodes, cold, fresh, edges: how many (``Taken``); bytes: that
            came over the bus.
        ready: when the device has all of it (CUDA).
    """

    seeds: Tensor
    nodes: int
    cold: int
    fresh: int
    edges: int
    bytes: int
    edata: dict[str, Tensor]
    ready: torch.cuda.Event | None = None
    history: Rows | None = None


class Arena:
    """Slots on a device for hot nodes and macro-batches.

    Args:
        whole: the user's graph, in host memory. device: of the arena.
        hot: ids of the nodes that stay, ascending, ``[H]``. pool: slots for other nodes, best enough for two
            macro-batches. edges: room for edges.
        sources: node tensors by name, as ``Source``s.
        reuse: whether rows stay until others need their slots (``Slots``).
        own_book: whether the device keeps the book of slots (``DeviceSlots``), of macro-batches without history.

    Attributes:
        graph: what programs are compiled on, ``H + pool`` nodes; its ``ids`` are those that the nodes in slots
            have in the whole graph (``whole.ids``, else their positions), its ``positions`` those positions.
        hot_ids: of the hot nodes, ``[H]``. slots: who has which slot.
        with_degrees: whether ``graph.whole_degrees`` are kept up; else they are not to be read.
        holder: the feed whose macro-batches the arena holds; preparing, loading: held while one is.
        exchange: of historical embeddings, which come and go with macro-batches; ``None`` without.
    """

    def __init__(self, whole: Graph, device: torch.device, hot: Tensor, pool: int, edges: int,
                 sources: dict[str, Source], reuse: bool = True, own_book: bool = False):  # fmt: skip
        self.whole, self.device = whole, torch.device(device)
        self.own_book = own_book
        self.hot, self.pool, self.edges = hot.numel(), pool, edges
        self.sources = sources
        slots = (self.hot + pool) | 1  # no number that a program has for other reasons (``lowering.slots``)
        dtype = whole.indices.dtype
        with torch.inference_mode(False), torch.device(self.device):
            structure = torch.zeros(slots + 1, dtype=torch.int64), torch.zeros(edges, dtype=dtype)
            self._next = torch.zeros_like(structure[0]), torch.zeros_like(structure[1])
            ndata = {
                name: torch.zeros((slots, *source.rows.shape[1:]), dtype=source.dtype)
                for name, source in sources.items()
            }
            edata = {name: torch.zeros((edges, *v.shape[1:]), dtype=v.dtype) for name, v in whole.edata.items()}
            self.graph = Graph(*structure, ndata, edata)
            self.graph.ids = torch.zeros(slots, dtype=dtype)
            positions = self.graph.ids if whole.ids is None else torch.zeros(slots, dtype=dtype)
            self.graph.as_part_of(whole, positions)
            self.graph.whole_degrees = torch.zeros(slots, dtype=torch.int64)
        book = hot.cpu(), pool, whole.num_nodes, reuse
        self.slots = DeviceSlots(*book, self.device) if self.own_book else Slots(*book)
        self.graph.name, self.graph.num_classes = whole.name, whole.num_classes
        self.graph.multilabel, self.graph.class_names = whole.multilabel, whole.class_names
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None  # the bus waits for nobody
        if on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the book is there
        self._in_use: torch.cuda.Event | None = None
        self.with_degrees = True
        self.holder: weakref.ref | None = None
        self.preparing, self.loading = threading.Lock(), threading.Lock()
        self.exchange: Exchange | None = None
        self._buffers: dict[str, Tensor | None] = {}
        self._forget = False
        self.hot_ids = hot
        self._known = None if whole.ids is None else whole.ids.to(self.device)
        self._fill_hot(hot)

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

    def _degrees(self, ids: Tensor) -> Tensor:
        ids, offsets = ids.long(), self.whole.indptr
        known = self.whole.whole_degrees
        return offsets[ids + 1] - offsets[ids] if known is None else known[ids]

    def begin(self) -> None:
        """A feed begins: nobody reads a macro-batch any more but steps that are launched, or prepares one."""
        with self.preparing, self.loading, self._loads():
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
        places = slots.long()
        for name, source in self.sources.items():
            rows = self.graph.ndata[name]
            if source.host:
                fill_rows(source.rows, ids, slots, rows)
            else:
                rows.data.index_copy_(0, places, source.rows.index_select(0, ids).to(source.dtype))
        self.graph.positions.data.index_copy_(0, places, ids)
        if self._known is not None:
            self.graph.ids.data.index_copy_(0, places, self._known.index_select(0, ids))

    # --- loading, beside the steps ---

    @torch.no_grad()
    def prepare(self, macro: MacroBatch | Picked) -> Prepared | None:
        """Slots for a macro-batch's nodes, beside those of the one before it if there are enough; ``None`` if it has no
        room at all. Uses the CPU alone; one thread at a time (``Gate.prepare``). Where the device keeps the book, edges
        are looked at here, and slots are taken when it is loaded."""
        if macro.num_edges > self.edges or not (self.exchange is None or self.exchange.fits(macro)):
            return None
        edata = {name: self._copied(value[macro.eids]) for name, value in self.whole.edata.items()}
        if self.own_book:
            picked = Picked.of(macro) if isinstance(macro, MacroBatch) else macro
            parts = (self._copied(tensor) for tensor in (picked.indptr, picked.sources, picked.seeds))
            return Prepared(False, *parts, edata, rows=self._copied(picked.rows))
        taken, alone = self.slots.take(macro.ids, self._new), False
        if taken is None:
            taken, alone = self.slots.take(macro.ids, self._new, alone=True), True
        if taken is None:
            return None
        parts = (self._copied(tensor) for tensor in (macro.indptr, macro.indices, macro.seeds))
        degrees = self._copied(self._degrees(taken.fresh)) if self.with_degrees else None
        history = None if self.exchange is None else self.exchange.prepare(macro, taken.slots, taken.turn % 2)
        return Prepared(alone, *parts, edata, taken, degrees, history=history)

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._stream is not None)

    def _copied(self, tensor: Tensor) -> Tensor:
        ready = self._stream is None or tensor.is_pinned()
        return tensor if ready else self._new(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    @torch.no_grad()
    def load(self, made: Prepared) -> Loaded | None:
        """Brings a macro-batch into its slots, which no step to come may read unless it is ``alone``; ``None`` if the
        device keeps the book, and too few slots are free.

        On a GPU on a stream of its own, from any thread; nothing waits for the device but its book.
        """
        with self._loads():
            indptr, indices = self._brought("indptr", made.indptr), self._brought("indices", made.indices)
            placed = self._placed(made, indices)
            if placed is None:
                return None
            degrees = made.degrees if made.taken is not None else self._fresh_degrees(placed.fresh)
            if self._in_use is not None:
                self._stream.wait_event(self._in_use)  # the last step that read what is written
            self._fill(placed.fresh, placed.fresh_slots)
            if degrees is not None:
                there = degrees.to(self.device, non_blocking=True)
                self.graph.whole_degrees.data.index_copy_(0, placed.fresh_slots.long(), there)
            place_structure(indptr, indices, placed.rows, *self._next, table=placed.table)
            edata = self._edge_data(made.edata, indptr, placed.rows)
            seeds = torch.index_select(placed.table, 0, made.seeds.to(self.device, non_blocking=True))
            seeds = seeds.to(self.graph.indices.dtype)
            fresh = placed.fresh.numel()
            moved = fresh * sum(source.row_bytes for source in self.sources.values() if source.host) + made.nbytes
            moved += 0 if made.taken is not None or degrees is None else degrees.nbytes
            if made.history is not None:
                moved += self.exchange.load(made.history)
            loaded = Loaded(
                seeds, placed.nodes, placed.cold, fresh, made.indices.numel(), moved, edata, history=made.history
            )
            if self._stream is not None:
                loaded.ready = torch.cuda.Event()
                loaded.ready.record(self._stream)
        self.slots.loaded(placed)
        return loaded

    def _placed(self, made: Prepared, sources: Tensor) -> Placed | None:
        """Slots on the device; ``sources`` of the picked edges."""
        if made.taken is None:
            return self.slots.take(self._brought("rows", made.rows), sources, made.alone)
        taken, rows = made.taken, made.indptr.numel() - 1
        table, places = self._brought("slots", taken.slots), self._brought("places", taken.fresh_slots)
        fresh = self._brought("fresh", taken.fresh)
        return Placed(table[:rows], table, fresh, places, table.numel(), taken.cold, taken.turn)

    def _fresh_degrees(self, fresh: Tensor) -> Tensor | None:
        """Degrees of nodes that the device found, if they are kept up."""
        return self._copied(self._degrees(fresh.cpu())) if self.with_degrees else None

    def _brought(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor on the device, in memory of its own: one load follows another there."""
        if self._stream is None:
            return tensor
        room = self._buffers.get(name)
        if room is None or room.numel() < tensor.numel():
            self._buffers[name] = room = None  # freed before it is replaced
            self._buffers[name] = room = tensor.new_empty(int(tensor.numel() * ROOM), device=self.device)
        return room[: tensor.numel()].copy_(tensor, non_blocking=True)

    def _edge_data(self, given: dict[str, Tensor], indptr: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """Edge tensors in the order of the arena's edges."""
        if not given:
            return {}
        rows = torch.repeat_interleave(indptr.diff())
        within = torch.arange(rows.numel(), device=self.device) - indptr[rows]
        position = self._next[0][slots.long()[rows]] + within
        found = {}
        for name, value in given.items():
            value = value.to(self.device, non_blocking=True)
            found[name] = torch.empty_like(value).index_copy_(0, position, value)
        return found

    @contextlib.contextmanager
    def _loads(self):
        """On a GPU: on the stream of loads."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def close_epoch(self) -> None:
        """Steps launched so far come before what is loaded from now on."""
        if self._stream is not None:
            self._in_use = torch.cuda.Event()
            self._in_use.record(torch.cuda.current_stream(self.device))

    # --- showing ---

    @torch.no_grad()
    def show(self, loaded: Loaded) -> None:
        """Makes a loaded macro-batch what the graph is, on the current stream, behind the steps launched so far."""
        if loaded.ready is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(loaded.ready)
            for tensor in (loaded.seeds, *loaded.edata.values()):
                tensor.record_stream(now)
        graph = self.graph
        graph.indptr.copy_(self._next[0])
        graph.indices.copy_(self._next[1])
        for name, value in loaded.edata.items():
            graph.edata[name][: value.shape[0]].copy_(value)
        if loaded.history is not None:
            self.exchange.show(loaded.history, loaded.nodes)
        self.touched()
        self.close_epoch()

    def touched(self) -> None:
        """Tells autograd that rows were, or are about to be, written by kernels of ours."""
        graph = self.graph
        for tensor in {
            id(t): t for t in (graph.ids, graph.positions, graph.whole_degrees, *graph.ndata.values())
        }.values():
            torch.autograd.graph.increment_version(tensor)
