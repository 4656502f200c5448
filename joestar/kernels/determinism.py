"""Whether sums must run in the same order in every run and every process.

Two things change the order: additions by whichever thread comes first (atomic additions, lists linked by atomic
exchange), and launch settings that timing chose (rows per program, programs per sum). With ``deterministic()``, or
under ``torch.use_deterministic_algorithms(True)``, gradients of gathers go by way of edges sorted by source, and every
kernel takes its first settings, whatever is remembered on disk.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

_LOCK = threading.Lock()
_entered = 0  # for the process: backward passes run in autograd's threads


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """The order of every sum in our kernels is fixed within, in all threads; without effect unless ``wanted``."""
    global _entered
    with _LOCK:
        _entered += wanted
    try:
        yield
    finally:
        with _LOCK:
            _entered -= wanted


def is_deterministic() -> bool:
    """Whether the order of sums is fixed now."""
    return _entered > 0 or torch.are_deterministic_algorithms_enabled()
