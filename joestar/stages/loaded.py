"""A macro-batch on its way into an arena: made ready on the CPU, begun on the device, loaded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.stages.arena_graph import EdgeTensors
from joestar.stages.device_slots import Placed
from joestar.stages.exchanged import Rows
from joestar.stages.slots import Taken


@dataclass(eq=False)
class Begun:
    """What a device has of a macro-batch before its rows: the slots of its nodes, and its structure as it came.

    Attributes:
        degrees: in the whole graph, of the nodes to be loaded; on the CPU. taken: when the slots are known (CUDA).
    """

    indptr: Tensor
    indices: Tensor
    placed: Placed
    degrees: Tensor | None
    taken: torch.cuda.Event | None


@dataclass(eq=False)
class Prepared:
    """A macro-batch on its way to an arena, on the CPU, for a GPU in page-locked memory.

    Attributes:
        alone: whether it must be loaded when no step reads the one before it any more.
        indptr, indices, seeds: as the macro-batch has them, or the picked edges. edata: in its order.
        taken: slots of its nodes, where the CPU keeps the book; degrees: of the nodes to be loaded, in the whole graph.
        rows: of the picked edges, where the device keeps the book. history: its hidden rows.
        key: that it was drawn with.
        begun: what the device has of it already (``Arena.take``).
    """

    alone: bool
    indptr: Tensor
    indices: Tensor
    seeds: Tensor
    edata: EdgeTensors
    taken: Taken | None = None
    degrees: Tensor | None = None
    rows: Tensor | None = None
    history: Rows | None = None
    begun: "Begun | None" = None
    key: tuple[int, int, int] | None = None

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
        ready: when the device has all of it (CUDA). key: as ``Prepared``.
    """

    seeds: Tensor
    nodes: int
    cold: int
    fresh: int
    edges: int
    bytes: int
    edata: EdgeTensors
    ready: torch.cuda.Event | None = None
    history: Rows | None = None
    key: tuple[int, int, int] | None = None
