"""Padded execution: sizes become bounds, arithmetic on sizes becomes arithmetic on counts (ARCHITECTURE decision 2).

Before (symbolic)                                 After (static)
    mean = aten.mean.dim(x, [0])   x: [s43, 16]       mean = joestar.masked_mean(x, count, 0, [0], False)   x: [520, 16]
    div  = aten.div.Tensor(y, s83)                    div  = aten.div.Tensor(y, seed_count)
    view = aten.view(x, [s43, 4, 4])                  view = aten.view(x, [520, 4, 4])

Every op that reads a padded tensor needs a rule (``lowering/rules``): it is row-wise and safe, it is rewritten to leave
padding out, or it is refused with the user's source line. The graph gains the inputs ``seed_count`` (0-d int64) and
``flag`` (0-d bool, the sticky overflow flag), and the outputs ``counts`` and ``ok``; every write to a buffer happens
only if ``ok``.
"""

import copy
import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from joestar.errors import JoestarError, PaddingError
from joestar.lowering.counts import is_symbolic, values_to_counts
from joestar.lowering.empty_sets import meetings
from joestar.lowering.functional import WRITES, is_in_place, nodes_after, out_of_place, outlived_views
from joestar.lowering.inputs import FLAG, SEED_COUNT, Input, Kind
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import SizeTable, expression, item, padded_dims, size_table
from joestar.lowering.symbolic import emit, evaluate
from joestar.torch_private import LazyGraphModule, OpOverload

aten = torch.ops.aten


@dataclass
class Padded:
    """A static graph.

    Attributes:
        gm: the graph; outputs are those of the symbolic graph, then ``counts`` and ``ok``.
        roles: per placeholder, as in ``Captured``, plus ``SEED_COUNT`` and ``FLAG``.
        checked: for every entry of ``counts``: (index of the size, bound).
        rewrites: how often each rule rewrote a node.
    """

    gm: fx.GraphModule
    roles: list[Input]
    checked: list[tuple[int, int]]
    rewrites: dict[str, int]


