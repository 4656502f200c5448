"""Sizes beyond 32 bits are refused, never cut off."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_columns, gpu_grad, gpu_links
from joestar.kernels.gpu_launch import INTERPRETED, MOST_ROWS, check_offsets

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")


def shapes(*sizes, dtype=torch.float32):
    """A tensor without memory."""
    return torch.empty(sizes, dtype=dtype, device="meta")


MANY = shapes(2**31, dtype=torch.int32)
"""Sources of one edge more than lists can name."""
OFFSETS = shapes(101, dtype=torch.int64)

REFUSED = {
    "spmm_grad_x": lambda: gpu.spmm_grad_x(OFFSETS, MANY, shapes(100, 4), None, 50, "mean"),
    "link_edges": lambda: gpu_links.link_edges(OFFSETS, MANY, 50),
    "gathered_grad": lambda: gpu_links.gathered_grad(OFFSETS, MANY, shapes(100, 4), 50, None, "sum"),
    "aggregate_cat": lambda: gpu.aggregate_cat_grad(OFFSETS, MANY, shapes(100, 8), shapes(50, 4), None, 1.0, "sum"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_more_edges_than_lists_can_name(call, atomic):
    with pytest.raises(ValueError, match=r"at most 2147483647 edges .* got 2147483648; aggregate over parts"):
        call()


def test_more_rows_than_tiles_can_count():
    rows = MOST_ROWS + 1
    many = shapes(rows, 2)
    for call in (
        lambda: check_offsets(shapes(rows + 1, dtype=torch.int64)), lambda: gpu_columns.column_sums(many),
        lambda: gpu.bias_relu(many, None, None, 1.0),
        lambda: gpu.gather_linear(shapes(5, 2), shapes(rows, dtype=torch.int32), shapes(3, 2), None),
        lambda: gpu.dropout_bits(shapes(rows, dtype=torch.int64), shapes(3, dtype=torch.int64), 0, 0.5, 4),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"at most {MOST_ROWS} rows, got {rows}"):
            call()


def test_numbers_of_edges_are_counted_in_64_bits():
    """A kernel that has programs per edge multiplies in 64 bits: with 32 the product overflows before it is widened."""
    assert "tile_rows" not in gpu_grad._scatter_edges.fn.__code__.co_names
