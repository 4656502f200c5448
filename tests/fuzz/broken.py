"""Interrupts and the end of the process at any line of some files."""

import collections
import contextlib
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import joestar
from joestar import interrupts

LINES = tuple(str(Path(joestar.__file__).parent / name) for name in ("runtime", "interrupts.py"))
LOOP = {"fit", "epochs", "runner", "recorded", "undone", "interrupts", "update", "checkpoint", "state", "optimizer"}
Place = tuple[str, int, int]
"""File, line, and how often it was reached before."""


class Killed(BaseException):
    """The process is gone: nothing handles it."""


@contextlib.contextmanager
def _traced(seen) -> Iterator[None]:
    def lines(frame, event, _):
        if event == "line":
            seen(frame.f_code.co_filename, frame.f_lineno)
        return lines

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: lines if frame.f_code.co_filename.startswith(LINES) else None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter]:
    """How often each (file, line) of ``joestar/runtime``, and of what makes steps whole, is reached within."""
    found = collections.Counter()
    with _traced(lambda *line: found.update([line])):
        yield found


def drawn(counts: collections.Counter, rng: random.Random) -> Place:
    """Any line that was reached, whether often or once; mostly of the files that carry out steps and keep books."""
    lines = sorted(counts.items())
    inner = [line for line in lines if Path(line[0][0]).stem in LOOP]
    (file, line), times = rng.choice(inner if inner and rng.random() < 0.7 else lines)
    return file, line, rng.randrange(times)


@contextlib.contextmanager
def broken_at(place: Place, kill: bool) -> Iterator[list[bool]]:
    """Ctrl-C, or the end, at a place; ``[True]`` once it came."""
    file, line, left = place
    came = [False]

    def seen(*where):
        nonlocal left
        if where != (file, line) or came[0]:
            return
        left -= 1
        if left >= 0:
            return
        came[0] = True
        if kill:
            raise Killed
        signal.raise_signal(signal.SIGINT)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _traced(seen):
            yield came
    finally:
        if kill:  # the next process has its own
            interrupts.Whole._active = False
            for number, handler in handlers.items():
                signal.signal(number, handler)
