"""A padded graph in two halves: what reads the graph of nodes, and what is left.

Before                                              front: tables, seeds, key -> what the batch is made of
    sub, picked, n = sample_cols(indptr, ...)           sub, picked, n = sample_cols(indptr, ...)
    x = gather_rows(table, cache, slots, srcs)          x = gather_rows(table, cache, slots, srcs)
    h = linear(spmm(sub, local, x), weight)         back: that, parameters, seeds, key, flag -> loss, counts, ok
    _, ok = overflow([n], [520], flag)                  h = linear(spmm(sub, local, x), weight)
                                                        _, ok = overflow([n], [520], flag)

Nothing in the front depends on what a step changes, so that the front of a step can run while the step before it is
still under way. It holds what reads the graph's structure and data - sampling, rows of features and labels, first
aggregations that read them in place -, the true sizes of all sets, and what these need. What reads parameters as well
stays in the back, and so does everything that is cheap.

Where rows come from elsewhere, over a bus or from other GPUs, the front is two graphs itself: sampling, which is short
and works on this device, and the reading of far rows, with what needs them, which waits for links most of the time.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joestar.lowering.functional import is_in_place, is_view, root
from joestar.lowering.inputs import Input, Kind
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import RAGGED
from joestar.torch_private import LazyGraphModule, OpOverload, set_grad_enabled

_JOESTAR = torch.ops.joestar
_TABLES = frozenset({Kind.STRUCTURE, Kind.FEATURE, Kind.LABEL, Kind.NODE_DATA, Kind.EDGE_DATA, Kind.HOISTED})
_CHANGING = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.HISTORY, Kind.FLAG})
_FAR = frozenset({_JOESTAR.gather_rows.default, _JOESTAR.gather_shards.default})
"""What reads tables that are elsewhere."""
_MEETINGS = frozenset({_JOESTAR.row_parts.default, _JOESTAR.over_ranks.default})
"""What all ranks compute together, at the same place among their collectives."""


@dataclass(frozen=True)
class Far:
    """The part of a front that reads rows from elsewhere.

    Attributes:
        run: gives a list of tensors. inputs: positions among the inputs of the whole; taken: behind these, positions in
            what the rest of the front gives; handed_on: of that, what the back takes.
    """

    run: Callable
    inputs: list[int]
    taken: list[int]
    handed_on: list[int]


@dataclass(frozen=True)
class Halves:
    """Two graphs, or what was compiled from them, which one after the other are the whole.

    Attributes:
        front: gives a list of tensors; back: gives the outputs of the whole.
        front_inputs, back_inputs: positions among the inputs of the whole; the back takes what the front gives behind
            its own.
        reads: names of the front's ops that read the graph.
        far: the part of the front that reads rows from elsewhere, or ``None``.
    """

    front: Callable
    back: Callable
    front_inputs: list[int]
    back_inputs: list[int]
    reads: list[str]
    far: "Far | None" = None

    def ahead(self, inputs: list) -> list[Tensor]:
        """What the front gives, with its far part.

        Args:
            inputs: of the whole; those that only the back reads may be anything.
        """
        return self.fetched(inputs, self.sampled(inputs))

    @torch.no_grad()
    def sampled(self, inputs: list) -> list[Tensor]:
        """What the front gives without its far part, for ``fetched``."""
        return list(self.front(*(inputs[place] for place in self.front_inputs)))

    @torch.no_grad()
    def fetched(self, inputs: list, sampled: list[Tensor]) -> list[Tensor]:
        """What the back takes, from what was ``sampled``."""
        far = self.far
        if far is None:
            return sampled
        rows = far.run(*(inputs[place] for place in far.inputs), *(sampled[place] for place in far.taken))
        return [*(sampled[place] for place in far.handed_on), *rows]

    def rest(self, inputs: list, made: list[Tensor]):
        """The outputs of the whole, from what the front gave."""
        return self.back(*(inputs[place] for place in self.back_inputs), *made)

    def __call__(self, *inputs):
        """The outputs of the whole."""
        return self.rest(inputs, self.ahead(inputs))


@dataclass(frozen=True)
class Whole:
    """Why a graph is not cut, and the user's line."""

    reason: str
    line: str


