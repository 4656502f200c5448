"""What a gradient compares for equality is kept, not computed again (CPU and GPU).

Before, forward and backward in one graph                    After
    n = aten.sqrt(s);  m = aten.amax(n, [0])                     the same; n is saved for the backward pass
    picked = aten.eq(n, m)
    count = aten.sum(picked)
    grad = aten.mul(picked, aten.div(tangents_1, count))

The gradient of a maximum goes to the entries that equal it. The partitioner saves the maximum, and lets the backward
pass compute the entries again, in another loop, whose last bits may be others: then none equals it, and the gradient is
0 / 0. Must not fire for integers, nor for what is computed from a gradient.
"""

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joestar.torch_private import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten
_MOVES = {
    _ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim,
    _ATEN.squeeze.dims, _ATEN.squeeze.default, _ATEN.expand.default, _ATEN.permute.default, _ATEN.alias.default,
}  # fmt: skip
"""Ops whose results hold the very entries of their first operand."""


class SaveCompared(CustomGraphPass):
    """Marks what gradients compare in the joint graph, before it is partitioned; changes metadata only."""

    def __call__(self, graph: fx.Graph) -> None:
        """Marks the operands of every comparison, as far as they are computed from no gradient."""
        backward = {place for place in graph.find_nodes(op="placeholder") if str(place.target).startswith("tangents")}
        for node in graph.nodes:
            if node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
                backward.add(node)
        for node in graph.find_nodes(op="call_function", target=_ATEN.eq.Tensor):
            for operand in node.args:
                source = _source(operand) if isinstance(operand, fx.Node) else None
                if source is not None and source not in backward and _computed(source):
                    source.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def _source(node: fx.Node) -> fx.Node:
    """The node whose entries this one holds."""
    while node.target in _MOVES:
        node = node.args[0]
    return node


def _computed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype.is_floating_point
