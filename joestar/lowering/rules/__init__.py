"""What padding means for each aten op: one rule per op packet, found by name.

A rule is ``rule(context, node)``: it leaves a safe node alone, rewrites an unsafe one, or raises ``PaddingError``.
"""

import torch
from torch import fx

from joestar.lowering.rules import contract, lookup, loss, norm, reduce, rowwise, shapes
from joestar.lowering.rules.pointwise import pointwise
from joestar.lowering.rules.pointwise_ops import POINTWISE
from joestar.ops.registry import Padding, op_of

RULES = {**rowwise.RULES, **lookup.RULES, **shapes.RULES, **reduce.RULES, **contract.RULES, **norm.RULES, **loss.RULES}


def rule_for(node: fx.Node):
    """The rule of a node's op; Joestar's own say which they need (``registry.Padding``)."""
    target = node.target
    name = target._schema.name.partition("::")[2]
    op = op_of(target)
    if op is not None and op.padding is not Padding.RULE:
        return rowwise.safe if op.padding is Padding.SAFE else refuse_unknown
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
