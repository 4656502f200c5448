"""A product applies the bias, ReLU and dropout of its rows, or the mask of their gradient, while it holds them (GPU).

Before                                                       After
    h = aten.mm(x, w)                                            y = mm_bias_relu(x, w, b, bits, scale)
    y = bias_relu(h, b, bits, scale)

    e = aten.mm(grad, w)                                         g = mm_bias_relu_grad(grad, w, kept, scale, True)
    g = bias_relu_grad(e, kept, scale, True)

    h = aten.view(head_linear(x, w), [n, H C])                   y = head_linear_bias_relu(x, w, b, bits, scale)
    y = bias_relu(h, b, bits, scale)

    g = bias_relu_grad(e, kept, scale, True)                     g = head_linear_bias_relu_grad(
    rows = aten.view(g[0], [n, H, C])                                e, kept, scale, True, x, w
    of_x = head_linear(rows, aten.permute(w, [0, 2, 1]))         )
    of_w = head_linear_weight_grad(x, rows)                      of_x, of_w, of_b = g[0], g[1], g[2]

``bias-relu`` made the op beside the product: a pass over the rows that the product has just stored, or is about to
read. Together they take as long as the product does. On a graph of Inductor's, in front of its own rewrites and behind
``gradient-sums``.

Must not fire when the rows in between have another reader, when the op reads an addend or more parts of the gradient,
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
_HEADS, _HEADS_WEIGHT = _JOESTAR.head_linear.default, _JOESTAR.head_linear_weight_grad.default
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
            elif target is _GRAD and (readers := _through_heads(node)):
                made += _in_front(graph, node, *readers)
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


def _in_front(graph: fx.Graph, node: fx.Node, of_x: fx.Node, of_weight: fx.Node) -> int:
    """The op is part of both products that read its rows. What these read beside it is made before."""
    rows, turned, x = *of_x.args, of_weight.args[0]
    for read in (turned, x):
        _raise(read, node)
    with graph.inserting_before(node):
        weight = graph.call_function(_ATEN.permute.default, (turned, [0, 2, 1]))
        new = graph.call_function(_JOESTAR.head_linear_bias_relu_grad.default, (*node.args[:4], x, weight))
        results = [graph.call_function(operator.getitem, (new, place)) for place in range(3)]
    weight.meta = {**origin(node), "val": turned.meta["val"].permute(0, 2, 1)}
    new.meta = {**origin(node), "val": (of_x.meta["val"], of_weight.meta["val"], node.meta["val"][1])}
    olds = [of_x, of_weight, *(user for user in node.users if user.args[1] == 1)]
    for old, place in zip(olds, (0, 1, 2, 2), strict=False):
        old.replace_all_uses_with(results[place])
    for place, result in enumerate(results):
        result.meta = {**origin(node), "val": new.meta["val"][place]}
    for gone in dict.fromkeys((*olds, rows, *node.users, node)):
        graph.erase_node(gone)
    for result in results:
        if not result.users:
            graph.erase_node(result)
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
    if rows is None or weight is None or not _on_gpu(rows):
        return False
    sizes = (*rows.shape, weight.shape[1])
    if not all(isinstance(size, int) for size in sizes) or sizes[0] < _ROWS or rows.stride() != (sizes[1], 1):
        return False
    return in_tensor_cores(rows.dtype) and keeps_weight(rows.dtype, *sizes[1:])


def _on_gpu(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"


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


def _through_heads(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The products that read the rows of ``node`` head by head, if nothing else does: those of rows and of weights."""
    results = {user.args[1]: user for user in node.users}
    if len(results) != len(node.users) or 0 not in results or len(results[0].users) != 1:
        return None
    (rows,) = results[0].users
    readers = {user.target: user for user in rows.users} if rows.target in _VIEWS else {}
    if len(rows.users) != 2 or set(readers) != {_HEADS, _HEADS_WEIGHT}:
        return None
    of_x, of_weight = readers[_HEADS], readers[_HEADS_WEIGHT]
    if of_x.args[0] is not rows or of_weight.args[1] is not rows:
        return None
    value, weight, x = map(tensor, (*of_x.args, of_weight.args[0]))
    if value is None or weight is None or x is None or not x.is_contiguous():
        return None
    if not _heads_fit(value, weight.shape[2], weight):
        return None
    return None if any(_depends(read, node) for read in (of_x.args[1], of_weight.args[0])) else (of_x, of_weight)


def _heads_fit(x: torch.Tensor, columns: int, weight: torch.Tensor) -> bool:
    """``columns``: those of a head that have bits; rows ``x`` ``[n, H, ...]``."""
    others = weight.shape[1] * weight.shape[2] // columns if isinstance(columns, int) and columns else 0
    sizes = (*x.shape, others)
    if not _on_gpu(x) or not all(isinstance(size, int) for size in sizes) or sizes[0] < _ROWS:
        return False
    return x.is_contiguous() and in_tensor_cores(x.dtype) and keeps_head_weight(x.dtype, x.shape[1], others, columns)
