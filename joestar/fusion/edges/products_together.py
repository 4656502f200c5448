"""Products-together: products of the same rows that one segment op reads are one product, whose columns it reads.

Before                                                   After
    k = aten.linear(x, w_k, b_k)          [n, W]             w = aten.cat([w_k, w_v], 0)
    v = aten.linear(x, w_v, b_v)          [n, W]             b = aten.cat([b_k, b_v], 0)
    y, = segment(indptr, indices, [q, k, v], ...)            m = aten.linear(x, w, b)               [n, 2 W]
                                                             k, v = m[:, :W], m[:, W:]
                                                             y, = segment(indptr, indices, [q, k, v], ...)

``column-leaves`` then reads the columns in the matrix. The rows are read once, forward and for the gradient of the
weights, and the gradient of the rows is one product, not a sum of several. Keys and values, gates and what they gate.

Must not fire when a product has another reader or is another kind of leaf, when weights have other shapes or dtypes, or
are computed behind the first of the products or written in the step; nor where a bias is no vector of the columns.
"""

import torch
from torch import fx

from joestar.fusion.edges.edge_steps import fixed
from joestar.fusion.match.emit import emit, has_plain_bias, is_product, tensor
from joestar.fusion.record import Reject
from joestar.kernels.segment_program import BESIDE, SegmentProgram, groups_of
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.sizes import same_shape

PATTERN = "products-together"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SEGMENT, _GATHERED = _JOESTAR.segment.default, _JOESTAR.gather_linear.default


def run(gm: fx.GraphModule, context) -> int:
    """Puts the products of every segment op together; returns how many groups of them."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    together = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=_SEGMENT)):
        for group in _groups(node):
            if context.admits(PATTERN, node, _match(group, node, order, written)):
                _rewrite(gm.graph, group, context)
                together += 1
    return together


def _groups(node: fx.Node) -> list[list[fx.Node]]:
    """Products of the same rows among the leaves of a kind, two or more, in the order of the leaves."""
    program = SegmentProgram.parse(node.args[3])
    if program.beside:
        return []
    found: dict[tuple, list[fx.Node]] = {}
    for kind, (rows, *_) in zip(program.leaves, groups_of(program.leaves, node.args[2]), strict=True):
        if kind in BESIDE and (is_product(rows) or rows.target is _GATHERED):
            found.setdefault((kind, rows.target, *_rows(rows)), []).append(rows)
    return [group for products in found.values() if len(group := list(dict.fromkeys(products))) > 1]


def _rows(product: fx.Node) -> tuple[fx.Node, ...]:
    """What is multiplied: rows, or a table and ids."""
    return product.args[:2] if product.target is _GATHERED else product.args[:1]


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The weight and the bias."""
    weight, *bias = product.args[len(_rows(product)) :]
    return weight, bias[0] if bias else product.kwargs.get("bias")


def _match(group: list[fx.Node], node: fx.Node, order: dict[fx.Node, int], written: set[fx.Node]) -> bool | Reject:
    first = min(group, key=order.__getitem__)
    shape, dtype = tensor(_factors(first)[0]).shape, tensor(_factors(first)[0]).dtype
    for product in group:
        weight, bias = _factors(product)
        if list(product.users) != [node] or sum(operand is product for operand in node.args[2]) != 1:
            return Reject(f"{product.name} has another reader")
        if not same_shape(tensor(weight).shape, shape) or tensor(weight).dtype != dtype or not fixed(shape):
            return Reject("the weights have several shapes or dtypes")
        if bias is not None and (tensor(bias).dtype != dtype or not _plain(product)):
            return Reject("a bias has another dtype than the weights, or is no vector of the columns")
        for part in (*_rows(product), weight, bias):
            if part is None:
                continue
            if order[part] > order[first]:
                return Reject(f"{part.name} is computed behind {first.name}")
            if root(part) in written:
                return Reject(f"{part.name} is written in the step")
    return True


def _plain(product: fx.Node) -> bool:
    return product.target is _GATHERED or has_plain_bias(product)


def _rewrite(graph: fx.Graph, group: list[fx.Node], context) -> None:
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min(group, key=order.__getitem__)
    weights, biases = zip(*map(_factors, group), strict=True)
    width = int(tensor(weights[0]).shape[0])
    with graph.inserting_before(first):
        weight = emit(graph, first, _ATEN.cat.default, list(weights), 0)
        bias = None
        if any(part is not None for part in biases):
            like = next(tensor(part) for part in biases if part is not None)
            none = [part for part in biases if part is None]
            zeros = none and emit(graph, first, _ATEN.full.default, [width], 0, dtype=like.dtype, device=like.device)
            bias = emit(graph, first, _ATEN.cat.default, [zeros if part is None else part for part in biases], 0)
        matrix = emit(graph, first, first.target, *_rows(first), weight, bias)
        columns = [
            emit(graph, product, _ATEN.slice.Tensor, matrix, 1, place * width, (place + 1) * width)
            for place, product in enumerate(group)
        ]
    context.fired(PATTERN, matrix, f"{len(group)} products of {_rows(first)[0].name}")
    for product, part in zip(group, columns, strict=True):
        product.replace_all_uses_with(part)
        graph.erase_node(product)
