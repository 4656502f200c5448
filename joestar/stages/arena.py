"""The arena: an ordinary ``Graph`` on the device whose nodes are slots that macro-batches take in turns.

Slots ``[0, H)`` belong to hot nodes for good, ``[H, H + C)`` and ``[H + C, H + 2 C)`` to macro-batches in turns: the
rows of the next one are loaded into one half while steps run on the other. A macro-batch's local ids on the device
*are* slots, so that compiled programs read features in place, as of any graph. All addresses are fixed. The structure
of the next macro-batch is built in a second buffer and copied where it is, in the stream of the steps.
"""

import contextlib
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import StageError
from joestar.graph_api import Graph
from joestar.stages.macro import MacroBatch
from joestar.store import fill_rows, place_structure

HALVES = 2


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
class Loaded:
    """A macro-batch on the device, not yet what the arena's graph shows.

    Attributes:
        seeds: slots of its seeds ``[m]``, in their order; half: where its cold nodes are; cold: how many.
        edges: in all; bytes: that came over the bus. ready: when the device has all of it (CUDA).
    """

    seeds: Tensor
    half: int
    nodes: int
    cold: int
    edges: int
    bytes: int
    edata: dict[str, Tensor]
    ready: torch.cuda.Event | None = None


class Gate:
    """Lets one macro-batch at a time be loaded beside the one in use; closing it wakes whoever waits."""

    def __init__(self):
        self._changed = threading.Condition()
        self._free = 1
        self._half = HALVES - 1
        self._closed = False

    def enter(self) -> None:
        """Waits until a half is free.

        Raises:
            StageError: if the gate is closed.
        """
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()
            if self._closed:
                raise StageError("the arena's gate was closed.")
            self._free -= 1

    def turn(self) -> int:
        """The half for the macro-batch that has entered: each in turn."""
        self._half = (self._half + 1) % HALVES
        return self._half

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
        graph: what programs are compiled on, ``H + 2 C`` nodes; its ``ids`` are the nodes that slots hold.
        slot_of: int32 ``[N]`` on the device, the slot of every hot node, else -1.
        with_degrees: whether ``graph.whole_degrees`` are kept up; else they are not to be read.
        holder: the feed whose macro-batches the arena holds.
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
            self.slot_of = torch.full((whole.num_nodes,), -1, dtype=torch.int32)
        self.graph.name, self.graph.num_classes = whole.name, whole.num_classes
        self.graph.multilabel, self.graph.class_names = whole.multilabel, whole.class_names
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._in_use: torch.cuda.Event | None = None
        self.with_degrees = True
        self.holder: object | None = None
        self._fill_hot(hot)

    @property
    def num_slots(self) -> int:
        """``H + 2 C``."""
        return self.hot + HALVES * self.cold

    def _fill_hot(self, hot: Tensor) -> None:
        if not self.hot:
            return
        slots = torch.arange(self.hot, dtype=torch.int32, device=self.device)
        ids = hot.to(self.device)
        self.slot_of.index_copy_(0, ids.long(), slots)
        self._fill(ids, slots, hot)

    def _fill(self, ids: Tensor, slots: Tensor, host_ids: Tensor | None = None) -> None:
        """Rows, ids and degrees of the nodes ``ids``, ascending, into their slots."""
        at = slots.long()
        for name, source in self.sources.items():
            if source.host:
                fill_rows(source.rows, ids, slots, self.graph.ndata[name])
            else:
                self.graph.ndata[name].index_copy_(0, at, source.rows.index_select(0, ids).to(source.dtype))
        self.graph.ids.index_copy_(0, at, ids)
        if not self.with_degrees and host_ids is None:
            return
        whole = self.whole.indptr
        if whole.device != self.device:
            ids = ids.cpu() if host_ids is None else host_ids
        ids = ids.long()
        degrees = torch.index_select(whole, 0, ids + 1) - torch.index_select(whole, 0, ids)
        self.graph.whole_degrees.index_copy_(0, at, degrees.to(self.device))

    # --- loading, beside the steps ---

    def fits(self, macro: MacroBatch, slot_of: Tensor) -> bool:
        """Whether a macro-batch has room; ``slot_of`` as the attribute, on the CPU."""
        if macro.num_edges > self.edges:
            return False
        if macro.num_nodes <= self.cold:
            return True
        cold = torch.index_select(slot_of, 0, macro.ids.long()) < 0
        return int(cold.sum()) <= self.cold

    @torch.no_grad()
    def load(self, macro: MacroBatch, half: int) -> Loaded:
        """Brings a macro-batch that ``fits`` into a half that no step reads any more.

        On a GPU on a stream of its own, from any thread; returns before the device is done.
        """
        with self._beside():
            ids = macro.ids.to(self.device, non_blocking=True)
            slots = torch.index_select(self.slot_of, 0, ids.long())
            at = torch.nonzero(slots < 0).flatten()
            cold, order = torch.sort(torch.index_select(ids, 0, at))
            first = self.hot + half * self.cold
            new = torch.arange(first, first + cold.numel(), dtype=torch.int32, device=self.device)
            slots.index_copy_(0, torch.index_select(at, 0, order), new)
            self._fill(cold, new)
            indptr = macro.indptr.to(self.device, non_blocking=True)
            indices = macro.indices.to(self.device, non_blocking=True)
            place_structure(indptr, indices, slots, *self._next)
            edata = self._edge_data(macro, indptr, slots)
            seeds = torch.index_select(slots, 0, macro.seeds.to(self.device).long()).to(self.graph.indices.dtype)
            moved = cold.numel() * sum(source.row_bytes for source in self.sources.values() if source.host)
            made = Loaded(seeds, half, macro.num_nodes, cold.numel(), macro.num_edges, moved + macro.nbytes, edata)
            if self._stream is not None:
                made.ready = torch.cuda.Event()
                made.ready.record(self._stream)
        return made

    def _edge_data(self, macro: MacroBatch, indptr: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """Edge tensors in the order of the arena's edges."""
        if not self.graph.edata:
            return {}
        rows = torch.repeat_interleave(indptr.diff())
        within = torch.arange(rows.numel(), device=self.device) - indptr[rows]
        position = self._next[0][slots.long()[rows]] + within
        found = {}
        for name, value in self.whole.edata.items():
            given = torch.index_select(value, 0, macro.eids).to(self.device)
            found[name] = torch.empty_like(given).index_copy_(0, position, given)
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
        for tensor in (graph.ids, graph.whole_degrees, *graph.ndata.values()):
            torch.autograd.graph.increment_version(tensor)  # written by kernels of ours
        self.close_epoch()
