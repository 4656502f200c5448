"""Parts of the gradient of activated rows are added up where it is masked (GPU).

Before (rows that a product and, the first of them, somebody else reads)      After
    zeros = aten.full([n, D], 0)                                g = bias_relu_grad(a, kept, scale, True, [b])
    more  = aten.slice_scatter(zeros, b, 0, 0, m)
    sum   = aten.add(more, a)                    a: aten.mm
    g     = bias_relu_grad(sum, kept, scale, True)

The backward pass of ``bias_relu`` reads the parts and adds them up: zeros behind the first rows are not written, and
the sum is no pass of its own, nor a product that adds to what was copied to its result first (``addmm``). On a graph of
Inductor's, in front of its own rewrites.

Must not fire when the sum has another reader, or when a part of all rows is no product and no result of an op of ours:
the backend computes it in the loop that adds it.
"""

import operator

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.lowering.rules.arguments import argument

NAME = "gradient-sums"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_GRAD = _JOESTAR.bias_relu_grad.default
_MOST = 3
"""Parts beside the gradient that the op is given."""


def run(graph: fx.Graph) -> int:
    """Rewrites every gradient that fits; returns how many."""
    made = 0
    for node in list(graph.find_nodes(op="call_function", target=_GRAD)):
        whole, first = _parts(node.args[0], node)
        if not whole or not 1 < len(whole) + len(first) <= _MOST + 1 or len(node.args) > 4:
            continue
        if not all(map(_is_stored, whole)):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(_GRAD, (whole[0], *node.args[1:4], [*whole[1:], *first]))
        new.meta = {**origin(node), "val": node.meta["val"]}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        made += 1
    if made:
        graph.eliminate_dead_code()
    return made


def _parts(rows: fx.Node, reader: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(parts with all rows, parts with the first ones) of a sum that only ``reader`` reads."""
    if list(rows.users) != [reader]:
        return [rows], []
    if rows.target is _ATEN.add.Tensor and not rows.kwargs and all(_is_like(part, rows) for part in rows.args):
        found = [_parts(part, rows) for part in rows.args]
        return [part for whole, _ in found for part in whole], [part for _, first in found for part in first]
    if rows.target is _ATEN.slice_scatter.default and _is_zero(rows.args[0]):
        place = [argument(rows, name) for name in ("dim", "start", "step")]
        if place in ([0, 0, 1], [0, None, 1]) and rows.args[1].meta["val"].dtype == rows.meta["val"].dtype:
            return [], [rows.args[1]]
    return [rows], []


def _is_like(part, rows: fx.Node) -> bool:
    value, of = tensor(part), rows.meta["val"]
    return value is not None and value.shape == of.shape and value.dtype == of.dtype


def _is_zero(node: fx.Node) -> bool:
    return node.target is _ATEN.full.default and node.args[1] == 0


def _is_stored(node: fx.Node) -> bool:
    """Whether rows are stored whoever reads them."""
    while node.target in (operator.getitem, _ATEN.view.default, _ATEN.reshape.default, _ATEN.slice.Tensor):
        node = node.args[0]
    products = (_ATEN.mm.default, _ATEN.addmm.default)
    return node.target in products or getattr(node.target, "namespace", "") == "joestar"
