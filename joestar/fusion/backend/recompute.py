"""What the backward pass computes again instead of reading it back (CPU).

The derivative of a ReLU needs to know where its input was positive. Inductor stores that as a tensor of bools, which
its C++ for CPUs writes and reads through a path that takes some 10 ns per entry, ten times as long as the ReLU itself.
Marked as here, the partitioner keeps the ReLU's result, which the next operation reads anyway, and compares again.
"""

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joestar.torch_private import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten
_COMPARISONS = {getattr(_ATEN, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")}
_SMALL = 4096
"""Entries below which it makes no difference."""


class RecomputeMasks(CustomGraphPass):
    """Marks comparisons of floating-point tensors with a number in the joint graph of forward and backward pass."""

    def __call__(self, graph: fx.Graph) -> None:
        """Runs before the graph is partitioned; changes metadata only."""
        for node in graph.nodes:
            if node.target not in _COMPARISONS:
                continue
            value = node.args[0].meta.get("val")
            if value is not None and value.dtype.is_floating_point and value.numel() > _SMALL:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))
