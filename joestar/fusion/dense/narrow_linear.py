"""A product with few input columns over many rows is written so that the gradient of its weights is fast on a CPU.

Before                              After          (w: [out, in], in far below out)
    y = aten.linear(x, w, b)            t = aten.clone(aten.t(w), memory_format=contiguous)
                                        y = aten.addmm(b, x, t)               (aten.mm(x, t) without a bias)

The value is the same. The gradient of ``linear`` for its weights is ``grad.T @ x``, whose few columns MKL fills slowly;
that of ``addmm`` for a row-major second factor is ``x.T @ grad``, many times as fast for half a million edges with four
features. Edge data are such rows.

Must not fire for wide inputs, where the form makes no difference, for rows that are no matrix, for weights that need no
gradient, or on a GPU.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, is_product
from joestar.fusion.record import Reject

PATTERN = "narrow-linear"
WIDEST = 32
"""Input columns of a narrow product at most; the result has four times as many at least."""
_ATEN = torch.ops.aten


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every narrow product; returns how many."""
    rewritten = 0
    if context.device != "cpu":
        return rewritten
    for node in list(gm.graph.nodes):
        if not is_product(node) or not _narrow(node):
            continue
        if not context.admits(PATTERN, node, _match(node, context)):
            continue
        x, weight, *bias = node.args
        bias = [value for value in bias if value is not None]
        with gm.graph.inserting_before(node):
            turned = emit(gm.graph, node, _ATEN.t.default, weight)
            rows = emit(gm.graph, node, _ATEN.clone.default, turned, memory_format=torch.contiguous_format)
            target = _ATEN.addmm.default if bias else _ATEN.mm.default
            product = emit(gm.graph, node, target, *bias, x, rows)
        context.fired(PATTERN, product, f"{weight.meta['val'].shape[1]} columns to {weight.meta['val'].shape[0]}")
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        rewritten += 1
    return rewritten


def _narrow(linear: fx.Node) -> bool:
    results, columns = linear.args[1].meta["val"].shape
    return columns <= WIDEST and 4 * columns <= results


def _match(linear: fx.Node, context) -> bool | Reject:
    return True if context.depends_on_grad(linear.args[1]) else Reject("the weights need no gradient")
