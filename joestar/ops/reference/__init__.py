"""Plain PyTorch implementations of every op: the ground truth of the tests, and what runs on devices without a kernel.

Conventions (see ``docs/architecture.md``): a ragged set has a bound (the size of its tensor) and a count (the true
number); valid entries are a prefix; rows past the count have degree 0. ``num_edges`` or ``num_src`` of -1 asks for
exactly the size that is needed. The count an op returns is the true demand and may exceed the bound (an overflow).
"""

from joestar.ops.reference.activation import bias_relu, bias_relu_grad
from joestar.ops.reference.attention import attend, attend_grad
from joestar.ops.reference.computation import (
    edge_softmax,
    edge_softmax_grad,
    scatter_dst,
    scatter_src,
    sddmm,
    spmm,
    spmm_extremum_grad,
    spmm_grad_weight,
    spmm_grad_x,
)
from joestar.ops.reference.dropout import dropout_apply, dropout_bits, edge_dropout_bits, relu_dropout_grad
from joestar.ops.reference.edge_map import edge_map, edge_map_grad
from joestar.ops.reference.fused import (
    add_bias,
    aggregate_cat,
    aggregate_cat_grad,
    aggregate_cat_kept,
    aggregate_cat_kept_grad,
    aggregate_rows,
    aggregate_rows_grad,
    aggregate_rows_kept,
    aggregate_rows_kept_grad,
    column_sums,
    join_columns,
    join_columns_all,
    sample_aggregate,
    sample_aggregate_cat,
    sample_aggregate_own,
    sample_aggregate_self,
    split_columns,
    split_columns_all,
)
from joestar.ops.reference.sampling import compact, rowwise_sample, sample_cols, sample_eids, slice_cols
from joestar.ops.reference.spmm_forms import spmm_coo, spmm_csr, spmm_csr_extremum_grad
from joestar.ops.reference.step import finish_step, overflow, take_batch
from joestar.ops.reference.structure import (
    add_self_loops,
    block_self_loops,
    edge_dst,
    out_degrees,
    sampled_self_loops,
)
from joestar.ops.reference.weighted import collective_sample, slice_rows, weighted_sample

__all__ = [
    "add_bias",
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
    "bias_relu",
    "bias_relu_grad",
    "block_self_loops",
    "collective_sample",
    "column_sums",
    "compact",
    "dropout_apply",
    "dropout_bits",
    "edge_dropout_bits",
    "edge_dst",
    "edge_map",
    "edge_map_grad",
    "edge_softmax",
    "edge_softmax_grad",
    "finish_step",
    "join_columns",
    "join_columns_all",
    "out_degrees",
    "overflow",
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
    "split_columns",
    "split_columns_all",
    "spmm",
    "spmm_coo",
    "spmm_csr",
    "spmm_csr_extremum_grad",
    "spmm_extremum_grad",
    "spmm_grad_weight",
    "spmm_grad_x",
    "take_batch",
    "weighted_sample",
]
