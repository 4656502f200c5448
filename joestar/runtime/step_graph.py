"""A whole step as one CUDA graph (thesis 5.3.4, kernel invocation grouping)."""

import gc
import time
from collections.abc import Callable

import torch

WARM_UP = 3
"""Runs before the capture: kernels are compiled and tuned, workspaces allocated, libraries initialised."""


class StepGraph:
    """``step`` captured on a stream of its own; ``replay`` launches it with one call.

    Args:
        step: takes no arguments, reads and writes tensors with fixed addresses, never waits for the device. It is run
            ``WARM_UP`` times first, and must change nothing then (the overflow flag is set).
        device: the GPU.
    """

    def __init__(self, step: Callable[[], None], device: torch.device):
        start = time.perf_counter()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        gc.collect()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            step()
        self.seconds = time.perf_counter() - start

    def replay(self) -> None:
        """Launches the step."""
        self.graph.replay()

    def free(self) -> None:
        """Gives the graph's memory back."""
        self.graph.reset()
        torch.cuda.empty_cache()
