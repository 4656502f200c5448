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
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.clean import dce
from joestar.fusion.match.emit import emit, leads, name, tensor
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.rules.pointwise_ops import POINTWISE, SINGULAR
from joestar.lowering.sizes import same_size
from joestar.torch_private import OpOverload

PATTERN = "trim"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_MERGE, _COMPACT, _SPMM = _JOESTAR.merge_hops.default, _JOESTAR.compact.default, _JOESTAR.spmm.default
_OFFSETS = {
    _SPMM: 0,
    _JOESTAR.sddmm.default: 0,
    _JOESTAR.edge_softmax.default: 0,
    _JOESTAR.keyed_edge_dropout.default: 1,
}
"""Ops over edges -> the position of the offsets among their arguments."""
_ROWS = {_SPMM: {2: 1}, _JOESTAR.sddmm.default: {2: 1, 3: 0}, _JOESTAR.keyed_edge_dropout.default: {2: 0}}
"""... -> the positions of values with a row per node, and how many hops farther than their results these are read."""
_EDGES = {_SPMM: (3,), _JOESTAR.edge_softmax.default: (1,), _JOESTAR.keyed_edge_dropout.default: (0,)}
"""... -> the positions of values of edges."""
_UNARY = {"clone", "contiguous", "to", "_to_copy", "detach", "alias", "layer_norm", "rms_norm"}
_ALONG = frozenset(
    ["unsqueeze", "unflatten", "select", "slice", "sum", "mean", "amax", "amin", "softmax", "log_softmax", "squeeze"]
)


def run(gm: fx.GraphModule, context) -> int:
    """Cuts down what reads the union of a sample's hops; returns the number of aggregations that became smaller."""
    trimmed = 0
    for merge in list(gm.graph.find_nodes(op="call_function", target=_MERGE)):
        union = _union(merge)
        if union is None or (roots := _roots(gm.graph, union)) == []:
            continue
        needs = _needs(gm.graph, union)
        if context.admits(PATTERN, merge, _match(roots, needs, union)):
            trimmed += _Cut(gm.graph, union, needs, context).run(roots)
            dce.run(gm, context)
    return trimmed


# --- the union and its structures ---


@dataclass
class _Union:
    """The nodes of a sample, hop by hop.

    Attributes:
        nodes: ids of all of them; firsts, counts: per hop from the seeds: ids of the nodes up to it, and their number.
        seeds_edges: offsets and sources of the seeds' edges, and the sources of the union's.
        edges: sources of the edges -> offsets, for every structure among these nodes that is known.
        owners: values of edges of which only those of first rows are read -> offsets of these edges.
    """

    nodes: fx.Node
    firsts: list[fx.Node]
    counts: list[fx.Node]
    seeds_edges: tuple[fx.Node, fx.Node, fx.Node | None]
    edges: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owners: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def size(self):
        """Number of nodes."""
        return tensor(self.nodes).shape[0]

    def rows(self, level: int):
        """Number of nodes up to a hop."""
        return self.size if level == len(self.firsts) else tensor(self.firsts[level]).shape[0]

    def level(self, size) -> int | None:
        """The hop up to which there are so many nodes."""
        return next((level for level in range(len(self.firsts) + 1) if same_size(self.rows(level), size)), None)

    def holds(self, value) -> bool:
        """Whether a value has a row per node."""
        found = tensor(value) if isinstance(value, fx.Node) else None
        return found is not None and found.dim() > 0 and same_size(found.shape[0], self.size)

    def sources(self, indptr: fx.Node) -> fx.Node | None:
        """Sources of the edges with these offsets."""
        return next((indices for indices, offsets in self.edges.items() if offsets is indptr), None)

    def holds_edges(self, value, indptr: fx.Node) -> bool:
        """Whether a value has a row per edge."""
        found = tensor(value) if isinstance(value, fx.Node) else None
        edges = tensor(self.sources(indptr)).shape[0]
        return found is not None and found.dim() > 0 and same_size(found.shape[0], edges) and not self.holds(value)


def _union(merge: fx.Node) -> _Union | None:
    """What a ``merge_hops`` puts together, if these are hops that were compacted one after the other."""
    indptrs, values, nodes, starts, _ = merge.args
    compacts = [value.args[0] for value in values if value.target is operator.getitem and value.args[1] == 1]
    if len(compacts) != len(values) or any(node.target is not _COMPACT for node in compacts):
        return None
    firsts = [node.args[0] for node in compacts]
    ends = [_item(node, 0) for node in compacts]
    counts = [node.args[1] for node in compacts]
    if None in ends or ends[-1] is not nodes or ends[:-1] != firsts[1:]:
        return None
    if [node.args[2] for node in compacts] != list(indptrs) or not _is_zero(starts[0]) or starts[1:] != counts[:-1]:
        return None
    union = _Union(nodes, firsts, counts, (indptrs[0], values[0], _item(merge, 1)))
    if _item(merge, 0) is not None and _item(merge, 1) is not None:
        union.edges[_item(merge, 1)] = _item(merge, 0)
    for node in merge.graph.nodes:
        _derived(node, union)
    return union


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _is_zero(node: fx.Node) -> bool:
    return node.target is _ATEN.zeros.default or (node.target is _ATEN.full.default and node.args[1] == 0)


