"""Lookups by ids that data of the graph hold: an id that is no row is an error with words, before a step is taken.

Data are those of nodes, or of edges (``table(block.edata["kind"])``); those of nodes may come by way of edges
(``table[block.srcdata["kind"][block.indices]]``).

``F.embedding`` of a categorical feature, ``log_p.gather(1, y[:, None])``, ``F.one_hot(y, C)``: in plain PyTorch these
raise on a CPU and end the process on a GPU.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joestar.errors import LabelError
from joestar.lowering.inputs import NUM_SEEDS, SEEDS, Input, Kind
from joestar.lowering.loss import CASTS, is_plain
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import expression

_ATEN = torch.ops.aten
_JOESTAR = torch.ops.joestar
_DATA = (Kind.LABEL, Kind.NODE_DATA, Kind.FEATURE)
_MOVES = (_ATEN.index_select.default, _ATEN.index.Tensor)
TOGETHER = 1 << 16
"""Nodes or edges whose rows are looked at together."""
_SELECT = _ATEN.index_select.default


@dataclass(frozen=True)
class Lookup:
    """Rows or columns that are looked up by ids computed from tensors of the graph, each node's from its own rows.

    Attributes:
        ids: nodes or edges ``[n]`` -> what they are looked up by; low, high: ids are in ``[low, high)``.
        of_seeds: whether the nodes are the seeds; else those that were sampled for them.
        what: names of the graph's tensors; line: of the user's code.
        by_edges: whether ids are those of edges' sources.
        edges: whether it is edges that have ids; weights: what they are sampled by, if that can leave some out.
    """

    ids: Callable[[Tensor], Tensor]
    low: int
    high: int
    of_seeds: bool
    what: str
    line: str
    by_edges: bool = False
    edges: bool = False
    weights: Tensor | None = None

    def check(self, nodes: Tensor) -> None:
        """Raises ``LabelError`` unless the ids of ``nodes`` are in range; only a batch tells ids that depend on it."""
        for some in nodes.split(TOGETHER):
            wrong, values = self._wrong(some)
            if wrong.numel():
                self._refuse(int(wrong[0]), int(values[0]))

    def check_sampled(self, graph) -> None:
        """The same for all that a sample may reach: edges, and nodes with an edge to some other."""
        number = graph.num_edges if self.edges else graph.num_nodes
        every = torch.arange(number, dtype=torch.int64 if self.edges else graph.indices.dtype, device=graph.device)
        found = [self._wrong(some) for some in every.split(TOGETHER)]
        wrong, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not wrong.numel():
            return
        if self.edges:
            reached = slice(None) if self.weights is None else self.weights[wrong] > 0
            for edge, value in zip(wrong[reached][:1].tolist(), values[reached][:1].tolist(), strict=True):
                self._refuse(edge, value)
            return
        sources = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)
        sources[graph.indices] = True
        for position in torch.nonzero(sources[wrong]).flatten()[:1].tolist():
            self._refuse(int(wrong[position]), int(values[position]))

    def check_all(self, graph) -> None:
        """The same for whatever exact inference looks up: ids of all nodes, or by way of all edges."""
        if self.edges or self.by_edges:
            self.check_sampled(graph)
        else:
            self.check(torch.arange(graph.num_nodes, dtype=graph.indices.dtype, device=graph.device))

    def _wrong(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """(nodes whose ids are out of range, these ids); none where ids are not each node's own."""
        ids, half = self.ids(nodes), len(nodes) // 2
        own = not half or torch.equal(torch.cat([self.ids(nodes[:half]), self.ids(nodes[half:])]), ids)
        if not own or ids.shape[:1] != nodes.shape:
            return nodes[:0], nodes[:0].long()
        wrong = (ids < self.low) | (ids >= self.high)
        return nodes[torch.nonzero(wrong)[:, 0]], ids[wrong].long()

    def _refuse(self, node: int, value: int) -> None:
        raise LabelError(
            f"{self.what} gives {value} for {'edge' if self.edges else 'node'} {node}, which is out of range at "
            f"{self.line}: what is looked up there has ids in [{self.low}, {self.high}). Check the data, "
            "make the table or the model's output wider, or replace unknown ids before (torch.where)."
        )


