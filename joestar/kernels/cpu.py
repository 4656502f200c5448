"""The CPU kernels: every op of ``joestar.ops.reference``, in C++."""

from joestar.kernels.cpu_edges import edge_softmax, edge_softmax_grad, sddmm, spmm_grad_weight
from joestar.kernels.cpu_fused import sample_aggregate
from joestar.kernels.cpu_sampling import (
    add_self_loops,
    compact,
    edge_dst,
    out_degrees,
    rowwise_sample,
    sample_cols,
    sample_eids,
    slice_cols,
)
from joestar.kernels.cpu_spmm import scatter_dst, scatter_src, spmm, spmm_extremum_grad, spmm_grad_x

__all__ = [
    "add_self_loops",
    "compact",
    "edge_dst",
    "edge_softmax",
    "edge_softmax_grad",
    "out_degrees",
    "rowwise_sample",
    "sample_aggregate",
    "sample_cols",
    "sample_eids",
    "scatter_dst",
    "scatter_src",
    "sddmm",
    "slice_cols",
    "spmm",
    "spmm_extremum_grad",
    "spmm_grad_weight",
    "spmm_grad_x",
]
