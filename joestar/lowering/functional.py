"""Removes in-place writes to intermediate values: ``relu_(x)`` becomes ``relu(x)`` and later readers see the result.

Writes to inputs of the graph (BatchNorm's buffers) stay: they are the state that a step changes on purpose.
"""

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.lowering.origin import node_line

_IN_PLACE_BUFFERS = {torch.ops.aten.batch_norm.default}


def is_in_place(node: fx.Node) -> bool:
    """Whether the node writes to its first argument (``aten.relu_`` and the like)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target not in _IN_PLACE_BUFFERS and node.target._schema.is_mutable


def functional_overload(target):
    """The out-of-place twin of an in-place overload, or ``None``."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _shares_memory(node: fx.Node) -> bool:
    """Whether the node's tensor is a view of another node's, or another node is a view of it."""

    def is_view(candidate: fx.Node) -> bool:
        target = candidate.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)

    return is_view(node) or any(is_view(user) for user in node.users)


def remove_in_place(gm: fx.GraphModule) -> int:
    """Rewrites every in-place op on an intermediate value; returns how many.

    Raises:
        CaptureError: if the written tensor shares memory with another (a view), or the op has no out-of-place twin.
    """
    rewrites = 0
    for node in list(gm.graph.nodes):
        if not is_in_place(node) or _root(node.args[0]).op == "placeholder":
            continue
        written = node.args[0]
        twin = functional_overload(node.target)
        if twin is None or _shares_memory(written) or not isinstance(node.meta.get("val"), Tensor):
            raise CaptureError(
                f"in-place {node.target} on a tensor that shares memory with another, at {node_line(node)}. "
                "Write the out-of-place form (for example x = x + y instead of x[...] += y)."
            )
        node.target = twin
        later = _after(gm, node)
        written.replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)
        rewrites += 1
    gm.graph.lint()
    gm.recompile()
    return rewrites


def _root(node: fx.Node) -> fx.Node:
    """The value whose memory a chain of views looks at."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not node.all_input_nodes:
            return node
        node = node.all_input_nodes[0]
    return node


def _after(gm: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    nodes = list(gm.graph.nodes)
    return set(nodes[nodes.index(node) + 1 :])
