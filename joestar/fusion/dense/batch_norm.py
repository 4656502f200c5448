"""Batch norm of rows is one op, whose statistics take one pass over the rows and whose gradient's sums another.

Before (training)                                       After, if ``fused`` is chosen
    made = joestar.masked_batch_norm(h, w, b, n, eps)       made = joestar.batch_norm_rows(h, w, b, n, eps)
    y, mean, var = made[0], made[1], made[2]                y, mean, var = made[0], made[1], made[2]

The composition is three passes over the rows forward and four backward when a backend has fused what it can, this is
two and two; and its loops stand between ops that could run side by side. Running averages stay as they are.

A choice ``norm:0`` per place, numbered in the order of the graph, by default ``fused`` on a GPU and ``composed`` on a
CPU, where the op is composed as well.

Must not fire for rows that are not floats, or when weight and bias are of different dtypes.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.record import Reject

PATTERN = "batch-norm"
FUSED, COMPOSED = "fused", "composed"
_COMPOSITION, _OP = torch.ops.joestar.masked_batch_norm.default, torch.ops.joestar.batch_norm_rows.default


def run(gm: fx.GraphModule, context) -> int:
    """Replaces every composition that fits; returns how many."""
    fused = places = 0
    default = FUSED if context.device == "cuda" else COMPOSED
    for node in list(gm.graph.find_nodes(op="call_function", target=_COMPOSITION)):
        match = _match(node)
        if match:
            form = context.choose("norm", str(places), (COMPOSED, FUSED), default, node)
            match = match if form == FUSED else Reject(f"{COMPOSED} is chosen")
            places += 1
        if context.admits(PATTERN, node, match):
            with gm.graph.inserting_before(node):
                new = emit(gm.graph, node, _OP, *node.args)
            context.fired(PATTERN, new, f"{int(tensor(node.args[0]).shape[1])} columns")
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            fused += 1
    return fused


def _match(node: fx.Node) -> bool | Reject:
    rows, weight, bias = map(tensor, node.args[:3])
    if rows is None or not rows.dtype.is_floating_point or not isinstance(rows.shape[1], int):
        return Reject("what is normalised is no matrix of floats of a known width")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return Reject(f"weight and bias are {weight.dtype} and {bias.dtype}")
    return True
