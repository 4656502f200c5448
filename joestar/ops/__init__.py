"""Tensor level: the ops of thesis table 5.3 as ``torch.ops.joestar.*``, their references and gradients."""

from joestar.ops import attend_own, backward_forms, gather_attend, gather_linear, head_linear, library  # noqa: F401
from joestar.ops.fused import sample_aggregate

__all__ = ["sample_aggregate"]
