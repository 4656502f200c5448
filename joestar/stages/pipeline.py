"""Items made ahead of their use, in order, by stages that work at the same time: a thread for each stage."""

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from joestar.errors import ConfigError, StageError
from joestar.interrupts import Whole
from joestar.whole_numbers import plain

EXIT_SECONDS = 10.0
"""Longest wait, when the interpreter exits, for a stage to end what it is at."""


SIGNAL_SECONDS = 0.25
"""Longest uninterrupted wait of a thread: Ctrl-C in the instant before a wait begins does not end it, and Python acts
on it only when the wait is over."""


class Pipeline(Iterator):
    """Iterator over ``last(... first(make(i)))`` for ``i`` from ``start`` to ``count - 1``, in that order.

    ``make`` and every stage run in a thread of their own, each on one item at a time; between two of them, and before
    the consumer, at most ``depth`` items wait. So at most ``(depth + 1) * (len(stages) + 1)`` items are alive, plus the
    consumer's own.

    What a stage raises is raised in the consumer as the cause of a ``StageError`` that names the stage and the item,
    after all items before that one; then everything ends. ``close()``, leaving a ``with`` block, dropping the last
    reference and the end of the process end the threads as soon as their stages return, full queues or not. To go on
    later, make another one with ``start=pipeline.position``.

    Threads do not follow into a forked process: there, asking for items is a ``StageError``.

    Args:
        make: makes item ``i`` of its number.
        count: how many items there are.
        stages: each turns an item into another.
        depth: items that may wait before the next stage, at least 1.
        start: number of the first item.
        wake: called when everything ends, from any thread: wakes a stage that waits for something of its own.

    Attributes:
        position: number of the next item.
    """

    def __init__(self, make: Callable, count: int, *stages: Callable, depth: int = 1, start: int = 0,
                 wake: Callable[[], None] | None = None):  # fmt: skip
        count, depth, start = plain([count, depth, start])
        for name, value, least in (("count", count, 0), ("depth", depth, 1), ("start", start, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Pipeline: {name} must be an integer of at least {least}; got {value!r}.")
        if start > count:
            raise ConfigError(f"Pipeline: start={start} lies behind the last of {count} items.")
        for stage in (make, *stages):
            if not callable(stage):
                raise ConfigError(f"Pipeline: stages are functions of one argument; got {type(stage).__name__}.")
        self.count = count
        self.position = start
        self._state = _State((make, *stages), depth, wake)
        weakref.finalize(self, _State.end, self._state).atexit = False
        self._state.begin(range(start, count))

    def __iter__(self) -> "Pipeline":
        return self

    def __next__(self):
        if self.position >= self.count:
            self.close()
            raise StopIteration
        self._state.check_process()
        try:
            item = self._state.take(len(self._state.queues) - 1)
            if isinstance(item, _Failure):
                raise item.error()
            self.position += 1
            return item
        except _EndedError:
            raise StageError(
                f"the pipeline was closed before item {self.position} of {self.count}: make another with "
                f"start={self.position} to go on."
            ) from None
        except BaseException:
            self.close()  # an item that was taken and not handed out would be missing, without a word
            raise

    def __len__(self) -> int:
        return self.count - self.position

    def close(self) -> None:
        """Ends the threads, and waits until they have; items that were not handed out are dropped."""
        self._state.end()
        self._state.join()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def seconds(self) -> dict[str, float]:
        """Time that every stage has worked so far, waiting left out, by its name; behind the last, ``"consumer"``: how
        long the consumer waited."""
        return dict(zip([*self._state.names, "consumer"], self._state.seconds, strict=True))


class _EndedError(Exception):
    """The pipeline has been closed."""


class _Failure:
    """Travels in the place of an item that could not be made."""

    def __init__(self, name: str, number: int, cause: BaseException):
        self.name, self.number, self.cause = name, number, cause

    def error(self) -> StageError:
        error = StageError(f"{self.name} failed at item {self.number}: {type(self.cause).__name__}: {self.cause}")
        error.__cause__ = self.cause
        return error


class _State:
    """What the threads share. They hold no reference to the ``Pipeline``, so that dropping it ends them.

    The consumer may be the main thread, where an interrupt can come between any two lines of Python, also those of
    ``Condition`` and ``Thread``: signals wait wherever that would leave a lock held, but in no wait for an item.
    """

    def __init__(self, functions: tuple[Callable, ...], depth: int, wake: Callable[[], None] | None = None):
        self.functions = functions
        self.wake = wake
        self.names = _names(functions)
        self.depth = depth
        self.queues: list[deque] = [deque() for _ in functions]
        self.news = [threading.Lock() for _ in functions]  # free when there is something to look at
        self.changed = threading.Condition()  # of an RLock: garbage collection may end() while it is held
        self.ended = False
        self.process = os.getpid()
        self.seconds = [0.0] * (len(functions) + 1)
        self.threads: list[threading.Thread] = []

    def begin(self, numbers: range) -> None:
        for stage, name in enumerate(self.names):
            thread = threading.Thread(target=self._work, args=(stage, numbers), name=f"joestar {name}", daemon=True)
            self.threads.append(thread)
        try:
            with Whole():
                _RUNNING.add(self)
                for thread in self.threads:
                    thread.start()
        except BaseException:
            self.end()
            raise

    def _work(self, stage: int, numbers: range) -> None:
        number = numbers.start
        try:
            for number in numbers:
                item = number if stage == 0 else self.take(stage - 1)
                made = item if isinstance(item, _Failure) else self._made(stage, number, item)
                del item
                self._put(stage, made)
                if isinstance(made, _Failure):
                    return
                del made
        except _EndedError:
            pass
        except BaseException as error:  # outside of the stage: an exception that another thread set, no memory left
            with self.changed:  # whatever waits already
                self.queues[stage].append(_Failure(self.names[stage], number, error))
                self._tell(stage)

    def _made(self, stage: int, number: int, item):
        before = time.perf_counter()
        try:
            return self.functions[stage](item)
        except BaseException as error:
            return _Failure(self.names[stage], number, error)
        finally:
            self.seconds[stage] += time.perf_counter() - before

    def take(self, queue: int):
        """The next item of a queue; ``_EndedError`` if the pipeline is closed."""
        before = time.perf_counter()
        while not (found := self._found(queue)):
            self.news[queue].acquire(timeout=SIGNAL_SECONDS)
        if queue == len(self.queues) - 1:
            self.seconds[-1] += time.perf_counter() - before
        return found.pop()

    def _found(self, queue: int) -> list:
        """The next item of a queue, taken out of it, if there is one."""
        items = self.queues[queue]
        with Whole(), self.changed:
            if self.ended:
                raise _EndedError
            found = [items.popleft()] if items else []
            if found:
                self.changed.notify_all()
            return found

    def _tell(self, queue: int) -> None:
        """Who takes from a queue looks there again. Within ``changed``."""
        self.changed.notify_all()
        with contextlib.suppress(RuntimeError):  # it was told already
            self.news[queue].release()

    def _put(self, queue: int, item) -> None:
        items = self.queues[queue]
        with self.changed:
            while len(items) >= self.depth and not self.ended:
                self.changed.wait()
            if self.ended:
                raise _EndedError
            items.append(item)
            self._tell(queue)

    def end(self) -> None:
        """Tells the threads to leave. Called from anywhere, by garbage collection too."""
        if os.getpid() != self.process:
            return  # a forked copy, whose lock may be held for ever
        with Whole():
            with self.changed:
                self.ended = True
                for queue in range(len(self.queues)):
                    self._tell(queue)
                dropped = [item for items in self.queues for item in items]
                for items in self.queues:
                    items.clear()
            if self.wake is not None:
                self.wake()
            _RUNNING.discard(self)
        del dropped  # outside of the lock: items may have finalizers

    def join(self, seconds: float | None = None) -> None:
        """Waits until the threads have left, each at most so long; those that never started are passed over."""
        if os.getpid() != self.process:
            return
        for thread in self.threads:
            if thread is threading.current_thread():
                continue
            until = math.inf if seconds is None else time.monotonic() + seconds
            while thread.is_alive() and time.monotonic() < until:
                thread.join(SIGNAL_SECONDS)

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise StageError(
                f"this pipeline was started in process {self.process}, and its threads are not in this one, "
                f"{os.getpid()}, which was forked from it: make a pipeline after the fork."
            )


_RUNNING: set[_State] = set()


def _end_all() -> None:
    """At exit: threads that still run when the interpreter is torn down may crash it."""
    states = list(_RUNNING)
    for state in states:
        state.end()
    for state in states:
        state.join(EXIT_SECONDS)


atexit.register(_end_all)


def _names(functions: tuple[Callable, ...]) -> list[str]:
    """A name for each stage, no two alike."""
    names: list[str] = []
    for position, function in enumerate(functions):
        name = getattr(function, "__name__", type(function).__name__)
        role = "make" if position == 0 else f"stage {position}"
        names.append(f"{role} ({name})")
    return names
