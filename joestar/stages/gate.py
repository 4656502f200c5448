"""Whose turn it is to be loaded into an arena."""

import threading
import time

from joestar.errors import StageError
from joestar.interrupts import Whole
from joestar.stages.arena import Arena
from joestar.stages.loaded import Loaded, Prepared
from joestar.stages.macro import MacroBatch, Picked


class Gate:
    """Lets one macro-batch at a time be loaded beside the one in use; closing it wakes whoever waits, and whoever is
    late finds it closed.

    A ``Condition`` is left by Python code, in front of which an interrupt would leave it locked: signals wait.

    Attributes:
        waited: seconds that loading has waited here.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._free = 1
        self._closed = False
        self.waited = 0.0

    def enter(self) -> None:
        """Waits until nothing is loaded beside the macro-batch in use; for threads, which no signal reaches.

        Raises:
            StageError: if the gate is closed.
        """
        start = time.perf_counter()
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()
            self.waited += time.perf_counter() - start
            self._check_open()
            self._free -= 1

    def prepare(self, arena: Arena, macro: MacroBatch | Picked, key: tuple[int, int, int]) -> Prepared | None:
        """``arena.prepare``, unless the gate was closed: a thread that is late must not take slots.

        Raises:
            StageError: if the gate is closed.
        """
        with arena.preparing:
            self._check_open()
            return arena.prepare(macro, key)

    def take(self, arena: Arena, made: Prepared) -> bool:
        """``arena.take``, unless the gate was closed.

        Raises:
            StageError: if the gate is closed.
        """
        with arena.loading:
            self._check_open()
            return arena.take(made)

    def pass_through(self, arena: Arena, made: Prepared) -> Loaded | None:
        """``arena.load``, unless the gate was closed: a thread that is late must not write what is in use by then.

        Raises:
            StageError: if the gate is closed.
        """
        with arena.loading:
            self._check_open()
            return arena.load(made, self.is_closed)

    def _check_open(self) -> None:
        if self._closed:
            raise StageError("the arena's gate was closed.")

    def leave(self) -> None:
        """What was loaded is in use: the next may be loaded beside it."""
        with Whole(), self._changed:
            self._free += 1
            self._changed.notify_all()

    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Nobody enters any more."""
        with Whole(), self._changed:
            self._closed = True
            self._changed.notify_all()
