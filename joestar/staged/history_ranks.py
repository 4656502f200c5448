"""The ranks of a host that keep one history of hidden rows: tables in shared pages, and where they wait for each other.

``stages.exchange`` says when. Threads that load wait here, too: not in the meetings of the job, which are for the
thread of the steps, but at counters of their own in its store.
"""

import io
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.board import START_SECONDS, pauses
from joestar.distributed.peer_memory import shared_pages
from joestar.errors import DistributedError, StageError

_NUMBERS = itertools.count()
"""Of the histories of this process: the same on all ranks, which compile the same steps."""


class HistoryRanks:
    """All ranks of a group on one host.

    Attributes:
        rank, world: of the group.
    """

    def __init__(self, group: Group):
        self.group, self.rank, self.world = group, group.rank, group.world
        self._name = f"history/{next(_NUMBERS)}"
        self._store = group.board.store.clone()  # which a thread may wait for without the others
        self._last = ""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that all ranks share; all call it in the same order.

        Raises:
            DistributedError: on all ranks, where the system does not give or share memory.
        """
        (pages,) = shared_pages(self.group, [tuple(shape), *[None] * (self.world - 1)], dtype, "historical embeddings")
        return pages

    def meet(self, where: str, stopped: Callable[[], bool]) -> None:
        """Waits until all ranks have come there: a first stage may take its time, half an hour at most.

        Raises:
            DistributedError: the job has failed, or a rank does not come. StageError: once ``stopped()``.
        """
        key, waits = f"{self._name}/{where}", pauses()
        latest = time.monotonic() + START_SECONDS + self.group.timeout
        self._store.add(key, 1)
        while (came := int(self._store.add(key, 0))) < self.world:
            if stopped():
                raise StageError("historical embeddings are not waited for any more.")
            self.group.board.look(self._store)
            self.group.check()
            if time.monotonic() > latest:
                raise self._missed(where, came)
            time.sleep(next(waits))
        if self.rank == 0 and self._last:  # all are here, so that nobody waits at the one before
            self._store.delete_key(self._last)
        self._last = key

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
        """The entries of all ranks, in their order, on each of them: numbers, lists and tensors."""
        written = io.BytesIO()
        torch.save(own, written)
        sizes = [each["size"] for each in self.group.exchange(what, {"size": written.tell()})]
        pages = shared_pages(self.group, [(size,) for size in sizes], torch.uint8, what)
        pages[self.rank].copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
        self.group.exchange(f"{what}, written")
        found = [torch.load(io.BytesIO(page.numpy().tobytes()), weights_only=True) for page in pages]
        return [entry for entries in found for entry in entries]
