"""Deterministic mode leaves no addition of floating-point numbers whose order threads decide."""

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from kernel_checks import check_op
from ops.database import OPS

from joestar.kernels import gpu, gpu_grad, gpu_links, tune
from joestar.kernels.gpu_launch import INTERPRETED

INTEGERS = {
    "gpu_checksum._checksums", "gpu_fused._count_rows", "gpu_ranks._sum_ranks", "gpu_structure._out_degrees",
    "gpu_structure._write_looped",
}  # fmt: skip
"""Kernels whose atomic additions are of integers: the order does not matter."""
AVOIDED = {"gpu_links._link_edges": gpu_links, "gpu_grad._scatter_edges": gpu_grad}
"""Kernels that are not launched in deterministic mode."""
PER_EDGE = {"gpu_grad._extremum_grad"}
"""Kernels that write a value for every edge instead."""
GRADIENTS = [
    "aggregate_activated_grad",
    "aggregate_cat_grad", "aggregate_cat_kept_grad", "aggregate_rows_grad", "aggregate_rows_kept_grad", "attend_grad",
    "scatter_src", "segment_grad", "spmm_csr", "spmm_csr_extremum_grad", "spmm_extremum_grad", "spmm_grad_x",
]  # fmt: skip


def test_every_racing_kernel_is_known():
    found = set()
    for path in sorted(Path(gpu.__file__).parent.glob("gpu*.py")):
        for node in ast.parse(path.read_text()).body:
            calls = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
            if {"tl.atomic_add", "tl.atomic_xchg", "tl.atomic_cas"} & set(calls):
                found.add(f"{path.stem}.{node.name}")
    assert found == INTEGERS | AVOIDED.keys() | PER_EDGE


class _Refused:
    def __getitem__(self, grid):
        raise AssertionError("a kernel with additions in any order was launched")


@pytest.mark.every(2)
@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu compares runs")
@pytest.mark.parametrize("name", GRADIENTS)
def test_no_racing_kernel_is_launched(name, monkeypatch):
    torch.use_deterministic_algorithms(False)
    for kernel, module in AVOIDED.items():
        monkeypatch.setattr(module, kernel.split(".")[1], _Refused())
    with tune.deterministic():
        check_op(getattr(gpu, name), name, torch.float32, torch.int32, "cpu", 3)
    assert name in OPS


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu compares runs")
def test_without_it_shares_of_extrema_are_added_atomically(atomic):
    check_op(gpu.spmm_extremum_grad, "spmm_extremum_grad", torch.float32, torch.int32, "cpu", 6)
