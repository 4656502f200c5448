"""How the host learns whether a step fitted while the step is still under way.

The kernel of a captured step that compares true sizes with bounds, right behind the sampling, writes both to pinned
host memory. The host reads them there: it knows that the step happens, and that the loss which it hands out is final,
hundreds of microseconds before the step ends, so that the device never waits for the next launch.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from joestar import host
from joestar.ops.step.launches import TAG_BITS, opened_mailbox

_TAG = (1 << TAG_BITS) - 1
_SLICE = 200
"""Microseconds of waiting after which whatever else may have happened is looked at."""
_LOOKS = 32
"""Times of that between two questions to the device; behind the first ones, the host sleeps in between."""
_PATIENCE = 10.0
"""Seconds after which a message that did not come from an idle device is an error."""


class Mailbox:
    """One message at a time: a step posts it, ``wait`` returns it.

    Every word of a message carries the message's number, so that half of a new one is never taken for the whole.

    Args:
        device: where steps run; sets: sizes per message.
        watch: called now and then while the host waits; raises where waiting is in vain. ``None`` for nothing.
    """

    def __init__(self, device: torch.device, sets: int, watch: Callable[[], None] | None = None):
        self.device = device
        self.watch = watch
        self._pinned = torch.zeros(sets + 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._words = memoryview(self._pinned.numpy())
        self.sequence = torch.zeros((), dtype=torch.int64, device=device)
        self.number = 0

    def open(self) -> AbstractContextManager:
        """A program that runs within posts its message."""
        return opened_mailbox(self.sequence, self._pinned)

    def start(self) -> None:
        """Forgets messages that nobody waited for (those of a warm-up)."""
        self.sequence.fill_(self.number)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for index in range(len(self._words)):
            self._words[index] = 0 if self.number & _TAG else _TAG

    def wait(self) -> tuple[bool, list[int]]:
        """(whether the step fitted, true sizes) of the step that was launched last, as soon as they are known.

        Raises:
            RuntimeError: what went wrong on the device, instead of waiting for ever.
        """
        self.number += 1
        tag, words, looks = self.number & _TAG, self._words, 0
        while not host.await_words(self._pinned.data_ptr(), 1, len(words), _TAG, tag, _SLICE):
            looks += 1
            self._look(looks)
        ok, *counts = (word >> TAG_BITS for word in words)
        return bool(ok), counts

    def _look(self, looks: int) -> None:
        """What waiting may be in vain for; now and then asks the device whether it is still at work."""
        if self.watch is not None:
            self.watch()
        if looks == 1:
            self._deadline = time.perf_counter() + _PATIENCE
        if looks > _LOOKS:
            time.sleep(_SLICE * 1e-6)
        idle = looks % _LOOKS == 0 and torch.cuda.current_stream(self.device).query()
        if idle and time.perf_counter() > self._deadline:
            raise RuntimeError(
                "a step ended without a word: expected its sizes in host memory. Please report this; "
                "joestar.compile(cuda_graph=False) goes without."
            )
