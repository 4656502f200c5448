"""What padding means for each aten op: one rule per op packet, found by name.

A rule is ``rule(context, node)``: it leaves a safe node alone, rewrites an unsafe one, or raises ``PaddingError``.
"""

import torch
from torch import fx

from joestar.lowering.rules import contract, lookup, loss, norm, reduce, rowwise, shapes
from joestar.lowering.rules.pointwise import pointwise
from joestar.lowering.rules.pointwise_ops import POINTWISE

RULES = {**rowwise.RULES, **lookup.RULES, **shapes.RULES, **reduce.RULES, **contract.RULES, **norm.RULES, **loss.RULES}

_OWN = {
    "masked_batch_norm": norm.masked_batch_norm,
    "synced_batch_norm": norm.masked_batch_norm,
    "row_parts": norm.row_parts,
    "only_valid": rowwise.only_valid,
}


def rule_for(node: fx.Node):
    """The rule of a node's op; Joestar's own and pointwise ops are safe: padded rows have degree 0 and stay finite."""
    target = node.target
    name = target._schema.name.partition("::")[2]
    if target.namespace == "joestar" and name not in lookup.OWN:
        return _OWN.get(name, rowwise.safe)
    if name in ("max", "min") and target._overloadname == "other":
        return pointwise
    if name in RULES:
        return RULES[name]
    if name in POINTWISE or torch.Tag.pointwise in target.tags:
        return pointwise
    return refuse_unknown


def refuse_unknown(context, node: fx.Node) -> None:
    """An op without a rule may mix padded rows with real ones: never guess."""
    raise context.refuse(
        node, "has no rule for padded rows, and may mix them with real ones",
        "Use row-wise operations, block.pull / apply_edges, or sum / mean / max over nodes.",
    )  # fmt: skip
