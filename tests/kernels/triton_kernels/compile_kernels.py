"""Compiles every kernel for an H100/H200 (sm_90), where there is no GPU: what the interpreter does not check.

A launch is compiled instead of run. With ``--all`` in every value dtype and with every candidate of the launch
settings; prints the number of kernels. Must run in a process of its own, without ``TRITON_INTERPRET``.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

compiled = set()


class Device:
    """What Triton asks of a driver until a kernel is loaded."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def compile_only(function: JITFunction, grid):
    """In place of ``function[grid]``."""

    def launch(*args, **kwargs):
        compiled.add(function.run(*args, grid=grid, warmup=True, **kwargs).hash)

    return launch


driver.set_active(Device())
JITFunction.__getitem__ = compile_only

from joestar.kernels import gpu, tune  # noqa: E402

KEY, COUNT = torch.tensor([1, 2, 3]), torch.tensor(5)
FANOUTS = (5, 25, -1) if "--all" in sys.argv else (5,)
ROWS, EDGES, NODES = 3000, 9000, 5000
INDPTR = torch.zeros(ROWS + 1, dtype=torch.int64)


def every_candidate(kernel, shape, candidates, launch, work, device, reset=None):
    """In place of ``tune.choose``: all of them."""
    for config in candidates:
        launch(config)
    return candidates[0]


def structure(ids: torch.dtype) -> None:
    """Sampling, relabelling and structure."""
    indices, dsts = torch.zeros(EDGES, dtype=ids), torch.zeros(ROWS, dtype=ids)
    weight = torch.zeros(EDGES)
    for k, replace in ((5, False), (20, False), (3, True), (-1, False)):
        draws = (k, replace, KEY, 0)
        gpu.sample_cols(INDPTR, indices, dsts, COUNT, *draws, EDGES)
        gpu.rowwise_sample(INDPTR, indices, dsts, *draws, EDGES)
        gpu.sample_eids(INDPTR, dsts, COUNT, *draws, EDGES)
        gpu.weighted_sample(INDPTR, weight, dsts, COUNT, True, *draws, EDGES)
    gpu.compact(dsts, COUNT, INDPTR, indices, NODES, EDGES)
    gpu.collective_sample(INDPTR, indices, weight[:NODES], NODES, 512, KEY, 0)
    gpu.slice_rows(INDPTR, indices, dsts, dsts, COUNT, EDGES)
    gpu.add_self_loops(INDPTR, indices, COUNT)
    gpu.edge_dst(INDPTR, EDGES, indices)
    gpu.out_degrees(INDPTR, indices, NODES)
    gpu.dropout_bits(dsts, KEY, 0, 0.3, 100)
    gpu.edge_dropout_bits(INDPTR, EDGES, dsts, KEY, 0, 0.5, 4)


def values(dtype: torch.dtype, widths: tuple[int, ...], reduces: tuple[str, ...]) -> None:
    """Aggregation, edge values and their gradients."""
    indices, dsts = torch.zeros(EDGES, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    for width in widths:
        x, grad = torch.zeros(NODES, width, dtype=dtype), torch.zeros(ROWS, width, dtype=dtype)
        for reduce in reduces:
            for k in FANOUTS:
                args = (INDPTR, indices, dsts, COUNT, k, False, KEY, 0, x, reduce)
                gpu.sample_aggregate_self(*args)
                gpu.sample_aggregate_cat(*args)
            gpu.sample_aggregate_two_hops(INDPTR, indices, dsts, COUNT, 10, 5, False, KEY, 0, x, reduce)
            gpu.spmm(INDPTR, indices, x, None, reduce)
        gpu.spmm_grad_x(INDPTR, indices, grad, None, NODES, "mean")
        gpu.spmm_extremum_grad(INDPTR, indices, x, None, grad, grad)
        gpu.sddmm(INDPTR, indices, x, None, "copy_lhs")
        gpu.sddmm(INDPTR, indices, x, grad, "div")
    x, grad = torch.zeros(NODES, 4, 32, dtype=dtype), torch.zeros(ROWS, 4, 32, dtype=dtype)
    weight = torch.zeros(EDGES, 4, dtype=dtype)
    gpu.spmm(INDPTR, indices, x, weight, "sum")
    gpu.spmm_grad_x(INDPTR, indices, grad, weight, NODES, "sum")
    gpu.spmm_grad_x_transposed(INDPTR, indices, grad, weight, NODES, "mean")
    gpu.spmm_grad_weight(INDPTR, indices, x, grad, weight, "mean")
    gpu.spmm_extremum_grad(INDPTR, indices, x, weight, grad, grad)
    gpu.spmm(INDPTR, indices, x[:, :1].contiguous(), weight, "mean")
    gpu.spmm_grad_x(INDPTR, indices, grad, weight, NODES, "sum", True)
    gpu.spmm_grad_weight(INDPTR, indices, x[:, :1].contiguous(), grad, weight, "sum")
    gpu.sddmm(INDPTR, indices, x, grad, "dot")
    gpu.sddmm(INDPTR, indices, weight[:NODES], weight[:ROWS], "add")
    gpu.sddmm(INDPTR, indices, None, grad, "copy_rhs")
    gpu.edge_softmax(INDPTR, weight)
    gpu.edge_softmax_grad(INDPTR, weight, weight)
    gpu.scatter_src(INDPTR, indices, weight, NODES)
    gpu.scatter_dst(INDPTR, weight)


if "--all" in sys.argv:
    tune.choose = every_candidate
    structure(torch.int32)
    structure(torch.int64)
    values(torch.float32, (1, 47, 100, 768), ("mean", "max"))
    values(torch.bfloat16, (100, 256), ("mean", "max"))
    values(torch.float16, (100,), ("mean",))
    values(torch.float64, (100,), ("mean",))
else:
    structure(torch.int32)
    values(torch.float32, (100,), ("mean",))
print(len(compiled))
