"""Which rows of a model over the union of a sample's hops are read, per hop: what the pass ``trim`` cuts down to.

In the union the nodes of a hop come before those of the next, and an edge into a node of hop ``j`` comes from hop
``j + 1`` at the farthest. Edges of the first rows are the first edges.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.match.emit import leads, tensor
from joestar.lowering.rules.arguments import argument
from joestar.lowering.rules.pointwise_ops import POINTWISE
from joestar.lowering.rules.rowwise import LEAST_EPS
from joestar.lowering.sizes import same_size
from joestar.torch_private import OpOverload

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_MERGE, _COMPACT, _SPMM = _JOESTAR.merge_hops.default, _JOESTAR.compact.default, _JOESTAR.spmm.default
OFFSETS = {
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
_DIVISIONS = {"div": 1, "divide": 1, "true_divide": 1, "addcdiv": 2}
"""Ops over edges that are finite unless values of edges are the divisor -> its position."""
FINITE = frozenset([
    "abs", "absolute", "add", "addcmul", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "cos", "elu", "eq",
    "erf", "erfc", "fix", "floor", "fmax", "fmin", "ge", "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "le", "leaky_relu", "less", "less_equal", "log_sigmoid",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
    "multiply", "ne", "neg", "negative", "not_equal", "positive", "prelu", "relu", "relu6", "round", "rsub", "selu",
    "sgn", "sigmoid", "sign", "silu", "sin", "softplus", "softshrink", "special_erf", "special_erfc", "special_expit",
    "square", "sub", "subtract", "tanh", "threshold", "trunc", "where",
])  # fmt: skip
"""Pointwise ops that are finite, as is their derivative, wherever what they are given is: at 0 above all."""
_PLAIN = {"keyed_dropout", "index_select", "cat", "linear", "view", "reshape"} | _ALONG | _UNARY
_EDGEWISE = FINITE | _PLAIN - {"layer_norm", "rms_norm"}


# --- the union and its structures ---


@dataclass
class Union:
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


def union_of(merge: fx.Node) -> Union | None:
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
    union = Union(nodes, firsts, counts, (indptrs[0], values[0], _item(merge, 1)))
    if _item(merge, 0) is not None and _item(merge, 1) is not None:
        union.edges[_item(merge, 1)] = _item(merge, 0)
    for node in merge.graph.nodes:
        _derived(node, union)
    return union


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _is_zero(node: fx.Node) -> bool:
    return node.target is _ATEN.zeros.default or (node.target is _ATEN.full.default and node.args[1] == 0)


def _derived(node: fx.Node, union: Union) -> None:
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


def roots_of(graph: fx.Graph, union: Union) -> list[fx.Node]:
    """Leading rows of values with a row per node."""
    found = graph.find_nodes(op="call_function", target=_ATEN.slice.Tensor)
    return [node for node in found if union.holds(node.args[0]) and leading(node, union) is not None]


def leading(node: fx.Node, union: Union) -> int | None:
    """The hop whose nodes' rows a slice has, if it has those from the first on."""
    if node.target is not _ATEN.slice.Tensor or argument(node, "dim") != 0:
        return None
    level = union.level(tensor(node).shape[0])
    return level if level is not None and leads(node, node.args[0], union.rows(level)) else None


def needs_of(graph: fx.Graph, union: Union) -> dict[fx.Node, int]:
    """The hop up to whose nodes rows are read: of every value with a row per node, and of edges' values with owners."""
    needs: dict[fx.Node, int] = {}
    for node in reversed(list(graph.nodes)):
        if union.holds(node):
            needs[node] = max((need(user, node, union, needs) for user in node.users), default=len(union.firsts))
        else:
            found = {_edges_need(user, node, union, needs) for user in node.users}
            if found and None not in found and len({indptr for indptr, _ in found}) == 1:
                (union.owners[node], _), needs[node] = next(iter(found)), max(level for _, level in found)
    return needs


