"""Tables of kernels fit a terminal of 80 columns."""

import re

import pytest

from joestar.bench import kernels_cpu

TRITON = pytest.importorskip("triton", reason="needs Triton")


def widths(text: str) -> list[int]:
    return [len(line) for line in text.splitlines()]


def test_of_a_cpu():
    """Rows as long as the longest that there are."""
    row = {
        "form": "sampling", "what": "1000 seeds, fanouts 15,10,5", "edges": 10_000_000, "rows": 200_000, "width": 1024,
        "ours_ms": 12345.678, "torch_ms": 98765.432, "ratio": 123.45, "torch": "sparse.mm CSR, int64",
    }  # fmt: skip
    assert max(widths(kernels_cpu.HEADER) + widths(kernels_cpu.line(row))) <= 80
    names = kernels_cpu.line(row).split()
    assert {"sampling", "10,000,000", "12345.678", "123.45x"} <= set(names)


def test_of_a_gpu():
    from joestar.bench import kernels_gpu

    row = {
        "kernel": "gather_linear_bias_relu_grad_summed", "shape": "1,234,567 rows of 6,805, 10 edges, bf16, all",
        "us": 123456.78, "bytes": 123.4e9, "gb_per_s": 4321.0, "share": 0.98,
    }  # fmt: skip
    assert max(widths(kernels_gpu.line(row))) <= 80 and re.search(r"123456.78 us", kernels_gpu.line(row))
    assert max(widths(kernels_gpu.line(row | {"error": "out of memory"}))) <= 80
