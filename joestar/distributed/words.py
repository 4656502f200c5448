"""What ranks of one host tell one another in memory that all of them map: whether a step fits.

Devices could sum the words (``runtime.verdict``): steps of two GPUs took longer then.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from joestar import host
from joestar.distributed.group import Group
from joestar.distributed.peer_memory import shared_pages

_APART = 8
"""Words between those of two ranks: a line of the cache for each."""
_SLICE = 200
"""Microseconds of waiting after which the other ranks are looked after."""
_LOOKS = 32
"""Times of that behind which the host sleeps in between."""


class HostWords:
    """One word per rank and step, in turns: all ranks say theirs, and hear all.

    A rank may have said its next word while another still waits for this one, but not the one behind it: two places per
    rank suffice. A word is its number and what it says, 8 bytes that are written at once.

    Args:
        words: int64 ``[2 * world * 8]``, zeros, which all ranks map. rank, world: of this process.
    """

    def __init__(self, words: Tensor, rank: int, world: int):
        self._memory, self.rank, self.world = words, rank, world
        self._words = memoryview(words.numpy())
        self.number = 0

    @classmethod
    def of(cls, group: Group) -> "HostWords":
        """Made by all ranks together, which are on one host.

        Raises:
            DistributedError: on all ranks, where the system does not give or share memory.
        """
        size = 2 * group.world * _APART
        shapes = [(size,) if rank == 0 else None for rank in range(group.world)]
        (words,) = shared_pages(group, shapes, torch.int64, "words of ranks")
        return cls(words, group.rank, group.world)

    def all(self, own: bool, watch: Callable[[], None]) -> bool:
        """Whether all ranks say so of the step whose turn it is; waits for them.

        Args:
            watch: called now and then meanwhile; raises where waiting is in vain.
        """
        self.number += 1
        words, first = self._words, (self.number & 1) * self.world
        words[(first + self.rank) * _APART] = self.number << 1 | own
        start, looks = self._memory.data_ptr() + 8 * first * _APART, 0
        while not host.await_words(start, _APART, self.world, ~1, self.number << 1, _SLICE):
            looks += 1
            watch()
            if looks > _LOOKS:
                time.sleep(_SLICE * 1e-6)
        return all(words[(first + rank) * _APART] & 1 for rank in range(self.world))
