"""Tensor level: the ops of thesis table 5.3 as ``torch.ops.joestar.*``, their references and gradients."""

from joestar.ops import (  # noqa: F401
    attend_own,
    backward_forms,
    edge_autocast,
    gather_attend,
    gather_linear,
    gather_rows,
    gather_shards,
    head_linear,
    library,
    multi_aggregate,
    row_autocast,
    side_by_side,
)
from joestar.ops.fused import sample_aggregate

__all__ = ["sample_aggregate"]