def split(gm: fx.GraphModule, roles: list[Input], changing: frozenset[int]) -> Halves | Whole:
    """Cuts a padded graph (``lowering.padding``), which stays as it is.

    Args:
        roles: of its inputs. changing: addresses of the memory that a step may write to.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    held = dict(zip(placeholders, roles, strict=True))
    moving = _moving(gm, held, changing)
    (check,) = gm.graph.find_nodes(op="call_function", target=_JOESTAR.overflow.default)
    for count in check.args[0]:
        if count in moving:
            return Whole(f"the size of a set depends on {moving[count]}, which a step changes", node_line(count))
    reads = [node for node in _reads(gm, held) if node not in moving]
    front = _with_what_they_need([*reads, *check.args[0]])
    made = [node for node in gm.graph.nodes if node in front and node.op == "call_function"]
    crossing = [node for node in made if any(user not in front for user in node.users)]
    for node in crossing:
        if isinstance(node.meta.get("val"), (list, tuple)):
            return Whole(f"the list that {node.target} gives is read on both sides", node_line(node))
    places = {node: place for place, node in enumerate(placeholders)}
    kept = [node for node in gm.graph.nodes if node not in front or node.op in ("placeholder", "get_attr")]
    near, far, crossing = _parted(gm, [n for n in gm.graph.nodes if n in front], check, crossing, places)
    back_graph, back_inputs = _graph(kept, crossing, None, places)
    names = list(dict.fromkeys(node.target._schema.name.partition("::")[2] for node in reads))
    return Halves(near[0], LazyGraphModule(gm, back_graph), near[1], back_inputs, names, far)


def _parted(
    gm: fx.GraphModule, front: list[fx.Node], check: fx.Node, crossing: list[fx.Node], places: dict[fx.Node, int]
) -> tuple[tuple[Callable, list[int]], Far | None, list[fx.Node]]:
    """The front's graph and inputs, its far part, and what the back takes, in the order in which it is given.

    Args:
        front: nodes of both parts, in order; crossing: those that the back reads.
    """
    distant: set[fx.Node] = set()
    for node in front:
        if node.op == "call_function" and (node.target in _FAR or distant & set(node.all_input_nodes)):
            distant.add(node)
    near = [node for node in front if node not in distant]
    made = [node for node in near if node.op == "call_function"]
    given = [node for node in made if node in crossing or any(user in distant for user in node.users)]
    lists = any(isinstance(node.meta.get("val"), (list, tuple)) for node in given)
    if not distant or lists or distant & set(check.args[0]):
        graph, inputs = _graph(front, [], crossing, places)
        return (LazyGraphModule(gm, graph), inputs), None, crossing
    handed_on, rows = ([node for node in crossing if (node in distant) is far] for far in (False, True))
    taken = [node for node in given if any(user in distant for user in node.users)]
    graph, inputs = _graph(near, [], given, places)
    own = [node for node in front if node in distant or node.op in ("placeholder", "get_attr")]
    far_graph, far_inputs = _graph(own, taken, rows, places)
    far = Far(
        LazyGraphModule(gm, far_graph), far_inputs, *([given.index(n) for n in some] for some in (taken, handed_on))
    )
    return (LazyGraphModule(gm, graph), inputs), far, [*handed_on, *rows]


def _moving(gm: fx.GraphModule, held: dict[fx.Node, Input], changing: frozenset[int]) -> dict[fx.Node, str]:
    """Values that may differ when a step has been taken, and where that comes from."""
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    memories = changing | {_memory(held[node].tensor) for node in written if node in held and held[node].held}
    moving: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = held[node]
            if role.kind in _CHANGING or role.needs_grad or (role.held and _memory(role.tensor) in memories):
                moving[node] = role.name
        elif node.op == "call_function":
            behind = (moving[source] for source in node.all_input_nodes if source in moving)
            source = "the other ranks" if node.target in _MEETINGS else next(behind, None)
            if source is not None:
                moving[node] = source
    return moving


def _memory(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 for none."""
    return tensor.untyped_storage().data_ptr()


def _reads(gm: fx.GraphModule, held: dict[fx.Node, Input]) -> list[fx.Node]:
    """Ops that read the graph of nodes, or make sets of it, in order."""
    tables = {node for node, role in held.items() if role.kind in _TABLES}
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_in_place(node):
            continue
        if is_view(node):
            tables |= {node} if node.args[0] in tables else set()
        elif node.target in RAGGED or node.target in _FAR or any(s in tables for s in node.all_input_nodes):
            found.append(node)
    return found


def _with_what_they_need(wanted: list[fx.Node]) -> set[fx.Node]:
    """These, what is behind them, and the items of tuples among them."""
    found, stack = set(), list(wanted)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
            stack.extend(user for user in node.users if user.target is operator.getitem and node.op == "call_function")
    return found


def _graph(
    nodes: list[fx.Node], given: list[fx.Node], outputs: list[fx.Node] | None, places: dict[fx.Node, int]
) -> tuple[fx.Graph, list[int]]:
    """A graph of these nodes, and the positions of its inputs among those of the whole.

    Args:
        given: further inputs, behind. outputs: what it gives, if not what the whole does.
    """
    graph, copies, inputs = fx.Graph(), {}, []
    used = {source for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        if node.op == "placeholder" and node in used:
            copies[node] = graph.node_copy(node)
            inputs.append(places[node])
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"stack_trace": node.meta.get("stack_trace")}
    for node in nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and node not in used):
            continue
        if outputs is not None and node.target is set_grad_enabled:
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if outputs is not None:
        graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return graph, inputs
