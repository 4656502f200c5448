"""Scores of products that nothing else reads are computed from the rows in front of the product.

Before (edge features of attention, H heads)          After
    h = aten.unflatten(aten.linear(f, w), -1, [H, C])     v = (att * w.view(H, C, F)).sum(1)      [H, F]
    e = aten.sum(aten.mul(h, att), [-1])    [E, H]        e = aten.linear(f, v)                   [E, H]

The product is as wide as a row of a layer, for every edge, and is read for a number per head. Without heads, with a
bias and with several scores of one product it is the same. Attention's scores of nodes, whose products are aggregated
as well, are those of ``spmm-gemm-order``.

Must not fire when the product has a reader that is no score; in float16, where the vectors may leave its range.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import erase_unread, has_plain_bias, is_product, name
from joestar.fusion.match.rounding import in_range
from joestar.fusion.match.scores import is_score, replace, score
from joestar.fusion.record import Reject

PATTERN = "linear-scores"
_ATEN = torch.ops.aten


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every product of which only scores are read; returns how many."""
    rewritten = 0
    for linear in list(gm.graph.nodes):
        found = _scores(linear) if is_product(linear) else []
        if not found or not context.admits(PATTERN, linear, _match(linear, context)):
            continue
        x, weight, *bias = linear.args
        for mul, rows in found:
            (total,) = mul.users
            with gm.graph.inserting_before(total):
                new = score(gm.graph, mul, rows, x, weight, bias[0] if bias else None)
                replace(gm.graph, total, context, new)
            erase_unread(gm.graph, total)
        context.fired(PATTERN, new, f"{len(found)} of {weight.name}")
        rewritten += 1
    return rewritten


def _scores(linear: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Products with vectors that are scores, and the rows that each reads."""
    return [(user, rows) for rows in (linear, *_heads(linear)) for user in rows.users if is_score(user, rows)]


def _heads(linear: fx.Node) -> list[fx.Node]:
    """Readers that split the columns into heads."""
    return [user for user in linear.users if user.target is _ATEN.unflatten.int and user.args[0] is linear
            and user.args[1] in (-1, 1) and len(user.args[2]) == 2]  # fmt: skip


def _match(linear: fx.Node, context) -> bool | Reject:
    heads = _heads(linear)
    for rows in (linear, *heads):
        for user in rows.users:
            if user not in heads and not is_score(user, rows):
                return Reject(f"the product is also read by {name(user)}")
    if not has_plain_bias(linear) or linear.kwargs:
        return Reject("the bias is one number for all columns")
    return in_range(context, linear)
