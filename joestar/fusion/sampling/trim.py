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

Must not fire where the rows' readers do not treat each row by itself (a norm over all nodes, a softmax over edges, an
index by the user's own code): these read all rows, and so does what stands in front of them.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.clean import dce
from joestar.fusion.match.emit import emit, leads, name, tensor
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.rules.pointwise_ops import POINTWISE
from joestar.lowering.sizes import same_size

PATTERN = "trim"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_MERGE, _COMPACT, _SPMM = _JOESTAR.merge_hops.default, _JOESTAR.compact.default, _JOESTAR.spmm.default
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
    """

    nodes: fx.Node
    firsts: list[fx.Node]
    counts: list[fx.Node]
    seeds_edges: tuple[fx.Node, fx.Node, fx.Node | None]
    edges: dict[fx.Node, fx.Node] = field(default_factory=dict)

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
    """For every value with a row per node, the hop up to whose nodes its rows are read."""
    needs: dict[fx.Node, int] = {}
    for node in reversed(list(graph.nodes)):
        if union.holds(node):
            needs[node] = max((_need(user, node, union, needs) for user in node.users), default=len(union.firsts))
    return needs


def _need(user: fx.Node, node: fx.Node, union: _Union, needs: dict[fx.Node, int]) -> int:
    most = len(union.firsts)
    if not union.holds(user):
        level = _leading(user, union)
        return most if level is None else level
    if _aggregates(user, union) and node is not user.args[3]:
        return min(needs[user] + 1, most)
    return needs[user] if node in _row_by_row(user, union) else most


def _aggregates(node: fx.Node, union: _Union) -> bool:
    return node.target is _SPMM and union.holds(node.args[2]) and union.edges.get(node.args[1]) is node.args[0]


def _row_by_row(node: fx.Node, union: _Union) -> list[fx.Node]:
    """The operands of which row ``i`` of a value is computed from row ``i`` alone; empty where that is not known."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.kwargs.get("out") is not None:
        return []
    kind, rank = node.target._schema.name.split("::")[-1], tensor(node).dim()
    operands = [value for value in node.all_input_nodes if union.holds(value)]
    if node.target is _JOESTAR.keyed_dropout.default:
        return operands if {*operands} == {*node.args[:2]} else []
    if node.target is _ATEN.index_select.default:
        return operands if node.args[1] == 0 and operands == [node.args[2]] and node.args[0] is not operands[0] else []
    if kind in POINTWISE:
        return operands if all(tensor(value).dim() == rank for value in operands) else []
    if node.target is _ATEN.cat.default:
        inside = argument(node, "dim") % rank != 0 and {*node.args[0]} == {*operands}
        return operands if inside else []
    if operands != [node.args[0]]:
        return []
    if kind == "linear":
        return operands if rank > 1 and not any(map(union.holds, node.args[1:])) else []
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
        level, union = self.needs[node], self.union
        aggregation = _aggregates(node, union)
        operands = [node.args[2]] if aggregation else _row_by_row(node, union)
        if not operands:
            return 0
        with self.graph.inserting_before(node):
            if aggregation:
                rows = self._rows(node, node.args[2], min(level + 1, self.most))
                new = emit(self.graph, node, _SPMM, *self._head(node, level), rows, *node.args[3:])
                self.context.fired(PATTERN, new, f"rows of nodes up to hop {level} of {self.most}")
            else:
                parts = {value: self._rows(node, value, level) for value in operands}
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: parts.get(value, value))
                new = emit(self.graph, node, node.target, *args, **kwargs)
        self.twins[node] = new
        return int(aggregation)

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

    def _head(self, like: fx.Node, level: int) -> tuple[fx.Node, fx.Node]:
        """The structure of an aggregation, cut down to the rows up to those of a hop."""
        indptr, indices, _, weight, _ = like.args
        if level == 0 and indices is self.union.seeds_edges[2] and weight is None:
            return self.union.seeds_edges[:2]
        if (indices, level) not in self.heads:
            first, count = self.union.firsts[level], self.union.counts[level]
            both = emit(self.graph, like, _JOESTAR.first_rows.default, indptr, indices, first, count)
            self.heads[indices, level] = tuple(emit(self.graph, like, operator.getitem, both, i) for i in range(2))
        return self.heads[indices, level]
