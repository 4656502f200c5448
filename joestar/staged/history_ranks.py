"""The ranks that keep one history of hidden rows: tables in pages that those of a host share, where ranks wait for each
other, and what goes from host to host.

``stages.exchange`` says when. Threads that load wait here, too: not in the meetings of the job, which are for the
thread of the steps, but at counters of their own in its store.
"""

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.all_to_all import AllToAll
from joestar.distributed.board import START_SECONDS, pauses
from joestar.distributed.peer_memory import shared_pages
from joestar.errors import DistributedError, StageError

ALL, STOPPED = b"all", b"stopped"
"""What comes of a meeting."""
_NUMBERS = itertools.count()
"""Of the histories of this process: the same on all ranks, which compile the same steps."""


class HistoryRanks:
    """All ranks of a group.

    Attributes:
        rank, world: of the group; host: number of this process's host, that of rank 0 being 0. ranks_of: of every host.
        swap: what they exchange over hosts (``AllToAll``); ``None`` on one.
    """

    def __init__(self, group: Group):
        self.group, self.rank, self.world = group, group.rank, group.world
        names = list(dict.fromkeys(group.hosts))
        self.host = names.index(group.host)
        self.ranks_of = [[rank for rank in range(self.world) if group.hosts[rank] == name] for name in names]
        self._name = f"history/{next(_NUMBERS)}"
        self._store = group.board.store.clone()  # which a thread may wait for without the others
        self._last = ""
        self.swap = AllToAll(group, "hidden rows of other hosts") if len(names) > 1 else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that all ranks of a host share, of a shape of its own; all call it in the same order.

        Raises:
            DistributedError: on all ranks, where the system does not give or share memory.
        """
        first = self.ranks_of[self.host][0]
        shapes = [tuple(shape) if rank == first else None for rank in range(self.world)]
        (pages,) = shared_pages(self.group, shapes, dtype, "historical embeddings")
        return pages

    def meet(self, where: str, stopped: Callable[[], bool]) -> None:
        """Waits until all ranks have come there: a first stage may take its time, half an hour at most.

        What is said first counts for all: that the last one has come, or that one has stopped waiting.

        Raises:
            DistributedError: the job has failed, or a rank does not come. StageError: once ``stopped()``, unless all
                have come.
        """
        key, waits = f"{self._name}/{where}", pauses()
        latest = time.monotonic() + START_SECONDS + self.group.timeout
        if self._store.add(key, 1) == self.world:
            self._said(key, ALL)
        while not (self._store.check([f"{key}/said"]) and self._store.get(f"{key}/said") == ALL):
            if stopped() and self._said(key, STOPPED) == STOPPED:
                raise StageError("historical embeddings are not waited for any more.")
            self.group.board.look(self._store)
            self.group.check()
            if time.monotonic() > latest:
                raise self._missed(where, int(self._store.add(key, 0)))
            time.sleep(next(waits))
        if self.rank == 0 and self._last:  # all are here, so that nobody waits at the one before
            self._store.delete_key(self._last)
            self._store.delete_key(f"{self._last}/said")
        self._last = key

    def _said(self, key: str, word: bytes) -> bytes:
        """What was said first of a meeting."""
        return self._store.compare_set(f"{key}/said", "", word.decode())

    def _missed(self, where: str, came: int) -> DistributedError:
        return DistributedError(
            f"{came} of {self.world} ranks came to macro-batch {where} of the historical embeddings within "
            f"{START_SECONDS + self.group.timeout:g} s, where rank {self.rank} waits for the others; last heard of: "
            f"{self.group.board.places() or 'nothing'}. Every rank must make the same calls of the step; if the first "
            "stage of one only takes longer: smaller macro-batches, or joestar.distributed.init(timeout=...)."
        )

    def any(self, what: str, own: bool) -> bool:
        """Whether it is so on any rank; in the thread of the steps."""
        return bool(self.group.largest(what, [own])[0])

    def joined(self, what: str, own: list[dict]) -> list[dict]:
        """The entries of all ranks, in their order, on each of them: numbers, lists and tensors. Over several hosts on
        rank 0; none on the others."""
        written = io.BytesIO()
        torch.save(own, written)
        if self.swap is not None:
            return self._at_first(written)
        sizes = [each["size"] for each in self.group.exchange(what, {"size": written.tell()})]
        pages = shared_pages(self.group, [(size,) for size in sizes], torch.uint8, what)
        pages[self.rank].copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
        self.group.exchange(f"{what}, written")
        found = [torch.load(io.BytesIO(page.numpy().tobytes()), weights_only=True) for page in pages]
        return [entry for entries in found for entry in entries]

    def _at_first(self, written: io.BytesIO) -> list[dict]:
        """As ``joined``."""
        sent = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
        with self.all_or_none():
            found = self.swap([[sent] if rank == 0 else [] for rank in range(self.world)])
        parts = [torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True) for got in found for part in got]
        return [entry for entries in parts for entry in entries]

    def all_or_none(self) -> contextlib.AbstractContextManager:
        """See ``AllToAll.all_or_none``."""
        return self.swap.all_or_none()

    def largest(self, number: int) -> int:
        """See ``AllToAll.largest``."""
        return self.swap.largest(number)