class PaddingContext:
    """What a rule may ask for while it rewrites one node."""

    def __init__(self, gm: fx.GraphModule, table: SizeTable, seed_count: fx.Node):
        self.gm = gm
        self.table = table
        self.seed_count = seed_count
        self.state: dict[fx.Node, fx.Node] = {}
        self.buffers: dict[fx.Node, fx.Node] = {}
        self.rewrites: dict[str, int] = {}
        self.bounds: dict[fx.Node, float] = {}
        self.put_back: set[fx.Node] = set()
        self.wanted: list[fx.Node] = []

    def call(self, target, *args, like: fx.Node | None = None, **kwargs) -> fx.Node:
        """A new call at the insertion point, with the metadata of ``like``."""
        node = self.gm.graph.call_function(target, args, kwargs)
        if like is not None:
            node.meta = dict(like.meta)
        return node

    def note(self, what: str) -> None:
        """Counts a rewrite for the report."""
        self.rewrites[what] = self.rewrites.get(what, 0) + 1

    def refuse(self, node: fx.Node, why: str, remedy: str = "") -> PaddingError:
        """The error for a node that has no padded form."""
        return PaddingError(f"{node.target} at {node_line(node)} {why}. {remedy}".rstrip())

    # --- counts ---

    def known(self, expr) -> bool:
        """Whether the number of valid entries along a dimension of this size is known."""
        symbols = self.table.bounds.keys() | {self.table.seeds}
        return expr is not None and expr.free_symbols <= symbols

    def concerns(self, expr: sympy.Expr) -> bool:
        """Whether the sets behind a size are padded here: all are."""
        return True

    def count(self, expr: sympy.Expr, node: fx.Node) -> fx.Node:
        """The value of a symbolic size when every set has its true number of entries, as a node (0-d tensor)."""
        if not self.known(expr):
            raise PaddingError(
                f"{node.target} at {node_line(node)}: the size {expr} of its operand is not the size of a sampled "
                "set, so its padded form is unknown. Derive sizes from blocks (num_src, num_dst, num_edges)."
            )
        return emit(self.gm, expr, self._symbol_count, node)

    def _symbol_count(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol == self.table.seeds:
            return self.seed_count
        return item(self.gm, self.table.bounds[symbol][1], 2)

    def entries(self, expr: sympy.Expr, node: fx.Node) -> fx.Node:
        """The number of valid entries along a dimension, for a node that may only see those."""
        if self.table.with_loops(expr) is not None:
            raise self.refuse(
                node, "reduces over the edges of a block with added self-loops, whose number varies",
                "Aggregate per destination (block.pull), or reduce over the edges of the block without loops.",
            )  # fmt: skip
        return self.count(expr, node)

    def want_rows(self, expr: sympy.Expr, node: fx.Node) -> None:
        """A batch without entries along a dimension does not fit: its exact step raises what PyTorch raises."""
        edges = {symbol for edges in self.table.edges if edges.is_Symbol for symbol in edges.free_symbols}
        if expr.free_symbols & edges:  # there is always a node
            self.wanted.append(self.entries(expr, node))

    def mask(self, x: fx.Node, dim: int, value, node: fx.Node) -> fx.Node:
        """``x`` with the padding along ``dim`` replaced by ``value``."""
        count = self.entries(expression(x.meta["val"].shape[dim]), node)
        return self.call(torch.ops.joestar.mask_rows.default, x, count, dim, value, like=x)

    def guard(self, x: fx.Node, value, node: fx.Node) -> fx.Node:
        """``x`` with its padding replaced by a harmless ``value``, as far as it is known what is padding."""
        for dim, expr in padded_dims(x.meta["val"]).items():
            if not self.known(expr):
                continue
            loops = self.table.with_loops(expr)
            if loops is None:
                count = self.count(expr, node)
            else:
                edges = self.call(aten.select.int, self.table.edges[loops][0], 0, -1)
                count = self.call(aten.mul.Tensor, edges, int(sympy.cancel(expr / loops)))
            x = self.call(torch.ops.joestar.mask_rows.default, x, count, dim, value, like=x)
            self.bounds[x] = abs(float(value))
        return x

    def guard_result(self, node: fx.Node, value) -> None:
        """Every reader of ``node`` sees its padding replaced by a harmless ``value``."""
        users = list(node.users)
        with self.gm.graph.inserting_before(node.next):
            guarded = self.guard(node, value, node)
        if guarded is not node:
            for user in users:
                user.replace_input_with(node, guarded)
            self.note("guard")

    # --- state ---

    def buffer(self, value: fx.Node) -> fx.Node | None:
        """The input of the graph that a value is, or is the latest state of."""
        return value if value.op == "placeholder" else self.buffers.get(value)

    def latest(self, value: fx.Node) -> fx.Node:
        """The state of an input of the graph at this point."""
        return self.state.get(self.buffer(value), value)

    def write(self, target: fx.Node, value: fx.Node, node: fx.Node) -> None:
        """Notes that ``node`` writes ``value`` to an input: later readers see it; the write itself ends the step."""
        buffer, before = self.buffer(target), self.latest(target)
        later = nodes_after(self.gm, node)
        if any(view is not value for old in {buffer, before} for view in outlived_views(old, later)):
            raise self.refuse(
                node, "writes to a buffer of which a view was taken before, and is read afterwards",
                "Take the view after the write.",
            )  # fmt: skip
        for old in {buffer, before}:
            old.replace_all_uses_with(value, delete_user_cb=lambda user: user in later and user is not value)
        self.state[buffer] = value
        self.buffers[value] = buffer


def pad(gm: fx.GraphModule, roles: list[Input], bounds: list[int], batch: int) -> Padded:
    """A static form of the symbolic graph for at most ``batch`` seeds and sets of at most ``bounds[i]`` entries.

    Raises:
        PaddingError: if an op has no correct form on padded rows; it names the user's line.
    """
    gm = LazyGraphModule(gm, copy.deepcopy(gm.graph))  # its code is made when it runs
    table = size_table(gm, roles)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]):
        seed_count = gm.graph.placeholder("seed_count")
    with gm.graph.inserting_after(seed_count):
        flag = gm.graph.placeholder("flag")
    context = PaddingContext(gm, table, seed_count)
    met = meetings(gm, table)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        target = node.target
        try:
            with gm.graph.inserting_before(node):
                for size in met.get(node, ()):
                    context.want_rows(size, node)
                _pad_node(context, node)
        except JoestarError:
            raise
        except Exception as error:
            raise PaddingError(
                f"{target} at {node_line(node)} could not be padded: {type(error).__name__}: {error}\n"
                "This is a defect of Joestar. Compile with execution='exact', and everything else works as before."
            ) from error
    checked = _finish(context, flag, bounds)
    _bake(gm, table, bounds, batch)
    kept = _drop_sizes(gm, roles)
    return Padded(gm, [*kept, SEED_COUNT, FLAG], checked, context.rewrites)


