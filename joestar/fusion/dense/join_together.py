"""All joined weights of a step are made by one op, and their gradients are split by one: a launch each on a GPU.

Before                                       After
    w   = joestar.join_columns([a, b, c], 8)     ws  = joestar.join_columns_all([a, b, c, d, e], [3, 2], [8, 6])
    out = aten.linear(both, w)                   w   = ws[0]
    v   = joestar.join_columns([d, e], 6)        v   = ws[1]
    y   = aten.linear(more, v, f)                out = aten.linear(both, w)
                                                 y   = aten.linear(more, v, f)

On a CPU both are taken apart again before they are compiled.

Must not fire for parts that the step computes (the sum of two biases) or writes, or for less than two joins.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit
from joestar.fusion.record import Reject
from joestar.lowering.functional import is_in_place, root

PATTERN = "join-together"
_JOESTAR = torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Puts the joins of inputs together; returns how many."""
    joins = list(gm.graph.find_nodes(op="call_function", target=_JOESTAR.join_columns.default))
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    matches = {node: _match(node, written) for node in joins}
    fitting = sum(map(bool, matches.values()))
    together = []
    for node, match in matches.items():
        if match and fitting < 2:
            match = Reject("there is no other join of inputs")
        if context.admits(PATTERN, node, match):
            together.append(node)
    if together:
        _rewrite(gm.graph, together, context)
    return len(together)


def _match(node: fx.Node, written: set[fx.Node]) -> bool | Reject:
    for part in node.args[0]:
        if part.op != "placeholder":
            return Reject(f"{part.name} is computed in the step")
        if part in written:
            return Reject(f"{part.name} is written in the step")
    return True


def _rewrite(graph: fx.Graph, joins: list[fx.Node], context) -> None:
    parts = [part for node in joins for part in node.args[0]]
    counts, widths = [len(node.args[0]) for node in joins], [node.args[1] for node in joins]
    with graph.inserting_before(joins[0]):
        every = emit(graph, joins[0], _JOESTAR.join_columns_all.default, parts, counts, widths)
        new = [emit(graph, node, operator.getitem, every, i) for i, node in enumerate(joins)]
    for node, matrix in zip(joins, new, strict=True):
        context.fired(PATTERN, matrix, f"{len(node.args[0])} parts, {node.args[1]} columns")
        node.replace_all_uses_with(matrix)
        graph.erase_node(node)
