"""``DeviceSlots``: the book of an arena's slots, kept where the arena is."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Placed:
    """Slots of a macro-batch's nodes, on the device.

    Attributes:
        rows: int32 ``[r]``, of its rows. table: int32, of whatever its sources are numbered by.
        fresh: ids ``[f]`` of the nodes whose rows have to be loaded; fresh_slots: int32 ``[f]``, where.
        nodes, cold: how many it has, and how many of them are not hot.
        turn: how many macro-batches had taken slots before.
    """

    rows: Tensor
    table: Tensor
    fresh: Tensor
    fresh_slots: Tensor
    nodes: int
    cold: int
    turn: int


def keeps_book(device: torch.device) -> bool:
    """Whether a device keeps the book of slots of its arenas itself: a GPU, unless ``JOESTAR_GPU_BOOK=0``."""
    return device.type == "cuda" and os.environ.get("JOESTAR_GPU_BOOK") != "0"


class DeviceSlots:
    """As ``Slots``, for macro-batches in the ids of the whole graph (``Picked``), whose nodes it finds itself.

    4 bytes per node of the graph and 10 per slot of the pool, so that a CPU has neither to tell nodes apart nor to look
    up where they are. All work is queued on the current stream; ``take`` waits for it once. What comes of it is that
    of ``Slots`` for the same nodes, ascending.

    Args:
        hot: ids of the nodes that stay ``[H]``: their slots are ``[0, H)``. pool: further slots.
        num_nodes: of the whole graph.
        reuse: whether rows of earlier macro-batches are found again.
    """

    def __init__(self, hot: Tensor, pool: int, num_nodes: int, reuse: bool, device: torch.device):
        from joestar.kernels import gpu_book  # with Triton, which is not everywhere

        self._kernels = gpu_book
        self.hot, self.pool, self.reuse = hot.numel(), pool, reuse
        with torch.inference_mode(False), torch.device(device):
            self.slot_of = torch.full((num_nodes,), -1, dtype=torch.int32)
            self.slot_of[hot.to(device).long()] = torch.arange(self.hot, dtype=torch.int32)
            self._owner = torch.full((pool,), -1, dtype=hot.dtype)
            self._since = torch.zeros(pool, dtype=torch.int32)
            self._keep, self._used = (torch.zeros(pool, dtype=torch.uint8) for _ in range(2))
            self._hand = torch.zeros(1, dtype=torch.int64)
            self._bits = self._kernels.bits_for(num_nodes, device)
        self._turn, self._loaded = 0, 0

    @staticmethod
    def nbytes_of(num_nodes: int) -> int:
        """Bytes for a graph of so many nodes, without a pool."""
        return 4 * num_nodes + num_nodes // 8

    @staticmethod
    def slot_nbytes(index: int) -> int:
        """Bytes per slot of the pool, for ids of ``index`` bytes."""
        return index + 6

    def take(self, rows: Tensor, sources: Tensor, alone: bool = False) -> Placed | None:
        """Slots for the next macro-batch; ``None`` if too few are free, and nothing has changed.

        Args:
            rows, sources: of its edges, ids ``[r]`` and ``[e]`` on the device.
            alone: also slots of the macro-batch before: it is loaded when that is not used any more.
        """
        if not self.reuse:
            self._kernels.leave_slots(self.slot_of, self._owner, self._since, -1)
        self._bits.zero_()
        self._used.zero_()
        self._kernels.mark_nodes(self._bits, rows)
        self._kernels.mark_nodes(self._bits, sources)
        found = self._kernels.count_nodes(self._bits, self.slot_of, self._used, self.hot)
        hand = self._hand if self.reuse else torch.zeros_like(self._hand)
        free = self._kernels.count_free(self._keep, self._used, hand)
        nodes, cold, fresh, beside, unused = torch.cat([found.sum(1), free.sum(1)]).tolist()
        if fresh > (unused if alone else beside):
            return None
        self._turn += 1  # before anything is written, so that an interrupt leaves nothing that ``begin`` does not find
        taken = self._kernels.list_free(self._keep, self._used, hand, free, fresh, alone)
        ids, slots = self._kernels.take_free(
            self._bits, self.slot_of, self._owner, self._since, self._used, taken, found, self._hand, self.hot,
            self._turn,
        )  # fmt: skip
        self._keep, self._used = self._used, self._keep
        return Placed(torch.index_select(self.slot_of, 0, rows), self.slot_of, ids, slots, nodes, cold, self._turn)

    def loaded(self, placed: Placed) -> None:
        """The rows of these are there: macro-batches are loaded in the order in which they took slots."""
        self._loaded = placed.turn

    def begin(self) -> None:
        """Nothing is in use any more, and what took slots without having been loaded will not be."""
        self._keep.zero_()
        if self._turn != self._loaded:
            self._kernels.leave_slots(self.slot_of, self._owner, self._since, self._loaded)
        self._loaded = self._turn

    def clear(self) -> None:
        """No row outside of the hot ones is to be found again."""
        self._kernels.leave_slots(self.slot_of, self._owner, self._since, -1)
