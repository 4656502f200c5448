"""Rows that no later layer reads are not computed: a model over the union of a sample's hops is cut down to its hops.

Before (nodes 0 to n1 are seeds and their neighbours)     After
    y = spmm(indptr, indices, x, None, "mean")   [n]          p, e = first_rows(indptr, indices, ids1, n1)
    h = aten.relu(aten.linear(y, w, b))          [n]          y = spmm(p, e, x, None, "mean")               [n1]
    z = spmm(indptr, indices, h, None, "mean")   [n]          h = aten.relu(aten.linear(y, w, b))           [n1]
    o = aten.slice(z, 0, 0, num_seeds)                        p, e = first_rows(indptr, indices, seeds, num_seeds)
                                                              z = spmm(p, e, h, None, "mean")               [num_seeds]

Nothing is assumed of the model: a row is left out only where the graph shows that nobody reads it. In the union the
nodes of a hop come before those of the next, and an edge into a node of hop ``j`` comes from hop ``j + 1`` at the
farthest: rows read from an aggregation's first ``n_j`` are the first ``n_{j+1}`` of its operand. The structure may be
the union itself, that without loops, or one with a loop per node. (PyG's ``trim_to_layer`` is told which layer it is.)

What is computed per edge follows: edges of the first rows are the first edges, and a softmax per destination knows no
other destinations. Values of edges keep their number; those of rows that nobody reads are never read either (they are
what the op makes of zeros, like padding, and get gradients of 0). Attention stays recognisable to the passes behind:

    s = sddmm(indptr, indices, k, q, "dot")                   s = sddmm(p, e, k, aten.slice(q, 0, 0, n1), "dot")
    a = edge_softmax(indptr, s)                               a = edge_softmax(p, s)
    y = spmm(indptr, indices, v, a, "sum")       [n]          y = spmm(p, e, v, a, "sum")                       [n1]

Must not fire where the rows' readers do not treat each row by itself (a norm over all nodes, coefficients that the
model returns, an index by the user's own code): these read all rows, and so does what stands in front of them. Nor
where an op on values of edges may be infinite at zeros (``1 / s``): a gradient of 0 times that is NaN.
"""

import operator

import torch
from torch import fx

from joestar.fusion.clean import dce
from joestar.fusion.match.emit import emit, name
from joestar.fusion.record import Reject
from joestar.fusion.sampling.union_rows import (
    OFFSETS,
    Union,
    edge_by_edge,
    leading,
    need,
    needs_of,
    over_edges,
    roots_of,
    row_by_row,
    union_of,
)
from joestar.lowering.sizes import same_size

PATTERN = "trim"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_MERGE, _SPMM = _JOESTAR.merge_hops.default, _JOESTAR.spmm.default


def run(gm: fx.GraphModule, context) -> int:
    """Cuts down what reads the union of a sample's hops; returns the number of aggregations that became smaller."""
    trimmed = 0
    for merge in list(gm.graph.find_nodes(op="call_function", target=_MERGE)):
        union = union_of(merge)
        if union is None or (roots := roots_of(gm.graph, union)) == []:
            continue
        needs = needs_of(gm.graph, union)
        if context.admits(PATTERN, merge, _match(roots, needs, union)):
            trimmed += _Cut(gm.graph, union, needs, context).run(roots)
            dce.run(gm, context)
    return trimmed


def _match(roots: list[fx.Node], needs: dict[fx.Node, int], union: Union) -> bool | Reject:
    most = len(union.firsts)
    if any(needs[root.args[0]] < most for root in roots):
        return True
    row = roots[0].args[0]
    reader = next((user for user in row.users if need(user, row, union, needs) == most), row)
    return Reject(f"all rows of {row.name} are read by {name(reader)}")


# --- the rewrite ---