def _derived(node: fx.Node, union: _Union) -> None:
    """Adds a structure that has some of the edges of a known one, or a loop more per node."""
    if node.target is _JOESTAR.append_loops.default and union.edges.get(node.args[1]) is node.args[0]:
        indptr, indices = _item(node, 0), _item(node, 1)
        union.edges |= {indices: indptr} if indptr is not None and indices is not None else {}
    if node.target is not _JOESTAR.rows_at.default and node.target is not _ATEN.index_select.default:
        return
    picked, table = node.args[-1], node.args[0]
    if table not in union.edges or picked.target is not operator.getitem or picked.args[1] != 1:
        return
    sample = picked.args[0]
    if sample.target is not _JOESTAR.weighted_sample.default or sample.args[0] is not union.edges[table]:
        return
    whole = sample.args[2] is union.nodes and sample.args[4] is True and sample.args[5] == -1
    if whole and _item(sample, 0) is not None:
        union.edges[node] = _item(sample, 0)


# --- which rows are read ---


def _roots(graph: fx.Graph, union: _Union) -> list[fx.Node]:
    """Leading rows of values with a row per node."""
    found = graph.find_nodes(op="call_function", target=_ATEN.slice.Tensor)
    return [node for node in found if union.holds(node.args[0]) and _leading(node, union) is not None]


def _leading(node: fx.Node, union: _Union) -> int | None:
    """The hop whose nodes' rows a slice has, if it has those from the first on."""
    if node.target is not _ATEN.slice.Tensor or argument(node, "dim") != 0:
        return None
    level = union.level(tensor(node).shape[0])
    return level if level is not None and leads(node, node.args[0], union.rows(level)) else None


def _needs(graph: fx.Graph, union: _Union) -> dict[fx.Node, int]:
    """The hop up to whose nodes rows are read: of every value with a row per node, and of edges' values with owners."""
    needs: dict[fx.Node, int] = {}
    for node in reversed(list(graph.nodes)):
        if union.holds(node):
            needs[node] = max((_need(user, node, union, needs) for user in node.users), default=len(union.firsts))
        else:
            found = {_edges_need(user, node, union, needs) for user in node.users}
            if found and None not in found and len({indptr for indptr, _ in found}) == 1:
                (union.owners[node], _), needs[node] = next(iter(found)), max(level for _, level in found)
    return needs


def _need(user: fx.Node, node: fx.Node, union: _Union, needs: dict[fx.Node, int]) -> int:
    most = len(union.firsts)
    if (over := _over_edges(user, union)) is not None:
        rows, _ = over
        return min(most, _level(user, union, needs) + max(rows.get(place, most) for place in _places(user, node)))
    if union.holds(user):
        return needs[user] if node in _row_by_row(user, union.holds) else most
    level = _leading(user, union)
    return most if level is None else level


def _edges_need(user: fx.Node, node: fx.Node, union: _Union, needs: dict[fx.Node, int]) -> tuple[fx.Node, int] | None:
    """(offsets, hop up to whose nodes the values of edges are read), ``None`` if all may be read."""
    if (over := _over_edges(user, union)) is not None:
        level = _level(user, union, needs)
        inside = level < len(union.firsts) and all(place in over[1] for place in _places(user, node))
        return (user.args[_OFFSETS[user.target]], level) if inside else None
    owner = union.owners.get(user)
    return (owner, needs[user]) if owner is not None and node in _edge_by_edge(user, union) else None


def _over_edges(node: fx.Node, union: _Union) -> tuple[dict[int, int], tuple[int, ...]] | None:
    """Where an op over a known structure has its rows of nodes, and how much farther it reads them; and its edges."""
    place = _OFFSETS.get(node.target)
    if place is None or union.sources(node.args[place]) is None:
        return None
    rows, edges = _ROWS.get(node.target, {}), _EDGES.get(node.target, ())
    if node.target in (_SPMM, _JOESTAR.sddmm.default) and union.edges.get(node.args[1]) is not node.args[0]:
        if node.target is not _SPMM or not _is_order(node.args[1]):
            return None
        rows, edges = {}, (2, 3)
    operands = [node.args[place] for place in rows if node.args[place] is not None]
    return (rows, edges) if all(map(union.holds, operands)) else None


