"""A whole step as one CUDA graph (thesis 5.3.4, kernel invocation grouping)."""

import time
from collections.abc import Callable

import torch

from joestar.garbage import before_recording
from joestar.locks import CAPTURING, RECORDING, synchronize
from joestar.ops.scratch import own_tables
from joestar.ops.step.side_by_side import forking
from joestar.runtime.graph_nodes import make_ready, new_graph
from joestar.streams import between, own_stream

_FIRST = -1
"""Priority of a stream whose kernels come before others; kernels of a graph have that of the stream they are recorded
on."""
WARM_UP = 3
"""Runs before the capture: kernels are compiled and tuned, workspaces allocated, libraries initialised."""


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device."""
    return own_stream("captures", device)


class StreamOrder:
    """Launches on whatever stream the user has made the current one, each behind the one before."""

    def __init__(self, device: torch.device):
        self.device = device
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Makes the current stream wait for the one of the last call, if that was another. Call it before launches."""
        now = torch.cuda.current_stream(self.device)
        last, self._last = self._last, now
        if last is not None and last != now:
            now.wait_stream(last)


class GraphMemory:
    """What graphs share that are never replayed at the same time and need nothing that an earlier replay left there.

    Memory that is free at the end of one capture serves the next one; only blocks of the same stream do.
    """

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()
        self.tables: dict = {}


class StepGraph:
    """``step`` captured on a stream of its own; ``replay`` launches it with one call.

    Args:
        step: takes no arguments, reads and writes tensors with fixed addresses, never waits for the device. It is run
            ``WARM_UP`` times first, and must change nothing then (the overflow flag is set).
        device: the GPU. memory: shared with other graphs, or ``None``.
        beside: it is replayed while another graph runs, on another stream: it is captured on a stream of its own, for
            which libraries have workspaces of their own, and forks no other one. ahead: and its kernels come first,
            where those of both wait for the device.

    Attributes:
        overlapped: the programs on two streams that are part of the step.
    """

    def __init__(
        self, step: Callable[[], None], device: torch.device, memory: "GraphMemory | None" = None, beside: bool = False,
        ahead: bool = False,
    ):  # fmt: skip
        start = time.perf_counter()
        self.device = device
        self.order = StreamOrder(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.overlapped: list = []
        self._tables = {} if memory is None else memory.tables
        try:
            with CAPTURING, own_tables(self._tables):
                if ahead:
                    self._capture(step, own_stream("captures ahead", device, _FIRST), memory)
                elif beside:
                    self._capture(step, own_stream("captures beside", device), memory)
                else:
                    stream = capture_stream(device)
                    with forking(stream) as self.overlapped:
                        self._capture(step, stream, memory)
        except BaseException:  # out of memory, or interrupted
            self.free()
            raise
        self.seconds = time.perf_counter() - start

    def _capture(self, step: Callable[[], None], stream: torch.cuda.Stream, memory: "GraphMemory | None") -> None:
        device = self.device
        pool = None if memory is None else memory.pool
        with between(stream, device):
            for _ in range(WARM_UP):
                step()
        synchronize(device)
        before_recording.collect()
        self.graph = new_graph()
        recorded = torch.cuda.graph(self.graph, pool, stream=stream, capture_error_mode="thread_local")
        with RECORDING, recorded:
            step()
        make_ready(self.graph, stream)

    def replay(self) -> None:
        """Launches the step on the current stream, behind what it was launched on before."""
        self.order.follow()
        self.graph.replay()

    def free(self) -> None:
        """Gives the graph's memory back."""
        if self.graph is not None:
            synchronize(self.device)  # it may still run
            self.graph.reset()
        self._tables = {}
        torch.cuda.empty_cache()
