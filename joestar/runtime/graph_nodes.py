"""CUDA graphs as they are replayed: small memsets of libraries are kernels.

cuBLAS clears counters in front of some of its products. As a node of a CUDA graph that takes 1 us, and what comes
behind it 2 to 14 more to begin, where a kernel follows a kernel within half a microsecond (docs/benchmarks-history.md).
So the nodes are exchanged before the graph is made ready: a kernel of PyTorch's fills the same bytes, between the same
nodes.
"""

import contextlib
import ctypes
import os

import torch
from torch import Tensor

from joestar.cuda_driver import Driver
from joestar.distributed.address_range import tensor_at
from joestar.locks import RECORDING

LARGEST = 4 << 20
"""Bytes: what is larger is worth its memset."""
_KERNEL, _MEMSET = 0, 2
_NODE, _NODES, _COUNT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Memset(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``: ``height`` rows of ``width`` elements."""

    _fields_ = (
        ("address", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Kernel(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS``, the second version."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


SIGNATURES = {
    "cuGraphGetNodes": (ctypes.c_void_p, _NODES, _COUNT),
    "cuGraphNodeGetType": (_NODE, ctypes.POINTER(ctypes.c_int)),
    "cuGraphNodeGetDependencies": (_NODE, _NODES, _COUNT),
    "cuGraphNodeGetDependentNodes": (_NODE, _NODES, _COUNT),
    "cuGraphMemsetNodeGetParams": (_NODE, ctypes.POINTER(_Memset)),
    "cuGraphKernelNodeGetParams_v2": (_NODE, ctypes.POINTER(_Kernel)),
    "cuGraphAddKernelNode_v2": (_NODES, ctypes.c_void_p, _NODES, ctypes.c_size_t, ctypes.POINTER(_Kernel)),
    "cuGraphAddDependencies": (ctypes.c_void_p, _NODES, _NODES, ctypes.c_size_t),
    "cuGraphDestroyNode": (_NODE,),
}


def new_graph() -> torch.cuda.CUDAGraph:
    """A CUDA graph to record, for ``make_ready``."""
    return torch.cuda.CUDAGraph(keep_graph=True)


def make_ready(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Makes a recorded graph one that can be replayed; where the driver does not exchange a node it stays as it is.

    Args:
        graph: of ``new_graph``, recorded. stream: one on which nothing else is recorded.
    """
    if os.environ.get("JOESTAR_MEMSET_NODES", "0") != "1":
        with RECORDING, contextlib.suppress(OSError):
            exchange_memsets(
                Driver(SIGNATURES), graph.raw_cuda_graph(), lambda rows, value: _recorded(rows, value, stream)
            )
    graph.instantiate()


def exchange_memsets(call: Driver, graph: int, record) -> int:
    """Puts kernels into the place of small memsets.

    Args:
        call: CUDA's driver. graph: its handle of a graph (``cudaGraph_t``).
        record: ``(rows, value)`` to an object whose ``raw_cuda_graph()`` holds one kernel, which fills ``rows``.

    Returns:
        how many were exchanged.

    Raises:
        OSError: the driver refused; the graph does what it did, with some or no nodes exchanged.
    """
    count = 0
    for node in _listed(call, "cuGraphGetNodes", graph):
        if _type(call, node) != _MEMSET:
            continue
        wanted = _Memset()
        call("cuGraphMemsetNodeGetParams", node, ctypes.byref(wanted))
        rows = _rows(wanted)
        if rows is None:
            continue
        before = _listed(call, "cuGraphNodeGetDependencies", node)
        behind = _listed(call, "cuGraphNodeGetDependentNodes", node)
        value = ctypes.c_int32(wanted.value).value if wanted.size == 4 else wanted.value
        filled = record(rows, value)  # stays until its arguments have been copied
        _exchange(call, graph, node, before, behind, _kernel(call, filled.raw_cuda_graph()))
        count += 1
    return count


def _rows(wanted: _Memset) -> Tensor | None:
    """What is set, if it is small and in one piece, and set to what a tensor of that size of entries can hold."""
    if wanted.height != 1 or not 0 < wanted.width * wanted.size <= LARGEST or wanted.size not in _DTYPES:
        return None
    if wanted.size == 2 and wanted.value >= 1 << 15:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return tensor_at(wanted.address, (wanted.width,), _DTYPES[wanted.size], device, None)


def _recorded(rows: Tensor, value: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            rows.fill_(value)
        finally:
            graph.capture_end()
    return graph


def _kernel(call: Driver, graph: int) -> _Kernel:
    """What the only node of a graph launches."""
    nodes, found = _listed(call, "cuGraphGetNodes", graph), _Kernel()
    if len(nodes) != 1 or _type(call, nodes[0]) != _KERNEL:
        raise OSError("a tensor is not filled by one kernel")
    call("cuGraphKernelNodeGetParams_v2", nodes[0], ctypes.byref(found))
    return found


def _exchange(call: Driver, graph: int, node: int, before: list[int], behind: list[int], kernel: _Kernel) -> None:
    new = ctypes.c_void_p()
    call("cuGraphAddKernelNode_v2", ctypes.byref(new), graph, _array(before), len(before), ctypes.byref(kernel))
    try:
        call("cuGraphAddDependencies", graph, _array([new.value] * len(behind)), _array(behind), len(behind))
    except OSError:
        call("cuGraphDestroyNode", new)
        raise
    call("cuGraphDestroyNode", node)


def _type(call: Driver, node: int) -> int:
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    return kind.value


def _listed(call: Driver, name: str, of: int) -> list[int]:
    """Handles of the nodes that a function lists."""
    count = ctypes.c_size_t()
    call(name, of, None, ctypes.byref(count))
    if not count.value:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    call(name, of, nodes, ctypes.byref(count))
    return list(nodes)


def _array(nodes: list[int]):
    return (ctypes.c_void_p * len(nodes))(*nodes) if nodes else None
