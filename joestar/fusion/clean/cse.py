"""Common-subexpression elimination: two calls of the same pure op on the same values become one.

Before                                   After
    d1 = aten.sub(hi, lo)                    d1 = aten.sub(hi, lo)
    d2 = aten.sub(hi, lo)                    return d1 * d1
    return d1 * d2

Must not fire on writes to buffers, nor on ops that read one, or a view of one, that the step writes. Keyed sampling and
dropout are pure, but their call site is an argument, so distinct draws stay distinct.
"""

import operator

import torch
from torch import fx

from joestar.lowering.functional import is_in_place, root
from joestar.torch_private import OpOverload

_IMPURE = {torch.ops.aten.batch_norm.default}


def run(gm: fx.GraphModule, context) -> int:
    """Merges duplicates; returns how many."""
    merged = 0
    written = _written(gm)
    seen: dict[tuple, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if not _mergeable(node, written):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
            merged += 1
        else:
            seen[key] = node
    return merged


def _written(gm: fx.GraphModule) -> set[fx.Node]:
    """Inputs of the graph that some node writes."""
    written = set()
    for node in gm.graph.nodes:
        if is_in_place(node):
            written.add(root(node.args[0]))
        elif node.target is torch.ops.aten.batch_norm.default:
            written.update(arg for arg in node.args[3:5] if isinstance(arg, fx.Node))
    return written


def _mergeable(node: fx.Node, written: set[fx.Node]) -> bool:
    if node.op != "call_function" or node.target in _IMPURE or is_in_place(node):
        return False
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        return False
    return not any(root(arg) in written for arg in node.all_input_nodes)


def _frozen(value):
    """A hashable form that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, fx.Node):
        return value
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)
