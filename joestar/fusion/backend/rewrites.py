"""How often passes over the backend's graphs rewrote them, for whoever measures what a pass earns."""

import contextlib
from collections import Counter
from collections.abc import Iterator

_COUNTERS: list[Counter] = []


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Rewrites of the passes that run within, by name: 0 of one that changed nothing, none of one that did not run, as
    where a compiled graph comes from the backend's cache."""
    counter: Counter = Counter()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS.remove(counter)


def note(name: str, made: int) -> None:
    """A pass has run, and rewritten ``made`` places."""
    for counter in _COUNTERS:
        counter[name] += made
