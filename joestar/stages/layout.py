"""How an arena is divided, what that takes, and how it may be divided anew for a step that has no room."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROOMS = ((2.5, 1.25), (1.25, 1.25), (1.02, 1.02))
"""Room for nodes and edges, over those of the step that has none: two such steps in a row, others like it, this one."""
STEPS = 100
"""Numbers of hot nodes that are tried."""


@dataclass(frozen=True)
class Costs:
    """Bytes of the device: ``fixed`` whatever is chosen, per ``slot``, per ``edge``; ``pool``: further ones per slot of
    nodes that are not hot; ``loading`` per node and ``loading_edge`` per edge of a macro-batch that is being loaded.

    ``bus`` are bytes of a cold node's rows, which cross the bus; ``own_book``: slots do not. ``pulled`` and ``pushed``:
    bytes of hidden rows that a macro-batch reads from the host and leaves there; ``hidden``: seconds of all the host's
    threads for that.
    """

    fixed: dict[str, int]
    slot: float
    edge: float
    bus: float
    pool: float = 0.0
    own_book: bool = False
    loading: float = 24.0
    loading_edge: float = 4.0
    pulled: float = 0.0
    pushed: float = 0.0
    hidden: float = 0.0

    def of(self, layout: "Layout", nodes: float, edges: float) -> dict[str, int]:
        """Bytes of the device by what they hold, while a macro-batch of so many nodes and edges is being loaded."""
        hot, cold = layout.hot, layout.cold
        return {
            "hot nodes": int(hot * self.slot),
            "macro-batches": int(cold * (self.slot + self.pool) + 16 * (hot + cold) + layout.edges * self.edge),
            "loading": int(nodes * self.loading + edges * self.loading_edge),
            **self.fixed,
        }


@dataclass(frozen=True)
class Layout:
    """Nodes that stay, slots for others, room for edges."""

    hot: int
    cold: int
    edges: int

    @property
    def slots(self) -> int:
        """For all nodes."""
        return self.hot + self.cold


class Need:
    """What a macro-batch needs that cannot be cut.

    Args:
        ids: of its nodes ``[n]``, each once. edges: how many it has. hottest: nodes that may stay, the hottest first.
    """

    def __init__(self, ids: Tensor, edges: int, hottest: Tensor):
        self.nodes, self.edges = ids.numel(), edges
        known, ranks = hottest.long().sort()
        ids = ids.long().cpu()
        at = torch.searchsorted(known, ids).clamp_(max=max(0, known.numel() - 1))
        there = known[at] == ids if known.numel() else torch.zeros_like(ids, dtype=torch.bool)
        self._ranks = ranks[at[there]].sort().values

    def cold(self, hot: int) -> int:
        """How many of its nodes are not among the first ``hot``."""
        return self.nodes - int(torch.searchsorted(self._ranks, hot))

    def fits(self, layout: Layout) -> bool:
        """Whether it has room by itself."""
        return self.cold(layout.hot) <= layout.cold and self.edges <= layout.edges


def layouts(now: Layout, need: Need, whole: tuple[int, int], keeps_hot: bool, same_slots: bool) -> Iterator[Layout]:
    """Layouts with room for ``need``, better ones first: those that leave what had room before its room, then those
    that leave slots and edges what they were, then any.

    Args:
        whole: nodes and edges of the whole graph. keeps_hot: as many nodes stay. same_slots: there are as many slots.
    """
    tried = [now.hot] if keeps_hot else sorted({now.hot * step // STEPS for step in range(STEPS + 1)}, reverse=True)
    colds = {hot: need.cold(hot) for hot in tried}
    for least in (True, False, None):
        for nodes, edges in ROOMS:
            room = min(math.ceil(edges * need.edges), max(need.edges, whole[1]))
            for hot in tried[:1] if nodes > 2 else tried:
                freed = now.hot - hot
                cold = min(math.ceil(nodes * colds[hot]), max(colds[hot], whole[0] - hot))
                if same_slots:
                    if cold <= now.cold + freed:
                        yield Layout(hot, now.cold + freed, max(room, now.edges))
                elif least is None:
                    yield Layout(hot, max(1, cold), room)
                else:
                    yield Layout(hot, max(cold, now.cold + freed * least), max(room, now.edges))
