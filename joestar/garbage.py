"""Python's collector of garbage, while much is made that stays: modules, graphs, tables of a compiler."""

import contextlib
import gc
import os
import threading

PATIENT = (200_000, 10, 1_000)
"""Thresholds within: what is young is searched seldom, the whole heap practically never."""


class FewerCollections(contextlib.ContextDecorator):
    """Within, a growing heap is not searched for garbage over and over: a sixth of a small step's start.

    One for the process: blocks may be nested and run in several threads, and the last to end restores the thresholds. A
    collector that is switched off, or that is set to something else within, is left alone.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
        self._before = PATIENT
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Other threads, which may be within, do not exist in a child."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            self._restore()

    def _restore(self) -> None:
        if gc.get_threshold() == PATIENT:
            gc.set_threshold(*self._before)

    def __enter__(self) -> "FewerCollections":
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < PATIENT[0]:
                    gc.set_threshold(*PATIENT)
        return self

    def __exit__(self, *args) -> None:
        with self._lock:
            self._inside = max(self._inside - 1, 0)
            if self._inside == 0:
                self._restore()


fewer_collections = FewerCollections()


class Collections:
    """In front of recording a CUDA graph: what only cycles hold gives its memory on the device back.

    The first of a process throws nothing of ours away that is old, and a search of the whole heap, with the modules of
    a compiler, takes a third of a second: only what is young is searched then.
    """

    def __init__(self):
        self.whole = False

    def collect(self) -> None:
        """Searches."""
        gc.collect(2 if self.whole else 1)
        self.whole = True


before_recording = Collections()