def need(user: fx.Node, node: fx.Node, union: Union, needs: dict[fx.Node, int]) -> int:
    most = len(union.firsts)
    if (over := over_edges(user, union)) is not None:
        rows, _ = over
        return min(most, _level(user, union, needs) + max(rows.get(place, most) for place in _places(user, node)))
    if union.holds(user):
        return needs[user] if node in row_by_row(user, union.holds) else most
    level = leading(user, union)
    return most if level is None else level


def _edges_need(user: fx.Node, node: fx.Node, union: Union, needs: dict[fx.Node, int]) -> tuple[fx.Node, int] | None:
    """(offsets, hop up to whose nodes the values of edges are read), ``None`` if all may be read."""
    if (over := over_edges(user, union)) is not None:
        level = _level(user, union, needs)
        inside = level < len(union.firsts) and all(place in over[1] for place in _places(user, node))
        return (user.args[OFFSETS[user.target]], level) if inside else None
    owner = union.owners.get(user)
    return (owner, needs[user]) if owner is not None and node in edge_by_edge(user, union) else None


def over_edges(node: fx.Node, union: Union) -> tuple[dict[int, int], tuple[int, ...]] | None:
    """Where an op over a known structure has its rows of nodes, and how much farther it reads them; and its edges."""
    place = OFFSETS.get(node.target)
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


def _level(node: fx.Node, union: Union, needs: dict[fx.Node, int]) -> int:
    """The hop up to whose nodes the result of an op over edges is read."""
    own = node.target is _SPMM or union.owners.get(node) is node.args[OFFSETS[node.target]]
    return needs.get(node, len(union.firsts)) if own else len(union.firsts)


def edge_by_edge(node: fx.Node, union: Union) -> list[fx.Node]:
    """As ``row_by_row``, of values of edges, if those of edges that nobody reads (0 at first) stay finite."""
    operands = row_by_row(node, lambda value: union.holds_edges(value, union.owners[node]))
    return operands if operands and _stays_finite(node, operands) else []


def _stays_finite(node: fx.Node, operands: list[fx.Node]) -> bool:
    """Whether an op and its derivatives are finite for operands that are, but may be 0."""
    kind = node.target._schema.name.split("::")[-1]
    if kind in ("layer_norm", "rms_norm"):
        eps = argument(node, "eps")
        return eps is None or eps >= LEAST_EPS  # None: the smallest step of the dtype
    if kind in _DIVISIONS:
        return node.args[_DIVISIONS[kind]] not in operands
    return kind in _EDGEWISE


def row_by_row(node: fx.Node, holds: Callable[[object], bool]) -> list[fx.Node]:
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
    if kind == "einsum":
        return operands if _leads_equation(*node.args[:2], operands) else []
    if not node.args or operands != [node.args[0]]:
        return []
    if kind in ("linear", "matmul", "mm"):
        return operands if rank > 1 and not any(map(holds, node.args[1:])) else []
    if kind in ("view", "reshape"):
        return operands if node.args[1][0] == -1 and all(isinstance(n, int) for n in node.args[1]) else []
    if kind in ("layer_norm", "rms_norm"):
        return operands if len(node.args[1]) < rank else []
    if kind in _ALONG:
        return operands if _inside(node, kind, tensor(node.args[0]).dim() + (kind == "unsqueeze")) else []
    return operands if kind in _UNARY else []


def _leads_equation(equation: str, values: list[fx.Node], operands: list[fx.Node]) -> bool:
    """Whether rows are the first index of the result and of the operands that have them, and of nothing else."""
    given, _, result = equation.replace(" ", "").partition("->")
    if not result or "." in equation:
        return False
    return all(
        letters.startswith(result[0]) == (value in operands) and letters.count(result[0]) == (value in operands)
        for letters, value in zip(given.split(","), values, strict=True)
    )


def _inside(node: fx.Node, kind: str, rank: int) -> bool:
    """Whether an op works along other dimensions than the rows."""
    dims = argument(node, "dim")
    if dims is None or dims == []:
        return False
    return all(dim % rank != 0 for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))
