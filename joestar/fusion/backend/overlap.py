"""Ops that do not depend on one another run at the same time, on two streams of a GPU (kernel invocation grouping,
thesis 5.3.4).

Before (backward of two layers)                     After
    g   = aten.mm(d, w1)                                s = side_by_side([d, w1, h1, ...], program)
    dw1 = aten.mm(d.t(), h1)                            dw1, db1, dw0, ... = s[0], s[1], s[2], ...
    db1 = aten.sum(d, 0)                                program, on the caller's stream | on a second one
    e   = aggregate_cat_kept_grad(..., g, ...)              g   = aten.mm(d, w1)        | dw1 = aten.mm(d.t(), h1)
    dw0 = aten.mm(e.t(), h0)                                e   = aggregate_..._grad()  | db1 = column_sums(d)
                                                            dw0 = aten.mm(e.t(), h0)    |

Unlike the other passes this one sees the backend's graphs, forward and backward each, with all sizes known, behind
Inductor's own rewrites (``Overlap``). Ops of ours and matrix products are candidates; what Inductor compiles into loops
lies between. Candidates between which there is nothing of Inductor's make a region, which becomes one op, its inner
order found by list scheduling (HEFT with insertion: Topcuoglu et al. 2002) under rough times of the ops. Sums over the
rows of a matrix that is stored anyway become ops, too.

Must not fire on a CPU, outside of a CUDA graph (the op then runs its program in sequence), where nothing is
independent, where the estimate saves less than a few microseconds, or where a graph writes to an input that others read
behind the write. Ops that share tables of the device (``keeps_tables`` of an op) stay on one stream.
"""

import collections
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.backend.rewrites import note
from joestar.fusion.match.emit import tensor
from joestar.fusion.record import Place
from joestar.ops.registry import keeps_tables
from joestar.ops.step import side_by_side
from joestar.ops.step.side_by_side import RESHAPES, VIEWS, Call, Input, Program, Value
from joestar.torch_private import CustomGraphPass, OpOverload, get_hash_for_files, tree_leaves

NAME = "overlap"

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1, _ATEN.bmm.default: 0}
"""Matrix products, and where their two operands begin."""
_LAUNCH, _BANDWIDTH, _RATE = 2.5, 2.5e6, 1.5e8
"""Microseconds of the smallest op, bytes and operations per microsecond."""
_CROSSING = 2.0
"""Microseconds that a dependency between the streams costs."""
_WORTH = 2.0
"""Microseconds that a region has to save."""


class Overlap(CustomGraphPass):
    """The pass, as Inductor calls it on its graphs."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites ``graph`` in place."""
        note(NAME, run(graph))

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__, side_by_side.__file__))


def run(graph: fx.Graph, time_of: Callable[[fx.Node], float] | None = None) -> int:
    """Rewrites every region of the graph that gains; returns how many.

    Args:
        time_of: microseconds of an op, by default an estimate from its bytes and operations.
    """
    if _rewrites_inputs(graph):
        return 0
    sums = _sums_as_ops(graph)
    plans = [plan for members in _regions(graph) if (plan := schedule(members, time_of or _microseconds))]
    _settle_sums(graph, sums, plans)
    for plan in plans:
        _rewrite(graph, plan)
    if plans:
        from joestar.torch_private import stable_topological_sort  # slow to import, there by now

        stable_topological_sort(graph)
        graph.lint()
    return len(plans)


def places(programs: list[Program]) -> list[Place]:
    """What ``step.explain()`` says of the programs of a step, which it meets when the step is captured."""
    found = []
    for program in programs:
        launches = [call for call in program.calls if call.op not in VIEWS]
        beside = collections.Counter(call.op.split(".")[1] for call in launches if call.side)
        names = ", ".join(name if times == 1 else f"{name} ({times})" for name, times in beside.items())
        detail = f"{beside.total()} of {len(launches)} ops run on a second stream: {names}"
        found.append(Place(NAME, "side_by_side", True, detail, "the backend's graph, sizes known"))
    nothing = Place(NAME, "", False, "two streams would save nothing", "the backend's graph, sizes known")
    return found or [nothing]


# --- what may move ---


def _is_ours(node: fx.Node) -> bool:
    """An op without side effects that is a kernel, or several, of its own, and whose arguments a program can hold."""
    if node.op != "call_function" or node.kwargs or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace != "joestar" and node.target not in _PRODUCTS:
        return False
    made = _tensors(node.meta.get("val"))
    return bool(made) and not node.target._schema.is_mutable and all(map(_holds, node.args))


def _holds(argument) -> bool:
    if isinstance(argument, (list, tuple)):
        return all(map(_holds, argument))
    if isinstance(argument, fx.Node):
        return isinstance(argument.meta.get("val"), torch.Tensor)
    return argument is None or isinstance(argument, (bool, int, float, str))


