"""The CPU kernels: every op of ``joestar.ops.reference``, in C++ (``edge_map`` in torch ops)."""

from joestar.kernels.cpu_attend import attend, attend_grad
from joestar.kernels.cpu_dropout import dropout_apply, dropout_bits, edge_dropout_bits, relu_dropout_grad
from joestar.kernels.cpu_edge_map import edge_map, edge_map_grad
from joestar.kernels.cpu_edges import edge_softmax, edge_softmax_grad, sddmm, spmm_grad_weight
from joestar.kernels.cpu_fused import (
    aggregate_cat,
    aggregate_cat_grad,
    aggregate_cat_kept,
    aggregate_cat_kept_grad,
    aggregate_rows,
    aggregate_rows_grad,
    aggregate_rows_kept,
    aggregate_rows_kept_grad,
    sample_aggregate,
    sample_aggregate_cat,
    sample_aggregate_own,
    sample_aggregate_self,
)
from joestar.kernels.cpu_sampling import (
    add_self_loops,
    block_self_loops,
    compact,
    edge_dst,
    out_degrees,
    rowwise_sample,
    sample_cols,
    sample_eids,
    sampled_self_loops,
    slice_cols,
)
from joestar.kernels.cpu_spmm import scatter_dst, scatter_src, spmm, spmm_extremum_grad, spmm_grad_x
from joestar.kernels.cpu_spmm_forms import spmm_coo, spmm_csr, spmm_csr_extremum_grad
from joestar.kernels.cpu_weighted import collective_sample, slice_rows, weighted_sample

__all__ = [
    "add_self_loops",
    "aggregate_cat",
    "aggregate_cat_grad",
    "aggregate_cat_kept",
    "aggregate_cat_kept_grad",
    "aggregate_rows",
    "aggregate_rows_grad",
    "aggregate_rows_kept",
    "aggregate_rows_kept_grad",
    "attend",
    "attend_grad",
    "block_self_loops",
    "collective_sample",
    "compact",
    "dropout_apply",
    "dropout_bits",
    "edge_dropout_bits",
    "edge_dst",
    "edge_map",
    "edge_map_grad",
    "edge_softmax",
    "edge_softmax_grad",
    "out_degrees",
    "relu_dropout_grad",
    "rowwise_sample",
    "sample_aggregate",
    "sample_aggregate_cat",
    "sample_aggregate_own",
    "sample_aggregate_self",
    "sample_cols",
    "sample_eids",
    "sampled_self_loops",
    "scatter_dst",
    "scatter_src",
    "sddmm",
    "slice_cols",
    "slice_rows",
    "spmm",
    "spmm_coo",
    "spmm_csr",
    "spmm_csr_extremum_grad",
    "spmm_extremum_grad",
    "spmm_grad_weight",
    "spmm_grad_x",
    "weighted_sample",
]
