"""CUDA streams that nobody else has.

``torch.cuda.Stream()`` hands out 32 streams per priority in turn: whoever makes a 33rd gets the first one again. For
most work that only costs overlap. A stream on which a CUDA graph is recorded must not be shared: what another thread
launches there would become a part of the graph, and whoever waits for it destroys the recording.
"""

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_NON_BLOCKING = 1
"""The stream and the default one do not wait for each other (``CU_STREAM_NON_BLOCKING``)."""


_STREAMS: dict[tuple[str, torch.device], torch.cuda.Stream] = {}


def own_stream(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """The stream of a GPU for this purpose, which PyTorch's pools do not have: one for the process's life.

    One, as libraries keep workspaces for every stream that they have worked on: cuBLAS 64 MiB and more.

    Args:
        device: the GPU; without an index the current one. priority: as of ``torch.cuda.Stream``; lower runs first.

    Raises:
        RuntimeError: the driver refused.
    """
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if (purpose, device) not in _STREAMS:
        _STREAMS.setdefault((purpose, device), _new(device, priority))
    return _STREAMS[purpose, device]


@contextlib.contextmanager
def between(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """On this stream, behind what the current one has been given, and before what it is given afterwards.

    Also where an error or an interrupt ends it: what was launched until then may still write to what comes next.
    """
    now = torch.cuda.current_stream(device)
    stream.wait_stream(now)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        now.wait_stream(stream)


def _new(device: torch.device, priority: int) -> torch.cuda.Stream:
    try:
        create = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority
    except (OSError, AttributeError):  # no NVIDIA driver: what PyTorch has
        return torch.cuda.Stream(device, priority=priority)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the device's context is this thread's current one from here on
        error = create(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority))
        if error:
            raise RuntimeError(
                f"the CUDA driver made no stream on {device}: error {error} of cuStreamCreateWithPriority"
            )
        return torch.cuda.ExternalStream(handle.value, device=device)