def _tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_view(node: fx.Node) -> bool:
    """Whether a node launches nothing: one of several results, or another shape of the same memory."""
    if node.op != "call_function" or node.kwargs or len(node.all_input_nodes) != 1:
        return False
    if str(node.target) in RESHAPES:
        return node.args[0].meta["val"].is_contiguous()
    return node.target is operator.getitem or str(node.target) in VIEWS


def _base(node: fx.Node) -> fx.Node:
    """What a chain of views and results shows."""
    while _is_view(node):
        node = node.args[0]
    return node


def _rewrites_inputs(graph: fx.Graph) -> bool:
    """Whether an input is written while somebody may still read it: reading could then move behind the write."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not isinstance(node.args[0], fx.Node):
            continue
        behind, stack = set(), [node]
        while stack:
            current = stack.pop()
            if current not in behind:
                behind.add(current)
                stack.extend(current.all_input_nodes)
        if any(user not in behind for user in _base(node.args[0]).users):
            return True
    return False


def _sums_as_ops(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Puts an op beside every sum over the rows of a matrix that some op of ours, or a product, reads or makes.

    Returns:
        op -> the sum whose place it may take.
    """
    found = {}
    for node in graph.find_nodes(op="call_function", target=_ATEN.sum.dim_IntList):
        if node.kwargs.keys() - {"dtype"} or len(node.args) < 2 or list(node.args[1] or ()) != [0]:
            continue
        rows, dtype = node.args[0], node.kwargs.get("dtype")
        value = tensor(rows)
        if value is None or value.dim() != 2 or not value.dtype.is_floating_point or not value.is_contiguous():
            continue
        if dtype not in (None, value.dtype, torch.promote_types(value.dtype, torch.float32)):
            continue  # added up in a dtype that the op does not know
        if _is_ours(_base(rows)) or any(map(_is_ours, _readers(rows))):
            name = () if dtype is None else (str(dtype).removeprefix("torch."),)
            with graph.inserting_before(node):
                op = graph.call_function(_JOESTAR.column_sums.default, (rows, *name))
            op.meta = {**origin(node), "val": value.new_empty(value.shape[1:], dtype=dtype)}
            found[op] = node
    return found