def lookups(gm: fx.GraphModule, roles: list[Input]) -> list[Lookup]:
    """What a captured program looks up by ids that its graph's data hold, in order."""
    role_of = dict(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
    found = []
    for node in gm.graph.nodes:
        for index, low, high in _indices(node):
            made = None if expression(high) is not None else _made(index, role_of)
            if made is not None:
                compute, of_seeds, names, *of_edges = made
                what, moved = " and ".join(names), index is not _unmoved(index)
                found.append(Lookup(compute, int(low), int(high), of_seeds, what, node_line(node), moved, *of_edges))
    return found


def _indices(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """(ids, lowest, one beyond the highest) of what an op looks up."""
    args = node.args
    if node.target in (_ATEN.gather.default, _SELECT):
        return [(args[2], 0, args[0].meta["val"].shape[args[1]])] if args[0].meta["val"].dim() else []
    if node.target is _ATEN.embedding.default:
        return [(args[1], 0, args[0].meta["val"].shape[0])]
    if node.target is _ATEN.one_hot.default:
        return [(args[0], 0, args[1])] if len(args) > 1 and isinstance(args[1], int) and args[1] > 0 else []
    if node.target is _ATEN.multi_margin_loss.default:
        return [(args[1], 0, args[0].meta["val"].shape[-1])]
    if node.target is not _ATEN.index.Tensor:
        return []
    sizes = args[0].meta["val"].shape
    whole = [(i, dim) for dim, i in enumerate(args[1]) if i is not None and i.meta["val"].dtype != torch.bool]
    return [(index, -sizes[dim] if expression(sizes[dim]) is None else 0, sizes[dim]) for index, dim in whole]


def _made(index: fx.Node, role_of: dict[fx.Node, Input]):
    """(nodes -> ids, whether they are seeds, names of the data, whether the nodes are edges, their weights).

    Of ids that a node's or an edge's own rows give; else ``None``.
    """
    given, index = index, _unmoved(index)
    inner, roots, stack = [], [], [index]
    seen = {index}
    while stack:
        node = stack.pop()
        if node.target is _SELECT and node.args[1] == 0 and _is_data(role_of.get(node.args[0])):
            roots.append(node)
            continue
        role = role_of.get(node)
        if role is not None and not (role == NUM_SEEDS or (role.held and not role.of_graph and not role.needs_grad)):
            return None
        if role is None and not is_plain(node):
            return None
        inner.append(node)
        new = [one for one in node.all_input_nodes if one not in seen]
        seen.update(new)
        stack.extend(new)
    rows = {_uncast(root.args[2]) for root in roots}
    if len(rows) != 1:
        return None
    ((of_seeds, edges, weights),) = [_range(one, roots, role_of) for one in rows]
    if of_seeds is None or (of_seeds and index is not given):
        return None
    if not of_seeds and any(role_of.get(node) == NUM_SEEDS for node in inner):
        return None
    graph, copies, tables = fx.Graph(), {}, []
    for root in roots:
        copies[root] = graph.placeholder(root.name)
        tables.append(role_of[root.args[0]].tensor)
    placed = [node for node in index.graph.nodes if node in role_of and node in set(inner)]
    rest = [node for node in index.graph.nodes if node not in role_of and node in set(inner)]
    for node in [*placed, *rest]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[index])
    module, held = fx.GraphModule(torch.nn.Module(), graph), [role_of[node] for node in placed]

    @torch.no_grad()
    def compute(nodes: Tensor) -> Tensor:
        own = [torch.index_select(table, 0, nodes) for table in tables]
        return module(*own, *(role.tensor if role.held else nodes.numel() for role in held))

    return compute, of_seeds, sorted({role_of[root.args[0]].name for root in roots}), edges, weights


def _unmoved(index: fx.Node) -> fx.Node:
    """What the ids of edges were taken from, if they are those of nodes at one of their ends."""
    node = _uncast(index)
    if node.target not in _MOVES or (node.target is _SELECT and node.args[1] != 0):
        return index
    place = node.args[2] if node.target is _SELECT else node.args[1][0] if len(node.args[1]) == 1 else None
    place = None if place is None else _uncast(place)
    by_source = place is not None and place.target is operator.getitem and place.args[1] == 1
    return node.args[0] if by_source and place.args[0].target is _JOESTAR.compact.default else index


def _range(rows: fx.Node, roots: list[fx.Node], role_of: dict[fx.Node, Input]) -> tuple:
    """(whether rows are those of seeds, of edges, weights of these) of data; ``None`` first if that is not known."""
    of_edges = {role_of[root.args[0]].kind is Kind.EDGE_DATA for root in roots}
    if of_edges == {False}:
        return role_of.get(rows) == SEEDS, False, None
    if of_edges == {True} and rows.target is _JOESTAR.sample_eids.default:
        return False, True, None
    if of_edges == {True} and rows.target is operator.getitem:
        sampled = rows.args[0]
        weights = _uncast(sampled.args[1]) if sampled.target is _JOESTAR.weighted_sample.default else None
        weights = weights.args[0] if weights is not None and weights.target is _ATEN.detach.default else weights
        if weights in role_of and role_of[weights].held:
            return False, True, role_of[weights].tensor
    return None, True, None


def _is_data(role: Input | None) -> bool:
    if role is None or role.kind not in (*_DATA, Kind.EDGE_DATA):
        return False
    return not role.needs_grad and not role.tensor.is_meta


def _uncast(node: fx.Node) -> fx.Node:
    while node.target in CASTS:
        node = node.args[0]
    return node
