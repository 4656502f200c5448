"""Tables that kernels of one call leave for those of the next: who shares them.

Calls that share a table must run one after the other. Ops that are launched one by one share the tables of their thread
and stream; what is captured in a CUDA graph may be replayed on any stream, beside anything, and has tables of its own
(``own_tables``), which live and go with the graph: 4 bytes per node of the graph that is sampled.
"""

import contextlib
import threading
from collections import ChainMap
from collections.abc import Iterator, MutableMapping

import torch

Tables = MutableMapping

_LOCAL = threading.local()


@contextlib.contextmanager
def own_tables(tables: Tables) -> Iterator[None]:
    """This thread's kernels use ``tables``, a dict that the caller keeps, within."""
    before = getattr(_LOCAL, "own", None)
    _LOCAL.own = tables
    try:
        yield
    finally:
        _LOCAL.own = before


def current_tables(device: torch.device) -> Tables:
    """The tables that a launch on a device uses now."""
    own = getattr(_LOCAL, "own", None)
    if own is not None:
        return own
    shared = _LOCAL.__dict__.setdefault("shared", {})
    if device.type != "cuda":
        return shared.setdefault((device, 0), {})
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():  # by hand: it uses what launches on any stream have left
        others = (tables for (place, _), tables in shared.items() if place == device)
        return ChainMap(shared.get((device, stream), {}), *others)
    return shared.setdefault((device, stream), {})


def release_tables() -> None:
    """Frees this thread's tables that belong to no CUDA graph of ours."""
    _LOCAL.__dict__.pop("shared", None)
