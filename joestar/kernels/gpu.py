"""The Triton kernels: ops of ``joestar.ops.reference`` on CUDA tensors (under ``TRITON_INTERPRET=1`` on CPU tensors).

Nothing waits for the device unless a bound of -1 asks for exact sizes, so that every op can be captured in a CUDA
graph after one run outside of it. Importing this module needs Triton, not a GPU.
"""

from joestar.kernels.gpu_activation import bias_relu, bias_relu_grad
from joestar.kernels.gpu_attend import attend, attend_grad, attend_own_grad
from joestar.kernels.gpu_cat import (
    aggregate_cat,
    aggregate_cat_grad,
    aggregate_cat_kept,
    aggregate_cat_kept_grad,
    aggregate_rows,
    aggregate_rows_grad,
    aggregate_rows_kept,
    aggregate_rows_kept_grad,
)
from joestar.kernels.gpu_columns import column_sums
from joestar.kernels.gpu_compact import compact, release_claims
from joestar.kernels.gpu_dropout import dropout_bits, edge_dropout_bits
from joestar.kernels.gpu_edge_map import edge_map
from joestar.kernels.gpu_edge_map_grad import edge_map_grad
from joestar.kernels.gpu_edges import edge_softmax, edge_softmax_grad, sddmm
from joestar.kernels.gpu_fill import fill_rows, gather_stored
from joestar.kernels.gpu_fused import (
    sample_aggregate,
    sample_aggregate_cat,
    sample_aggregate_own,
    sample_aggregate_self,
)
from joestar.kernels.gpu_gather_attend import gather_attend, gather_attend_grad
from joestar.kernels.gpu_gather_linear import gather_linear, gather_linear_weight_grad
from joestar.kernels.gpu_grad import (
    scatter_src,
    scatter_src_transposed,
    spmm_extremum_grad,
    spmm_grad_weight,
    spmm_grad_x,
    spmm_grad_x_transposed,
)
from joestar.kernels.gpu_heads import block_diagonal
from joestar.kernels.gpu_join import join_columns_all, split_columns, split_columns_all
from joestar.kernels.gpu_multi import multi_aggregate, multi_aggregate_grad
from joestar.kernels.gpu_place import place_structure
from joestar.kernels.gpu_sampling import rowwise_sample, sample_cols, sample_eids, slice_cols
from joestar.kernels.gpu_shards import gather_shards
from joestar.kernels.gpu_spmm import scatter_dst, spmm
from joestar.kernels.gpu_spmm_forms import spmm_coo, spmm_csr, spmm_csr_extremum_grad
from joestar.kernels.gpu_step import finish_step, overflow, take_batch
from joestar.kernels.gpu_structure import (
    add_self_loops,
    block_self_loops,
    edge_dst,
    out_degrees,
    sampled_self_loops,
)
from joestar.kernels.gpu_two_hops import sample_aggregate_two_hops
from joestar.kernels.gpu_weighted import collective_sample, slice_rows, weighted_sample

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
    "attend_own_grad",
    "bias_relu",
    "bias_relu_grad",
    "block_diagonal",
    "block_self_loops",
    "collective_sample",
    "column_sums",
    "compact",
    "dropout_bits",
    "edge_dropout_bits",
    "edge_dst",
    "edge_map",
    "edge_map_grad",
    "edge_softmax",
    "edge_softmax_grad",
    "fill_rows",
    "finish_step",
    "gather_attend",
    "gather_attend_grad",
    "gather_linear",
    "gather_linear_weight_grad",
    "gather_shards",
    "gather_stored",
    "join_columns_all",
    "multi_aggregate",
    "multi_aggregate_grad",
    "out_degrees",
    "overflow",
    "place_structure",
    "release_claims",
    "rowwise_sample",
    "sample_aggregate",
    "sample_aggregate_cat",
    "sample_aggregate_own",
    "sample_aggregate_self",
    "sample_aggregate_two_hops",
    "sample_cols",
    "sample_eids",
    "sampled_self_loops",
    "scatter_dst",
    "scatter_src",
    "scatter_src_transposed",
    "sddmm",
    "slice_cols",
    "slice_rows",
    "split_columns",
    "split_columns_all",
    "spmm",
    "spmm_coo",
    "spmm_csr",
    "spmm_csr_extremum_grad",
    "spmm_extremum_grad",
    "spmm_grad_weight",
    "spmm_grad_x",
    "spmm_grad_x_transposed",
    "take_batch",
    "weighted_sample",
]