def _settle_sums(graph: fx.Graph, sums: dict[fx.Node, fx.Node], plans: list[list["Slot"]]) -> None:
    """Ops that are part of a plan take the place of their sums; the others go."""
    planned = {slot.node for plan in plans for slot in plan}
    for op, node in sums.items():
        if op not in planned:
            graph.erase_node(op)
            continue
        with graph.inserting_before(node):
            same = graph.call_function(_ATEN.reshape.default, (op, list(node.meta["val"].shape)))
        same.meta = {**origin(node), "val": node.meta["val"]}
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def origin(node: fx.Node) -> dict:
    """Where a node comes from; what else is noted there is about its own arguments."""
    return {key: node.meta[key] for key in ("stack_trace", "original_aten") if key in node.meta}


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, directly or through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Ops of ours between which there is nothing else, in the order of the graph.

    A node's stage counts how often work of ours and of Inductor's take turns on the way to it: even for ops of ours.
    What depends on no op of ours comes first.
    """
    stages: dict[fx.Node, int] = {}
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        before = [stages[source] for source in node.all_input_nodes]
        stage = max(before, default=-1)
        if _is_ours(node):
            stage += stage % 2
            found.setdefault(stage, []).append(node)
        elif not _is_view(node) and stage >= 0:
            stage += 1 - stage % 2
        stages[node] = stage
    return (members for _, members in sorted(found.items()) if len(members) > 1)


# --- when, and on which stream ---


def _microseconds(node: fx.Node) -> float:
    """A rough time: what is written, what is read of the rest (a table is not read as a whole), operations."""
    written = sum(value.numel() * value.element_size() for value in _tensors(node.meta["val"]))
    reads = (source.meta["val"] for source in node.all_input_nodes)
    read = sum(min(value.numel() * value.element_size(), 2 * written + 2**20) for value in reads)
    time = _LAUNCH + (written + read) / _BANDWIDTH
    if node.target in _PRODUCTS:
        first = _PRODUCTS[node.target]
        rows, columns = (node.args[first + i].meta["val"] for i in range(2))
        time += 2 * rows.numel() * columns.shape[-1] / _RATE
    return time


@dataclass(frozen=True)
class Slot:
    """When an op runs, and where."""

    node: fx.Node
    side: bool
    start: float
    end: float


def schedule(members: list[fx.Node], time_of: Callable[[fx.Node], float]) -> list[Slot] | None:
    """Slots of a region's ops, by start; ``None`` if two streams save less than ``_WORTH`` microseconds.

    Every op goes, longest way to the end first, where it ends earliest, into a gap if there is one.
    """
    inside = set(members)
    sources = {node: {_base(s) for s in node.all_input_nodes} & inside for node in members}
    for earlier, later in itertools.pairwise([node for node in members if keeps_tables(node.target)]):
        sources[later] = sources[later] | {earlier}
    times = {node: time_of(node) for node in members}
    rank = dict(times)
    for node in reversed(members):
        for source in sources[node]:
            rank[source] = max(rank[source], times[source] + rank[node])
    order = {node: i for i, node in enumerate(members)}
    slots: dict[fx.Node, Slot] = {}
    busy: dict[bool, list[Slot]] = {False: [], True: []}
    for node in sorted(members, key=lambda n: (-rank[n], order[n])):
        sides = (False,) if keeps_tables(node.target) else (False, True)
        options = (_earliest(node, side, times[node], [slots[s] for s in sources[node]], busy[side]) for side in sides)
        slots[node] = best = min(options, key=lambda slot: slot.end)
        busy[best.side].append(best)
        busy[best.side].sort(key=lambda slot: slot.start)
    if not busy[True] or not busy[False]:
        return None
    end = max(slot.end for slot in slots.values()) + 2 * _CROSSING
    if sum(times.values()) - end < _WORTH:
        return None
    return sorted(slots.values(), key=lambda slot: (slot.start, order[slot.node]))


def _earliest(node: fx.Node, side: bool, time: float, sources: list[Slot], busy: list[Slot]) -> Slot:
    """The first gap of a stream behind the sources that is long enough."""
    start = max((slot.end + _CROSSING * (slot.side != side) for slot in sources), default=_CROSSING * side)
    for slot in busy:
        if start + time <= slot.start:
            break
        start = max(start, slot.end)
    return Slot(node, side, start, start + time)


# --- the rewrite ---


def _rewrite(graph: fx.Graph, plan: list[Slot]) -> None:
    """One op in place of those of a plan."""
    writer = _Writer({slot.node for slot in plan})
    for slot in plan:
        writer.add(slot.node, slot.side)
    found = [node for slot in plan for node in _results(slot.node) if any(_outside(node, writer.inside))]
    outputs: dict[Value, list[fx.Node]] = {}
    for node in found:
        outputs.setdefault(writer.value(node), []).append(node)
    program = Program(tuple(writer.calls), tuple(outputs))
    position = {node: i for i, node in enumerate(graph.nodes)}
    behind = max((*writer.inputs, *graph.find_nodes(op="placeholder")), key=position.__getitem__)
    with graph.inserting_after(behind):
        both = graph.call_function(_JOESTAR.side_by_side.default, (list(writer.inputs), program.text()))
    both.meta = origin(plan[-1].node)
    both.meta["val"] = [nodes[0].meta["val"] for nodes in outputs.values()]
    after = both
    for index, nodes in enumerate(outputs.values()):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (both, index))
        after.meta = {**origin(nodes[0]), "val": nodes[0].meta["val"]}
        for node in nodes:
            for user in list(_outside(node, writer.inside)):
                user.replace_input_with(node, after)
    for node in reversed([*graph.nodes]):
        if not node.users and (node in writer.inside or (_is_view(node) and _base(node) in writer.inside)):
            graph.erase_node(node)


def _results(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op makes: itself, or what is taken out of its tuple."""
    return [node] if isinstance(node.meta["val"], torch.Tensor) else list(node.users)


def _outside(node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Users of a result that stay behind: views that only ops of the region look through go with these."""
    for user in node.users:
        if user in inside:
            continue
        if not _is_view(user) or not user.users or any(_outside(user, inside)):
            yield user


class _Writer:
    """Makes the calls of a program from nodes."""

    def __init__(self, inside: set[fx.Node]):
        self.inside = inside
        self.inputs: dict[fx.Node, Input] = {}
        self.calls: list[Call] = []
        self._made: dict[fx.Node, int] = {}

    def add(self, node: fx.Node, side: bool) -> None:
        """Adds an op, behind those that it reads."""
        args = tuple(map(self._argument, node.args))
        self._made[node] = len(self.calls)
        self.calls.append(Call(str(node.target), args, side))

    def _argument(self, argument):
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._argument, argument))
        return self.value(argument) if isinstance(argument, fx.Node) else argument

    def value(self, node: fx.Node) -> Value | Input:
        """Where a value comes from: from outside, or from a call; views of the latter are made again."""
        if _base(node) not in self.inside:
            return self.inputs.setdefault(node, Input(len(self.inputs)))
        if node in self._made:
            return Value(self._made[node])
        if node.target is operator.getitem:
            return Value(self._made[node.args[0]], node.args[1])
        shown = self.value(node.args[0])
        self._made[node] = len(self.calls)
        self.calls.append(Call(str(node.target), (shown, *node.args[1:])))
        return Value(self._made[node])
