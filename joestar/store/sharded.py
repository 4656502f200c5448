"""Features over the memories of several GPUs of one host: every rank keeps a part, and all read all parts in place.

Rows belong to ranks in stripes of ``STRIPE``: ids that are in the order of time or degree still load all links alike,
and a rank that loads its part from a file reads whole pages. Rows that batches need most often are on every GPU.
"""

import math

import torch
from torch import Tensor

from joestar.distributed.peer_memory import PeerMemory
from joestar.errors import ConfigError, DistributedError
from joestar.graph_api.row_source import RowSource
from joestar.store.features import slot_table
from joestar.store.hot import checked_hot, choose_hot
from joestar.store.pinned import COPY_BYTES

STRIPE = 64
"""Rows in a row that belong to one rank."""


class Sharded(RowSource):
    """Rows of node features of which every rank of the job holds a part; ``joestar.store.shard`` makes it.

    ``graph.ndata["x"]`` is then a tensor without memory (``meta``): only a compiled step, ``evaluate``, ``predict`` and
    ``joestar.inference`` read features, by ``gather_shards``. The numbers are those of ``x[ids]``.

    Args:
        memory: a piece per rank, all filled; shape, dtype: of the whole table. device: of this rank.

    Attributes:
        hot: int64 ids of the rows that this device holds as well, ascending; ``None`` so far.
        wants: bytes for hot rows that ``joestar.compile`` chooses; 0 if there is nothing to choose.
    """

    def __init__(self, memory: PeerMemory, shape: torch.Size, dtype: torch.dtype, device: torch.device, wants: int = 0):
        self.memory, self.device, self.wants = memory, device, wants
        self.table = torch.empty(shape, dtype=dtype, device="meta")
        self.shards = list(memory.pieces)
        self.hot: Tensor | None = None
        self.pointers = self._addresses()

    def _addresses(self) -> Tensor:
        """Where the shards and the hot rows are, for the kernel."""
        found = [shard.data_ptr() for shard in self.shards] + [0 if self.cache is None else self.cache.data_ptr()]
        with torch.inference_mode(False):
            return torch.tensor(found, dtype=torch.int64, device="cpu").to(self.device)

    @torch.inference_mode(False)
    def keep(self, hot: Tensor) -> None:
        """Copies these rows to this device, from their owners; before anything is compiled.

        Args:
            hot: different ids ``[H]``; ranks may keep different ones.
        """
        hot = checked_hot(hot, self.table.shape[0]).to(self.device)
        cache = torch.empty((hot.numel(), *self.table.shape[1:]), dtype=self.table.dtype, device=self.device)
        step = max(1, COPY_BYTES // max(1, self.row_bytes))
        for first in range(0, hot.numel(), step):
            part = hot[first : first + step]
            cache[first : first + step] = _gather(self.shards, self.pointers, STRIPE, None, None, part)
        self.hot, self.cache, self.slot_of, self.wants = hot, cache, slot_table(hot, self.table.shape[0]), 0
        self.pointers = self._addresses()

    def rows(self, ids: Tensor) -> Tensor:
        """``x[ids]`` on this device, ``[n, ...]``.

        Raises:
            DistributedError: behind ``joestar.distributed.shutdown``.
        """
        self.refresh()
        return _gather(self.shards, self.pointers, STRIPE, self.cache, self.slot_of, ids)

    def refresh(self) -> None:
        """Raises ``DistributedError`` if the memory was given back. Rows are never written again: nothing to renew."""
        if len(self.shards) == 0:
            raise DistributedError(
                "these features were in the memories of the job's ranks: joestar.distributed.shutdown() gave it back."
            )

    def close(self) -> None:
        """Gives the memory back: nothing can be gathered afterwards."""
        self.shards = []
        self.cache = self.slot_of = None
        self.memory.close()

    @property
    def device_bytes(self) -> int:
        """Bytes of this device: its shard, hot rows and their table."""
        held = [t for t in (self.memory.own, self.cache, self.slot_of) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    def to(self, device) -> "Sharded":
        """Itself, for the device that it is for.

        Raises:
            ConfigError: for another one.
        """
        device = torch.device(device)
        if device.type != self.device.type or device.index not in (None, self.device.index):
            raise ConfigError(
                f"features sharded over ranks are read by {self.device} here, not by {device}: move the graph there."
            )
        return self

    def __deepcopy__(self, memo) -> "Sharded":
        return self  # nobody writes to it

    def __reduce__(self):
        raise ConfigError("features sharded over ranks cannot be saved or sent: save what they were made from.")

    def __repr__(self) -> str:
        hot = "" if self.hot is None else f", {self.hot.numel():,} rows hot"
        return f"Sharded({self.dtype} {list(self.shape)} over {len(self.memory.pieces)} ranks{hot})"


def _gather(*arguments) -> Tensor:
    return torch.ops.joestar.gather_shards(*arguments)


def shard_rows(num_rows: int, world: int) -> int:
    """Rows of every rank's part: whole stripes, as many for all."""
    stripes = -(-num_rows // STRIPE)
    return -(-stripes // world) * STRIPE


def fill_shard(source, shard: Tensor, rank: int, world: int, piece_bytes: int = COPY_BYTES) -> None:
    """Copies a rank's stripes of ``source`` ``[N, ...]``, some at a time, also from a mapped file; converts."""
    rest, whole = tuple(source.shape[1:]), source.shape[0] // STRIPE
    own = range(rank, whole, world)
    stripe_bytes = STRIPE * max(1, math.prod(rest) * source.dtype.itemsize)
    step = max(1, piece_bytes // stripe_bytes)
    for first in range(0, len(own), step):
        part = own[first : first + step]
        rows = source[part[0] * STRIPE : (part[-1] + 1) * STRIPE].reshape(-1, STRIPE, *rest)[::world]
        shard[first * STRIPE : (first + len(part)) * STRIPE].view(-1, STRIPE, *rest).copy_(rows)
    left = source.shape[0] - whole * STRIPE
    if left and whole % world == rank:
        place = whole // world * STRIPE
        shard[place : place + left].copy_(source[whole * STRIPE :])


def keep_hottest(source, score: Tensor) -> None:
    """Keeps on the device as many rows as fit into what a source ``wants``, the table of slots included.

    Args:
        score: how often rows are needed, numbers ``[N]`` (``hotness``).
    """
    room = source.wants - 4 * source.shape[0]
    count = min(source.shape[0], max(0, room) // max(1, source.row_bytes))
    source.wants = 0
    if count:
        source.keep(choose_hot(score.cpu(), count))  # a GPU has no deterministic way to find the count-th largest