def _pad_node(context: PaddingContext, node: fx.Node) -> None:
    """Gives one node its padded form."""
    from joestar.lowering.rules import rule_for

    values_to_counts(context, node)
    written = _functional_write(context, node) if is_in_place(node) else None
    if isinstance(node.target, OpOverload) and _touches_padding(node):
        rule_for(node)(context, node)
    if written is not None:
        context.write(*written, node)


def _touches_padding(node: fx.Node) -> bool:
    values = [arg.meta.get("val") for arg in node.all_input_nodes] + [node.meta.get("val")]
    return node.target is aten.batch_norm.default or any(padded_dims(value) for value in values)


def _functional_write(context: PaddingContext, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``buffer.add_(1)`` becomes ``buffer + 1``; returns (the written value, the new one)."""
    target = node.args[0]
    if context.buffer(target) is None:
        known = WRITES.get(node.target)
        remedy = f"Write instead: {known}." if known else "Assign the whole buffer with copy_."
        raise context.refuse(node, "writes in place to part of a buffer", remedy)
    node.update_arg(0, context.latest(target))
    result = out_of_place(context.gm, node)
    if result is None:
        raise context.refuse(node, "has no form that is not in place", "Compute the value, then copy_ it.")
    return target, result


def _finish(context: PaddingContext, flag: fx.Node, bounds: list[int]) -> list[tuple[int, int]]:
    """Adds the overflow check, the predicated writes, and the outputs ``counts`` and ``ok``.

    The check comes as soon as all true sizes are known: the host waits for it before it prepares the next step.
    """
    graph = context.gm.graph
    (output,) = graph.find_nodes(op="output")
    sets = [(index, node) for index, node in context.table.bounds.values() if node.users]
    counts = [item(context.gm, node, 2) for _, node in sets]
    checked = [(index, bounds[index]) for index, _ in sets]
    _clone_before_write(context)
    wanted = dict.fromkeys(context.wanted)
    with graph.inserting_before(_behind(graph, [*counts, *wanted, flag])):
        for count in wanted:
            flag = context.call(aten.logical_or.default, flag, context.call(aten.eq.Scalar, count, 0))
        check = context.call(torch.ops.joestar.overflow.default, counts, [bound for _, bound in checked], flag)
        needed = graph.call_function(operator.getitem, (check, 0))
        ok = graph.call_function(operator.getitem, (check, 1))
    with graph.inserting_before(output):
        for buffer, value in context.state.items():
            value = context.call(aten.detach.default, value)
            kept = context.call(aten.where.self, ok, value, buffer)
            context.call(aten.copy_.default, buffer, kept)
    output.args = ((*output.args[0], needed, ok),)
    return checked


def _behind(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    """The first node, no input, in front of which all of these are."""
    waiting = set(nodes)
    for node in graph.nodes:
        if not waiting and node.op != "placeholder":
            return node
        waiting.discard(node)
    raise AssertionError("a node is not in the graph")


def _clone_before_write(context: PaddingContext) -> None:
    """Readers of a buffer's old value get a copy: what autograd keeps of it may not change before the backward pass."""
    first = next(node for node in context.gm.graph.nodes if node.op != "placeholder")
    for buffer, value in context.state.items():
        readers = [user for user in buffer.users if user is not value]
        if readers:
            with context.gm.graph.inserting_before(first):
                copy_of = context.call(aten.clone.default, buffer, like=buffer)
            for reader in readers:
                reader.replace_input_with(buffer, copy_of)


def _bake(gm: fx.GraphModule, table: SizeTable, bounds: list[int], batch: int) -> None:
    """Replaces every symbolic integer by the value it has under the bounds."""
    values = {symbol: bounds[index] for symbol, (index, _) in table.bounds.items()}
    if table.seeds is not None:
        values[table.seeds] = batch

    def number(arg):
        value = arg.meta.get("val")
        if not is_symbolic(value):
            return arg
        return evaluate(value.node.expr, values, arg)

    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_symbolic(node.meta.get("val")):
            node.args = fx.map_arg(node.args, number)
            node.kwargs = fx.map_arg(node.kwargs, number)


def _drop_sizes(gm: fx.GraphModule, roles: list[Input]) -> list[Input]:
    """Erases what only computed sizes, and the size inputs themselves; returns the roles that are left."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and not is_in_place(node):
            gm.graph.erase_node(node)
    kept = []
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=False):
        if role.kind in (Kind.SIZE, Kind.NUM_SEEDS):
            gm.graph.erase_node(node)
        else:
            kept.append(role)
    gm.graph.lint()
    gm.recompile()
    return kept
