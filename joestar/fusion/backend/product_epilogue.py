"""A product applies the bias, ReLU and dropout of its rows, or the mask of their gradient, while it holds them (GPU).

Before                                                       After
    h = aten.mm(x, w)                                            y = mm_bias_relu(x, w, b, bits, scale)
    y = bias_relu(h, b, bits, scale)

    e = aten.mm(grad, w)                                         g = mm_bias_relu_grad(grad, w, kept, scale, True)
    g = bias_relu_grad(e, kept, scale, True)

    h = aten.view(head_linear(x, w), [n, H C])                   y = head_linear_bias_relu(x, w, b, bits, scale)
    y = bias_relu(h, b, bits, scale)

    g = bias_relu_grad(e, kept, scale, True)                     g = bias_relu_grad_head_linear(e, kept, scale, True, w)
    x = head_linear(aten.view(g[0], [n, H, C]), w)               x = g[2]

``bias-relu`` made the op beside the product: a pass over the rows that the product has just stored, or is about to
read. Together they take as long as the product does. On a graph of Inductor's, in front of its own rewrites and behind
``gradient-sums``.

Must not fire when the product in front has another reader, when the op reads an addend or more parts of the gradient,
for a weight too large to be kept by the programs that go through the rows (``kernels.layout``), for few rows or a
number that is not known (padded programs know it), or where no tensor core multiplies (float32 without TF32).
"""

import operator

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.kernels import has_triton
from joestar.kernels.layout import keeps_head_weight, keeps_weight
from joestar.kernels.machine import in_tensor_cores

NAME = "product-epilogue"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_FORWARD, _GRAD = _JOESTAR.bias_relu.default, _JOESTAR.bias_relu_grad.default
_HEADS = _JOESTAR.head_linear.default
_FUSED = {_FORWARD: _JOESTAR.mm_bias_relu.default, _GRAD: _JOESTAR.mm_bias_relu_grad.default}
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
_ROWS = 512
"""Rows from which it pays: fewer are a tile or two of a program that has a weight to fetch first."""


def run(graph: fx.Graph) -> int:
    """Rewrites every product that fits; returns how many."""
    if not has_triton():
        return 0
    made = 0
    for target, fused in _FUSED.items():
        for node in list(graph.find_nodes(op="call_function", target=target)):
            if any(rest for rest in node.args[4:]) or node.kwargs:  # an addend, or more parts
                continue
            if _fits(node):
                made += _behind(graph, node, node.args[0], fused)
            elif target is _FORWARD and (product := _of_heads(node)):
                made += _behind(graph, node, product, _JOESTAR.head_linear_bias_relu.default)
            elif target is _GRAD and (product := _through_heads(node)):
                made += _in_front(graph, node, product)
    return made


def _behind(graph: fx.Graph, node: fx.Node, product: fx.Node, fused) -> int:
    """The op that follows the product is part of it."""
    with graph.inserting_before(node):
        new = graph.call_function(fused, (*product.args, *node.args[1:4]))
    new.meta = {**origin(node), "val": node.meta["val"]}
    node.replace_all_uses_with(new)
    for gone in dict.fromkeys((node, node.args[0], product)):  # a view may stand in between
        graph.erase_node(gone)
    return 1


def _in_front(graph: fx.Graph, node: fx.Node, product: fx.Node) -> int:
    """The op in front of the product is part of it. What makes the weight does not depend on either, and moves up."""
    rows, weight = product.args
    _raise(weight, node)
    with graph.inserting_before(node):
        new = graph.call_function(_JOESTAR.bias_relu_grad_head_linear.default, (*node.args[:4], weight))
        through = graph.call_function(operator.getitem, (new, 2))
    new.meta = {**origin(node), "val": (*node.meta["val"], product.meta["val"])}
    through.meta = {**origin(product), "val": product.meta["val"]}
    product.replace_all_uses_with(through)
    node.replace_all_uses_with(new)
    for gone in (product, rows, node):
        if not gone.users:
            graph.erase_node(gone)
    return 1


def _raise(node: fx.Node, place: fx.Node) -> None:
    """Moves ``node`` and what it is made of in front of ``place``, where they are not."""
    if place < node:
        for made_of in node.all_input_nodes:
            _raise(made_of, place)
        place.prepend(node)


def _depends(node: fx.Node, on: fx.Node) -> bool:
    return node is on or (on < node and any(_depends(made_of, on) for made_of in node.all_input_nodes))


def _fits(node: fx.Node) -> bool:
    product = node.args[0]
    if product.target is not _ATEN.mm.default or len(product.users) != 1 or product.kwargs:
        return False
    rows, weight = map(tensor, product.args)
    if rows is None or weight is None or rows.device.type != "cuda":
        return False
    sizes = (*rows.shape, weight.shape[1])
    if not all(isinstance(size, int) for size in sizes) or sizes[0] < _ROWS or rows.stride() != (sizes[1], 1):
        return False
    return in_tensor_cores(rows.dtype) and keeps_weight(rows.dtype, *sizes[1:])


def _of_heads(node: fx.Node) -> fx.Node | None:
    """The product whose heads' columns, side by side, ``node`` reads."""
    view = node.args[0]
    if view.target not in _VIEWS or len(view.users) != 1:
        return None
    product = view.args[0]
    if product.target is not _HEADS or len(product.users) != 1:
        return None
    x, weight = map(tensor, product.args)
    if x is None or weight is None or not _heads_fit(x, weight.shape[1], weight):
        return None
    return product if tuple(view.meta["val"].shape) == (x.shape[0], weight.shape[0] * weight.shape[1]) else None


def _through_heads(node: fx.Node) -> fx.Node | None:
    """The product that reads the rows of ``node`` head by head."""
    for rows in node.users:
        for view in rows.users if rows.args == (node, 0) else ():
            for product in view.users if view.target in _VIEWS else ():
                if product.target is _HEADS and product.args[0] is view:
                    x, weight = map(tensor, product.args)
                    if x is not None and weight is not None and _heads_fit(x, weight.shape[2], weight):
                        return None if _depends(product.args[1], node) else product
    return None


def _heads_fit(x: torch.Tensor, columns: int, weight: torch.Tensor) -> bool:
    """``columns``: those of a head that have bits; rows ``x`` ``[n, H, ...]``."""
    others = weight.shape[1] * weight.shape[2] // columns if isinstance(columns, int) and columns else 0
    sizes = (*x.shape, others)
    if x.device.type != "cuda" or not all(isinstance(size, int) for size in sizes) or sizes[0] < _ROWS:
        return False
    return x.is_contiguous() and in_tensor_cores(x.dtype) and keeps_head_weight(x.dtype, x.shape[1], others, columns)
