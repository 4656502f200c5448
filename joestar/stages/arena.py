"""The arena: an ordinary ``Graph`` on the device whose nodes are slots that macro-batches take in turns.

Slots ``[0, H)`` belong to hot nodes for good, ``[H, H + C)`` and ``[H + C, H + 2 C)`` to macro-batches in turns: the
rows of the next one are loaded into one half while steps run on the other. A macro-batch's local ids on the device
*are* slots, so that compiled programs read features in place, as of any graph. All addresses are fixed. The structure
of the next macro-batch is built in a second buffer and copied where it is, in the stream of the steps.
"""

import contextlib
import threading
import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import StageError
from joestar.graph_api import Graph
from joestar.kernels.cpu_store import assign_slots
from joestar.stages.exchange import Exchange, Rows
from joestar.stages.macro import MacroBatch
from joestar.store import fill_rows, place_structure

HALVES = 2
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
        first: slot of its first cold node. slots: int32 ``[n]``, slot of every local node. cold: ids ``[c]`` of those
            that are not hot. degrees: theirs in the whole graph, or ``None``.
        indptr, indices, seeds: as the macro-batch has them. edata: by name, in its order. history: its hidden rows.
    """

    first: int
    slots: Tensor
    cold: Tensor
    indptr: Tensor
    indices: Tensor
    seeds: Tensor
    degrees: Tensor | None
    edata: dict[str, Tensor]
    history: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = self.slots, self.cold, self.indptr, self.indices, self.seeds, self.degrees, *self.edata.values()
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(eq=False)
class Loaded:
    """A macro-batch on the device, not yet what the arena's graph shows.

    Attributes:
        seeds: slots of its seeds ``[m]``, in their order; nodes, cold, edges: how many; bytes: that came over the bus.
        ready: when the device has all of it (CUDA).
    """

    seeds: Tensor
    nodes: int
    cold: int
    edges: int
    bytes: int
    edata: dict[str, Tensor]
    ready: torch.cuda.Event | None = None
    history: Rows | None = None


class Gate:
    """Lets one macro-batch at a time be loaded beside the one in use; closing it wakes whoever waits.

    Attributes:
        waited: seconds that loading has waited here.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._free = 1
        self._closed = False
        self.waited = 0.0

    def enter(self) -> None:
        """Waits until a half is free.

        Raises:
            StageError: if the gate is closed.
        """
        start = time.perf_counter()
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()
            self.waited += time.perf_counter() - start
            if self._closed:
                raise StageError("the arena's gate was closed.")
            self._free -= 1

    def pass_through(self, arena: "Arena", made: Prepared) -> Loaded:
        """``arena.load``, unless the gate was closed: a thread that is late must not write what is in use by then.

        Raises:
            StageError: if the gate is closed.
        """
        with arena.loading:
            if self._closed:
                raise StageError("the arena's gate was closed.")
            return arena.load(made)

    def leave(self) -> None:
        """A half is free again."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody enters any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Arena:
    """Slots on a device for hot nodes and two macro-batches.

    Args:
        whole: the user's graph, in host memory. device: of the arena.
        hot: ids of the nodes that stay, ascending, ``[H]``. cold: slots of each half, ``C``. edges: room for edges.
        sources: node tensors by name, as ``Source``s.

    Attributes:
        graph: what programs are compiled on, ``H + 2 C`` nodes; its ``ids`` are those that the nodes in slots
            have in the whole graph (``whole.ids``, else their positions).
        slot_of: int32 ``[N]`` on the CPU, the slot of every hot node, else -1.
        with_degrees: whether ``graph.whole_degrees`` are kept up; else they are not to be read.
        holder: the feed whose macro-batches the arena holds; loading: held while one is loaded.
        exchange: of historical embeddings, which come and go with macro-batches; ``None`` without.
    """

    def __init__(self, whole: Graph, device: torch.device, hot: Tensor, cold: int, edges: int,
                 sources: dict[str, Source]):  # fmt: skip
        self.whole, self.device = whole, torch.device(device)
        self.hot, self.cold, self.edges = hot.numel(), cold, edges
        self.sources = sources
        slots = self.hot + HALVES * cold
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
            self.graph.whole_degrees = torch.zeros(slots, dtype=torch.int64)
        self.slot_of = torch.full((whole.num_nodes,), -1, dtype=torch.int32, device="cpu")
        self.graph.name, self.graph.num_classes = whole.name, whole.num_classes
        self.graph.multilabel, self.graph.class_names = whole.multilabel, whole.class_names
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._in_use: torch.cuda.Event | None = None
        self.with_degrees = True
        self.holder: weakref.ref | None = None
        self.loading = threading.Lock()
        self.exchange: Exchange | None = None
        self._buffers: dict[str, Tensor | None] = {}
        self._hot_ids = hot
        self._known = None if whole.ids is None else whole.ids.to(self.device)
        self._fill_hot(hot)

    def held_by(self, feed) -> bool:
        """Whether the arena holds macro-batches of this feed."""
        return self.holder is not None and self.holder() is feed

    def _fill_hot(self, hot: Tensor) -> None:
        if self.hot:
            self.slot_of[hot.long()] = torch.arange(self.hot, dtype=torch.int32)
            self._fill(hot.to(self.device), 0)
        self.fill_degrees()

    def fill_degrees(self) -> None:
        """From now on degrees are kept up, those of hot nodes at once."""
        self.with_degrees = True
        self.graph.whole_degrees[: self.hot] = self._degrees(self._hot_ids.cpu()).to(self.device)

    def _degrees(self, ids: Tensor) -> Tensor:
        ids, offsets = ids.long(), self.whole.indptr
        known = self.whole.whole_degrees
        return offsets[ids + 1] - offsets[ids] if known is None else known[ids]

    def _fill(self, ids: Tensor, first: int) -> None:
        """Rows and ids of nodes into the slots from ``first`` on."""
        count = ids.numel()
        slots = torch.arange(first, first + count, dtype=torch.int32, device=self.device)
        for name, source in self.sources.items():
            rows = self.graph.ndata[name]
            if source.host:
                fill_rows(source.rows, ids, slots, rows)
            else:
                rows[first : first + count] = source.rows.index_select(0, ids).to(source.dtype)
        self.graph.ids[first : first + count] = ids if self._known is None else self._known.index_select(0, ids)

    # --- loading, beside the steps ---

    @torch.no_grad()
    def prepare(self, macro: MacroBatch, half: int) -> Prepared | None:
        """Slots in a half for a macro-batch's nodes; ``None`` if it has no room. Uses the CPU alone, from any
        thread."""
        if macro.num_edges > self.edges or not (self.exchange is None or self.exchange.fits(macro)):
            return None
        slots, cold = self._staged(macro.ids, torch.int32), self._staged(macro.ids)
        first = self.hot + half * self.cold
        count = assign_slots(macro.ids, self.slot_of, first, slots, cold)
        if count > self.cold:
            return None
        cold = cold[:count]
        degrees = self._copied(self._degrees(cold)) if self.with_degrees else None
        edata = {name: self._copied(value[macro.eids]) for name, value in self.whole.edata.items()}
        structure = (self._copied(tensor) for tensor in (macro.indptr, macro.indices, macro.seeds))
        history = None if self.exchange is None else self.exchange.prepare(macro, slots, half)
        return Prepared(first, slots, cold, *structure, degrees, edata, history)

    def _staged(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(like, dtype=dtype, pin_memory=self._stream is not None)

    def _copied(self, tensor: Tensor) -> Tensor:
        ready = self._stream is None or tensor.is_pinned()
        return tensor if ready else self._staged(tensor).copy_(tensor)

    @torch.no_grad()
    def load(self, made: Prepared) -> Loaded:
        """Brings a macro-batch into its half, which no step to come may read.

        On a GPU on a stream of its own, from any thread; nothing waits for the device.
        """
        with self._beside():
            first, count = made.first, made.cold.numel()
            slots = self._brought("slots", made.slots)
            self._fill(self._brought("cold", made.cold), first)
            if made.degrees is not None:
                self.graph.whole_degrees[first : first + count].copy_(made.degrees, non_blocking=True)
            indptr = self._brought("indptr", made.indptr)
            place_structure(indptr, self._brought("indices", made.indices), slots, *self._next)
            edata = self._edge_data(made.edata, indptr, slots)
            seeds = torch.index_select(slots, 0, made.seeds.to(self.device, non_blocking=True))
            moved = count * sum(source.row_bytes for source in self.sources.values() if source.host) + made.nbytes
            seeds = seeds.to(self.graph.indices.dtype)
            if made.history is not None:
                moved += self.exchange.load(made.history)
            loaded = Loaded(seeds, slots.numel(), count, made.indices.numel(), moved, edata, history=made.history)
            if self._stream is not None:
                loaded.ready = torch.cuda.Event()
                loaded.ready.record(self._stream)
        return loaded

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
    def _beside(self):
        """On a GPU: on the stream of loads, behind the last step that read what is written."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if self._in_use is not None:
                self._stream.wait_event(self._in_use)
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
        for tensor in (self.graph.ids, self.graph.whole_degrees, *self.graph.ndata.values()):
            torch.autograd.graph.increment_version(tensor)