class _Cut:
    """Twins of values that have only the rows that are read."""

    def __init__(self, graph: fx.Graph, union: Union, needs: dict[fx.Node, int], context):
        self.graph, self.union, self.needs, self.context = graph, union, needs, context
        self.twins: dict[fx.Node, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self.heads: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}

    def run(self, roots: list[fx.Node]) -> int:
        """Makes a twin of whatever is read in part; returns the number of aggregations among them."""
        cut = 0
        for node in [node for node in self.graph.nodes if self.needs.get(node, len(self.union.firsts)) < self.most]:
            cut += self._twin(node)
        for root in roots:
            with self.graph.inserting_before(root):
                root.replace_all_uses_with(self._rows(root, root.args[0], leading(root, self.union)))
            self.graph.erase_node(root)
        return cut

    @property
    def most(self) -> int:
        return len(self.union.firsts)

    def _twin(self, node: fx.Node) -> int:
        """Makes the twin, if the op allows that; returns 1 for an aggregation."""
        over = over_edges(node, self.union)
        with self.graph.inserting_before(node):
            if over is not None:
                new = self._twin_over_edges(node, *over)
            else:
                parts = self._edge_parts(node) if node in self.union.owners else self._row_parts(node)
                if not parts:
                    return 0
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: parts.get(value, value))
                new = emit(self.graph, node, node.target, *args, **kwargs)
        self.twins[node] = new
        if node.target is not _SPMM or over is None:
            return 0
        self.context.fired(PATTERN, new, f"rows of nodes up to hop {self.needs[node]} of {self.most}")
        return 1

    def _row_parts(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return {x: self._rows(node, x, self.needs[node]) for x in row_by_row(node, self.union.holds)}

    def _edge_parts(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return {x: self.twins[x] for x in edge_by_edge(node, self.union) if x in self.twins}

    def _twin_over_edges(self, node: fx.Node, rows: dict[int, int], edges: tuple[int, ...]) -> fx.Node:
        level, args, place = self.needs[node], list(node.args), OFFSETS[node.target]
        for operand, farther in rows.items():
            if args[operand] is not None:
                args[operand] = self._rows(node, args[operand], min(level + farther, self.most))
        for operand in edges:
            args[operand] = self.twins.get(args[operand], args[operand])
        indices = node.args[1] if node.args[1] in self.union.edges else self.union.sources(node.args[place])
        args[place], sources = self._head(node, indices, level)
        if args[1] is indices:
            args[1] = sources
        return emit(self.graph, node, node.target, *args)

    def _rows(self, like: fx.Node, value: fx.Node, level: int) -> fx.Node:
        """The rows of a value up to those of a hop, computed in front of ``like``."""
        union = self.union
        if value is union.nodes and level < self.most:
            return union.firsts[level]
        found, has = (self.twins[value], self.needs[value]) if value in self.twins else (value, self.most)
        if has == level:
            return found
        if (value, level) not in self.parts:
            made = emit(self.graph, like, _ATEN.slice.Tensor, found, 0, 0, self._size(level))
            made.meta.update({key: entry for key, entry in value.meta.items() if key not in made.meta})
            self.parts[value, level] = made
        return self.parts[value, level]

    def _size(self, level: int) -> fx.Node:
        """The input that says how many nodes there are up to a hop."""
        inputs = self.graph.find_nodes(op="placeholder")
        sizes = [node for node in inputs if isinstance(node.meta["val"], torch.SymInt)]
        return next(node for node in sizes if same_size(node.meta["val"], self.union.rows(level)))

    def _head(self, like: fx.Node, indices: fx.Node, level: int) -> tuple[fx.Node, fx.Node]:
        """The structure of an op over edges, cut down to the rows up to those of a hop."""
        seeds = level == 0 and like.args[1] is self.union.seeds_edges[2]
        if seeds and like.target is _SPMM and like.args[3] is None:
            return self.union.seeds_edges[:2]
        if (indices, level) not in self.heads:
            head = (self.union.edges[indices], indices, self.union.firsts[level], self.union.counts[level])
            both = emit(self.graph, like, _JOESTAR.first_rows.default, *head)
            self.heads[indices, level] = tuple(emit(self.graph, like, operator.getitem, both, i) for i in range(2))
        return self.heads[indices, level]
