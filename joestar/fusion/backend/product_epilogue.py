"""A product applies the bias, ReLU and dropout of its rows, or the mask of their gradient, while it holds them (GPU).

Before                                                       After
    h = aten.mm(x, w)                                            y = mm_bias_relu(x, w, b, bits, scale)
    y = bias_relu(h, b, bits, scale)

    e = aten.mm(grad, w)                                         g = mm_bias_relu_grad(grad, w, kept, scale, True)
    g = bias_relu_grad(e, kept, scale, True)

``bias-relu`` made the second op of either: a pass over the rows that the product has just stored. Together they take as
long as the product does. On a graph of Inductor's, in front of its own rewrites and behind ``gradient-sums``.

Must not fire when the product has another reader, when the op reads an addend or more parts of the gradient, for a
weight too large to be kept by the programs that go through the rows (``kernels.layout.keeps_weight``), for few rows or
a number that is not known (padded programs know it), or where no tensor core multiplies (float32 without TF32).
"""

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.kernels import has_triton
from joestar.kernels.layout import keeps_weight
from joestar.kernels.machine import in_tensor_cores

NAME = "product-epilogue"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_FUSED = {
    _JOESTAR.bias_relu.default: _JOESTAR.mm_bias_relu.default,
    _JOESTAR.bias_relu_grad.default: _JOESTAR.mm_bias_relu_grad.default,
}
_ROWS = 512
"""Rows from which it pays: fewer are a tile or two of a program that has a weight to fetch first."""


def run(graph: fx.Graph) -> int:
    """Rewrites every product that fits; returns how many."""
    if not has_triton():
        return 0
    made = 0
    for target, fused in _FUSED.items():
        for node in list(graph.find_nodes(op="call_function", target=target)):
            if not _fits(node):
                continue
            product = node.args[0]
            with graph.inserting_before(node):
                new = graph.call_function(fused, (*product.args, *node.args[1:4]))
            new.meta = {**origin(node), "val": node.meta["val"]}
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            graph.erase_node(product)
            made += 1
    return made


def _fits(node: fx.Node) -> bool:
    product = node.args[0]
    if product.target is not _ATEN.mm.default or len(product.users) != 1 or product.kwargs or node.kwargs:
        return False
    if any(rest for rest in node.args[4:]):  # an addend, or more parts
        return False
    rows, weight = map(tensor, product.args)
    if rows is None or weight is None or rows.device.type != "cuda":
        return False
    sizes = (*rows.shape, weight.shape[1])
    if not all(isinstance(size, int) for size in sizes) or sizes[0] < _ROWS or rows.stride() != (sizes[1], 1):
        return False
    return in_tensor_cores(rows.dtype) and keeps_weight(rows.dtype, *sizes[1:])
