"""Edges of which a batch may have none, and what is computed from all of them meets its rows.

    mean = aten.mean.dim(m, [0])        m: [s43, 16], edges; without any it is NaN, in PyTorch, too
    gate = aten.mul.Tensor(m, mean)

PyTorch multiplies no rows by NaN then. Padded rows would be multiplied, and their gradients, 0 times NaN, reach the
parameters: such a batch runs exactly.
"""

import sympy
from torch import Tensor, fx

from joestar.lowering.counts import SHAPE_SCALARS, is_symbolic
from joestar.lowering.sizes import SizeTable, padded_dims
from joestar.torch_private import OpOverload, tree_leaves

Sizes = set[sympy.Expr]


def meetings(gm: fx.GraphModule, table: SizeTable) -> dict[fx.Node, Sizes]:
    """Nodes that compute rows of edges with what was computed from all of some edges -> the sizes of these."""
    edges = {size for size in table.edges if size.is_Symbol}
    whole: dict[fx.Node, Sizes] = {}
    found: dict[fx.Node, Sizes] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not edges:
            continue
        values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        used = _numbers(node, edges).union(*(whole.get(each, ()) for each in node.all_input_nodes))
        if any(map(padded_dims, values)):
            if used and any(_sizes(value, edges) for value in values):
                found[node] = used
        elif any(value.is_floating_point() or value.is_complex() for value in values):
            used = used.union(*(_sizes(each.meta.get("val"), edges) for each in node.all_input_nodes))
            if used:
                whole[node] = used
    return found


def _sizes(value, edges: Sizes) -> Sizes:
    """Sizes of edges alone that a tensor has: with a row per node beside, it is never empty."""
    return {size for size in padded_dims(value).values() if size.free_symbols <= edges}


def _numbers(node: fx.Node, edges: Sizes) -> Sizes:
    """Numbers of edges among what an op computes with (``x / block.num_edges``)."""
    if not isinstance(node.target, OpOverload) or node.target in SHAPE_SCALARS:
        return set()
    found = set()
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind in ("Tensor", "number", "Scalar") and isinstance(value, fx.Node) and is_symbolic(value.meta.get("val")):
            found.add(value.meta["val"].node.expr)
    return {size for size in found if size.free_symbols and size.free_symbols <= edges}
