"""Memsets of CUDA graphs become kernels that fill the same bytes at the same time."""

import ctypes

import pytest
import torch

from joestar.cuda_driver import Driver
from joestar.runtime.graph_nodes import SIGNATURES, _listed, _type, make_ready, new_graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
KERNEL, MEMSET = 0, 2


def memset(x, value, size):
    """Of the driver's, on the current stream: entries of so many bytes."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), f"cuMemsetD{8 * size}Async")
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
    code = function(x.data_ptr(), value, x.nbytes // size, torch.cuda.current_stream().cuda_stream)
    assert code == 0


@pytest.mark.parametrize("kept", ["0", "1"])
def test_what_is_filled_between_two_kernels(monkeypatch, kept):
    monkeypatch.setenv("JOESTAR_MEMSET_NODES", kept)
    before, values = torch.zeros(1000, device="cuda"), torch.full((1000,), 3.0, device="cuda")
    bytes_, halves, words = (torch.ones(777, dtype=d, device="cuda") for d in (torch.uint8, torch.int16, torch.int32))
    after = [torch.zeros_like(each) for each in (values, bytes_, halves, words)]
    graph, stream = new_graph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        values.add_(1.0)
        before.copy_(values + 0.0)
        memset(values, 0, 4)
        memset(bytes_, 255, 1)
        memset(halves, 7, 2)
        memset(words, 2**32 - 1, 4)
        for into, each in zip(after, (values, bytes_, halves, words), strict=True):
            torch.add(each, 1, out=into)
        words.fill_(5)
    make_ready(graph, stream)
    call, raw = Driver(SIGNATURES), graph.raw_cuda_graph()
    kinds = [_type(call, node) for node in _listed(call, "cuGraphGetNodes", raw)]
    assert kinds.count(MEMSET) == (4 if kept == "1" else 0)
    for expected in (4.0, 1.0, 1.0):
        graph.replay()
        torch.cuda.synchronize()
        assert before.eq(expected).all()
        assert after[0].eq(1.0).all() and after[1].eq(0).all() and after[2].eq(8).all() and after[3].eq(0).all()
        assert words.eq(5).all()
