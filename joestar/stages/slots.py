"""Which node has which slot of an arena: hot nodes for good, others until their slot is taken for another node."""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar.kernels.cpu_stages import fresh
from joestar.kernels.cpu_store import take_slots

Empty = Callable[[int, torch.dtype], Tensor]


class Taken:
    """Slots of a macro-batch's nodes.

    Attributes:
        slots: int32 ``[n]``, of every local node. cold: how many nodes are not hot.
        fresh: ids ``[f]`` of the nodes whose rows have to be loaded; fresh_slots: int32 ``[f]``, where.
        turn: how many macro-batches had taken slots before.
    """

    def __init__(self, slots: Tensor, cold: int, fresh: Tensor, fresh_slots: Tensor, turn: int):
        self.slots, self.cold, self.fresh, self.fresh_slots, self.turn = slots, cold, fresh, fresh_slots, turn


class Slots:
    """The book of an arena's slots, on the CPU.

    A macro-batch never takes a slot of the one before it, which steps may still read. Rows that earlier ones loaded and
    nobody has overwritten are found again (FastGL 4.1 does so between mini-batches); the search for free slots goes
    around, so that the rows that go are those that have been there the longest, the used ones left out.

    Args:
        hot: ids of the nodes that stay ``[H]``: their slots are ``[0, H)``. pool: further slots.
        num_nodes: of the whole graph.
        reuse: whether rows are found again. Without, the slots of a macro-batch's nodes ascend as the nodes do,
            whatever came before: programs that read nodes in the order of their slots give the same bits then.
    """

    def __init__(self, hot: Tensor, pool: int, num_nodes: int, reuse: bool = True):
        self.hot, self.pool, self.reuse = hot.numel(), pool, reuse
        with torch.inference_mode(False), torch.device("cpu"):
            self.slot_of = fresh(num_nodes, torch.int32).fill_(-1)
            self.slot_of[hot.long()] = torch.arange(self.hot, dtype=torch.int32)
            self._owner = torch.full((pool,), -1, dtype=hot.dtype)
            self._since = torch.zeros(pool, dtype=torch.int32)
            self._keep, self._used = (torch.zeros(pool, dtype=torch.uint8) for _ in range(2))
        self._hand, self._turn, self._loaded = 0, 0, 0

    def take(self, ids: Tensor, empty: Empty, alone: bool = False) -> Taken | None:
        """Slots for the next macro-batch; ``None`` if too few are free, and nothing has changed.

        Args:
            ids: of its nodes, ``[n]``, each once. empty: makes ``[n]`` tensors.
            alone: also slots of the macro-batch before: it is loaded when that is not used any more.
        """
        slots, fresh, places = (empty(ids.numel(), dtype) for dtype in (torch.int32, ids.dtype, torch.int32))
        keep = torch.zeros_like(self._keep) if alone else self._keep
        cold, count, hand = take_slots(
            ids, self.slot_of, self.hot, self._owner, self._since, keep, self._used, self.reuse, self._hand,
            self._turn + 1, slots, fresh, places,
        )  # fmt: skip
        if hand < 0:
            return None
        self._hand, self._turn = hand, self._turn + 1
        self._keep, self._used = self._used, self._keep
        return Taken(slots, cold, fresh[:count], places[:count], self._turn)

    def loaded(self, taken: Taken) -> None:
        """The rows of these are there: macro-batches are loaded in the order in which they took slots."""
        self._loaded = taken.turn

    def begin(self) -> None:
        """Nothing is in use any more, and what took slots without having been loaded will not be."""
        self._keep.zero_()
        if self._turn != self._loaded:
            self._forget(self._since > self._loaded)
        self._loaded = self._turn

    def clear(self) -> None:
        """No row outside of the hot ones is to be found again."""
        self._forget(torch.ones_like(self._since, dtype=torch.bool))

    def _forget(self, gone: Tensor) -> None:
        gone = gone & (self._owner >= 0)
        self.slot_of[self._owner[gone].long()] = -1
        self._owner[gone] = -1
