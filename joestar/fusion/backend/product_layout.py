"""Gradients of many rows are multiplied by a copy of the weight whose columns lie one behind the other (GPU, TF32).

Before                                            After
    g = aten.mm(grad, w)    grad: [n, C]              t = turn_all([w, v])
                            w: [C, F]                 g = aten.mm(grad, aten.permute(t[0], [1, 0]))    t[0]: [F, C]
    e = aten.mm(g, v)                                 e = aten.mm(g, aten.permute(t[1], [1, 0]))

Tensor cores read TF32 operands along the dimension that is added up. A product forward, ``grad @ w.T``, is laid out so;
of one backward the library turns every tile of the weight, and one of 120,000 rows by 128 x 128 takes half as long
again. Copies of weights that are there from the start are one launch of a microsecond or two; of others, each is one.
On a graph of Inductor's, in front of its own rewrites.

Must not fire for few rows, or a number that is not known (padded programs know it), for large weights, for other dtypes
(16 bits are read along either dimension, float32 without TF32 in no tensor core), or for weights that lie so already.
"""

import operator

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.kernels.machine import products_in_tf32

NAME = "product-layout"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_ROWS = 2**15
"""Rows from which the copy pays."""
_WEIGHT = 2**18
"""Numbers of the largest weight that is copied."""


def run(graph: fx.Graph) -> int:
    """Rewrites every product that fits; returns how many."""
    if not products_in_tf32():
        return 0
    found = list(graph.find_nodes(op="call_function", target=_ATEN.mm.default))
    products = [node for node in found if _fits(*map(tensor, node.args[:2]))]
    weights = list(dict.fromkeys(node.args[1] for node in products))
    given = [weight for weight in weights if weight.op == "placeholder"]
    rest = [weight for weight in weights if weight not in given]
    groups = ([given] if given else []) + [[weight] for weight in rest]
    turned = {}
    for group in groups:
        first = next(node for node in products if node.args[1] in group)
        turned.update(zip(group, _turned(graph, group, first), strict=True))
    for node in products:
        _rewrite(graph, node, turned[node.args[1]])
    return len(products)


def _turned(graph: fx.Graph, weights: list[fx.Node], first: fx.Node) -> list[fx.Node]:
    """Copies of weights, turned, in front of the first product that reads one of them."""
    with graph.inserting_before(first):
        copies = graph.call_function(_JOESTAR.turn_all.default, (weights,))
        values = [weight.meta["val"] for weight in weights]
        copies.meta = {**origin(first), "val": [value.new_empty(value.shape[::-1]) for value in values]}
        return [_call(graph, first, operator.getitem, copies, i) for i in range(len(weights))]


def _fits(rows: torch.Tensor | None, weight: torch.Tensor | None) -> bool:
    if rows is None or weight is None or rows.dtype != torch.float32 or rows.device.type != "cuda":
        return False
    number, sizes = rows.shape[0], weight.shape
    if not all(isinstance(size, int) and size > 1 for size in (number, *sizes)):
        return False
    return number >= _ROWS and sizes.numel() <= _WEIGHT and weight.stride() == (sizes[1], 1)


def _rewrite(graph: fx.Graph, node: fx.Node, copied: fx.Node) -> None:
    with graph.inserting_before(node):
        again = _call(graph, node, _ATEN.permute.default, copied, [1, 0])
        new = graph.call_function(_ATEN.mm.default, (node.args[0], again))
    new.meta = {**origin(node), "val": node.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _call(graph: fx.Graph, like: fx.Node, target, *args, **kwargs) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    node.meta = {**origin(like), "val": target(*values, **named)}
    return node
