"""Gather-together: products of the same rows of the feature table are one op, which gathers them once.

Before                                              After
    k   = gather_linear(features, srcs, w_k, b)         y   = gather_linears(features, srcs, [w_k, w_v], [b])
    v   = gather_linear(features, srcs, w_v, None)      k, v = y[0], y[1]

Keys and values of attention, gates, rows and what modulates them. Every product has a result of its own, as contiguous
as before; forward the rows are read once, and backward they are gathered once for the gradients of all weights.

Must not fire for a product alone, for weights of several shapes or dtypes (an op has one tile for all), or for weights
that the step computes behind the first of the products or writes.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.record import Reject
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.sizes import same_shape

PATTERN = "gather-together"
_JOESTAR = torch.ops.joestar
_PRODUCT = _JOESTAR.gather_linear.default


def run(gm: fx.GraphModule, context) -> int:
    """Puts the products of the same rows together; returns how many groups of them."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    groups: list[list[fx.Node]] = []
    for node in gm.graph.find_nodes(op="call_function", target=_PRODUCT):
        group = next((group for group in groups if _joins(node, group[0], order)), None)
        if group is None:
            groups.append([node])
        else:
            group.append(node)
    together = 0
    for group in groups:
        if context.admits(PATTERN, group[0], _match(group, written)):
            _rewrite(gm.graph, group, context)
            together += 1
    return together


def _joins(node: fx.Node, first: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a product is of the same rows as the first of others, by a weight of the same form that is there then."""
    if node.args[:2] != first.args[:2] or any(order[part] > order[first] for part in node.args[2:] if part is not None):
        return False
    one, other = tensor(node.args[2]), tensor(first.args[2])
    return one.dtype == other.dtype and same_shape(one.shape, other.shape)


def _match(group: list[fx.Node], written: set[fx.Node]) -> bool | Reject:
    if len(group) < 2:
        return Reject("no other product of these rows has a weight of this shape")
    parts = [part for node in group for part in (node, *node.args) if part is not None]
    for part in parts:
        if root(part) in written:
            return Reject(f"{part.name} is written in the step")
    return True


def _rewrite(graph: fx.Graph, group: list[fx.Node], context) -> None:
    products = sorted(group, key=lambda node: node.args[3] is None)  # those with a bias come first
    table, ids = group[0].args[:2]
    weights = [node.args[2] for node in products]
    biases = [node.args[3] for node in products if node.args[3] is not None]
    with graph.inserting_before(group[0]):
        every = emit(graph, group[0], _JOESTAR.gather_linears.default, table, ids, weights, biases)
        results = [emit(graph, node, operator.getitem, every, i) for i, node in enumerate(products)]
    context.fired(PATTERN, every, f"{len(group)} products of {table.name}")
    for node, result in zip(products, results, strict=True):
        node.replace_all_uses_with(result)
        graph.erase_node(node)
