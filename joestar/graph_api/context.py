"""What a sampling program draws from: the random key, the numbering of its call sites, and the sizes of its sets."""

import torch
from torch import Tensor

from joestar.errors import CaptureError

FIRST_STAGE_SITE = 1 << 24
"""Number of a first stage's first call site: its draws are independent of those of any step (whose sites count from 0,
dropout's from ``1 << 20``), but for draws by weight, which steps over macro-batches repeat (``Columns._drawn_by``)."""
EXACT = -1
"""Asks an op to allocate exactly what it needs (eager execution only)."""


class SamplingContext:
    """State of one run of a sampling program.

    Every call that makes a set of data-dependent size takes the next *size* of the context, in program order. Without
    ``sizes`` the op finds the size itself (structure-only sampling) and ``recorded`` keeps what it found; with them,
    they are the bounds of the result: symbolic integers while the program is traced.

    Args:
        key: int64 ``[3]`` = (seed, epoch, step) on the graph's device.
        sizes: one integer (or symbolic integer) per set, or ``None``.

    Attributes:
        by_rank: whether edges draw by their positions in the rows of the graph where a slice has a part of these.
        races: whether draws without weights are races, too, of equal ones: for steps that repeat them.
        takes_parts: whether a draw from a part of rows takes all of it: of a mini-batch, which has other sources,
            others of these edges may win.
        pushed: (layer, rows of the table, values) of hidden rows that a model wants kept (``graph_api.history``).
    """

    by_rank = races = takes_parts = False

    def __init__(self, key: Tensor, sizes=None):
        self.key = key
        self.sizes = sizes
        self.site = 0
        self.position = 0
        self.recorded = []
        self.labels = []
        self.pushed = []

    def next_site(self) -> int:
        """Number of this random call site: two sites draw independently."""
        site = self.site
        self.site = site + 1
        return site

    def next_size(self, label: str):
        """Bound of the next set, or ``EXACT``.

        Raises:
            CaptureError: while traced, without sizes: the set is not one of the step's.
        """
        position = self.position
        self.position = position + 1
        self.labels.append(label)
        if self.sizes is None:
            if torch.compiler.is_compiling():
                raise CaptureError(
                    "a graph is sampled here that has neither the key nor the sizes of the step. Draw from the graph "
                    "that sample(graph, seeds) is given, not from self.graph; from another graph as "
                    "other.with_context(graph.context)."
                )
            return EXACT
        if position >= len(self.sizes):
            raise IndexError(
                "a set of edges or nodes is made where its size was not measured: in a model's forward or a loss, or "
                "in a sample() that makes more sets in some batches than in others"
            )
        return self.sizes[position]

    def record(self, size) -> None:
        """Notes the size of the set just made (only when the context has no sizes of its own)."""
        if self.sizes is None:
            self.recorded.append(size)

    def note_draw(self, kind: str, columns) -> None:
        """Called where fewer than all edges of a node are taken, for contexts that look at draws; ``kind``: what is
        drawn, "edges", "edges by weight" or "nodes", or that "some edges" are taken, all those of a slice."""

    def note(self, block, drawn: bool) -> None:
        """Called with every block that a sampling call makes, for contexts that keep them; ``drawn``: of picks, not of
        every edge of a slice."""