def _is_order(node: fx.Node) -> bool:
    """Whether the rows of an aggregation are those of its edges."""
    return node.target is _ATEN.arange.default and len(node.args) == 1


def _places(user: fx.Node, node: fx.Node) -> list[int]:
    return [place for place, value in enumerate(user.args) if value is node] or [-1]


def _level(node: fx.Node, union: _Union, needs: dict[fx.Node, int]) -> int:
    """The hop up to whose nodes the result of an op over edges is read."""
    own = node.target is _SPMM or union.owners.get(node) is node.args[_OFFSETS[node.target]]
    return needs.get(node, len(union.firsts)) if own else len(union.firsts)


def _edge_by_edge(node: fx.Node, union: _Union) -> list[fx.Node]:
    """As ``_row_by_row``, of values of edges, if those of edges that nobody reads stay finite."""
    operands = _row_by_row(node, lambda value: union.holds_edges(value, union.owners[node]))
    kind = node.target._schema.name.split("::")[-1] if operands else ""
    poles = [node.args[place] for place, _ in SINGULAR.get(kind, ()) if place < len(node.args)]
    return [] if any(pole in operands for pole in poles) else operands


def _row_by_row(node: fx.Node, holds: Callable[[object], bool]) -> list[fx.Node]:
    """The operands of which row ``i`` of a value is computed from row ``i`` alone; empty where that is not known.

    ``holds``: whether a value has the rows.
    """
    if not isinstance(node.target, OpOverload) or node.kwargs.get("out") is not None:
        return []
    kind, rank = node.target._schema.name.split("::")[-1], tensor(node).dim() if tensor(node) is not None else 0
    operands = [value for value in node.all_input_nodes if holds(value)]
    if node.target is _JOESTAR.keyed_dropout.default:
        return operands if {*operands} == {*node.args[:2]} else []
    if node.target is _ATEN.index_select.default:
        return operands if node.args[1] == 0 and operands == [node.args[2]] and node.args[0] is not operands[0] else []
    if kind in POINTWISE:
        return operands if all(tensor(value).dim() == rank for value in operands) else []
    if node.target is _ATEN.cat.default:
        inside = argument(node, "dim") % rank != 0 and {*node.args[0]} == {*operands}
        return operands if inside else []
    if not node.args or operands != [node.args[0]]:
        return []
    if kind == "linear":
        return operands if rank > 1 and not any(map(holds, node.args[1:])) else []
    if kind in ("view", "reshape"):
        return operands if node.args[1][0] == -1 and all(isinstance(n, int) for n in node.args[1]) else []
    if kind in ("layer_norm", "rms_norm"):
        return operands if len(node.args[1]) < rank else []
    if kind in _ALONG:
        return operands if _inside(node, kind, tensor(node.args[0]).dim() + (kind == "unsqueeze")) else []
    return operands if kind in _UNARY else []


def _inside(node: fx.Node, kind: str, rank: int) -> bool:
    """Whether an op works along other dimensions than the rows."""
    dims = argument(node, "dim")
    if dims is None or dims == []:
        return False
    return all(dim % rank != 0 for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _match(roots: list[fx.Node], needs: dict[fx.Node, int], union: _Union) -> bool | Reject:
    most = len(union.firsts)
    if any(needs[root.args[0]] < most for root in roots):
        return True
    row = roots[0].args[0]
    reader = next((user for user in row.users if _need(user, row, union, needs) == most), row)
    return Reject(f"all rows of {row.name} are read by {name(reader)}")


# --- the rewrite ---


class _Cut:
    """Twins of values that have only the rows that are read."""

    def __init__(self, graph: fx.Graph, union: _Union, needs: dict[fx.Node, int], context):
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
                root.replace_all_uses_with(self._rows(root, root.args[0], _leading(root, self.union)))
            self.graph.erase_node(root)
        return cut

    @property
    def most(self) -> int:
        return len(self.union.firsts)

    def _twin(self, node: fx.Node) -> int:
        """Makes the twin, if the op allows that; returns 1 for an aggregation."""
        over = _over_edges(node, self.union)
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
        return {x: self._rows(node, x, self.needs[node]) for x in _row_by_row(node, self.union.holds)}

    def _edge_parts(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return {x: self.twins[x] for x in _edge_by_edge(node, self.union) if x in self.twins}

    def _twin_over_edges(self, node: fx.Node, rows: dict[int, int], edges: tuple[int, ...]) -> fx.Node:
        level, args, place = self.needs[node], list(node.args), _OFFSETS[node.target]
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
