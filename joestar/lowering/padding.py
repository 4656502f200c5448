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

from joestar.errors import PaddingError
from joestar.lowering.functional import functional_overload, is_in_place
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import SizeTable, expression, item, padded_dims, size_table
from joestar.lowering.symbolic import emit, evaluate

aten = torch.ops.aten

SHAPE_SCALARS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
"""Ops whose Scalar arguments are sizes, not values."""


@dataclass
class Padded:
    """A static graph.

    Attributes:
        gm: the graph; outputs are those of the symbolic graph, then ``counts`` and ``ok``.
        roles: per placeholder, as in ``Captured``, plus ``("seed_count",)`` and ``("flag",)``.
        checked: for every entry of ``counts``: (index of the size, bound).
        rewrites: how often each rule rewrote a node.
    """

    gm: fx.GraphModule
    roles: list[tuple]
    checked: list[tuple[int, int]]
    rewrites: dict[str, int]


class PaddingContext:
    """What a rule may ask for while it rewrites one node."""

    def __init__(self, gm: fx.GraphModule, table: SizeTable, seed_count: fx.Node):
        self.gm = gm
        self.table = table
        self.seed_count = seed_count
        self.state: dict[fx.Node, fx.Node] = {}
        self.rewrites: dict[str, int] = {}

    def call(self, target, *args, like: fx.Node | None = None, **kwargs) -> fx.Node:
        """A new call at the insertion point, with the metadata of ``like``."""
        node = self.gm.graph.call_function(target, args, kwargs)
        if like is not None:
            node.meta = dict(like.meta)
        return node

    def known(self, expr) -> bool:
        """Whether the number of valid entries along a dimension of this size is known."""
        symbols = self.table.bounds.keys() | {self.table.seeds}
        return expr is not None and expr.free_symbols <= symbols

    def count(self, expr: sympy.Expr, node: fx.Node) -> fx.Node:
        """The number of valid entries behind a symbolic size, as a node (0-d tensor)."""
        for symbol in expr.free_symbols:
            if symbol != self.table.seeds and symbol not in self.table.bounds:
                raise PaddingError(
                    f"{node.target} at {node_line(node)}: the size {expr} of its operand is not the size of a sampled "
                    "set, so its padded form is unknown. Derive sizes from blocks (num_src, num_dst, num_edges)."
                )
        return emit(self.gm, expr, self._symbol_count)

    def _symbol_count(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol == self.table.seeds:
            return self.seed_count
        return item(self.gm, self.table.bounds[symbol][1], 2)

    def mask(self, x: fx.Node, dim: int, value, node: fx.Node) -> fx.Node:
        """``x`` with the padding along ``dim`` replaced by ``value``."""
        expr = expression(x.meta["val"].shape[dim])
        if expr in self.table.edges and not expr.is_Symbol:
            raise self.refuse(node, "reduces over the edges of a block with added self-loops, whose number varies")
        count = self.count(expr, node)
        return self.call(torch.ops.joestar.mask_rows.default, x, count, dim, value, like=x)

    def refuse(self, node: fx.Node, why: str, remedy: str = "") -> PaddingError:
        """The error for a node that has no padded form."""
        return PaddingError(f"{node.target} at {node_line(node)} {why}. {remedy}".rstrip())

    def update(self, buffer: fx.Node, value: fx.Node) -> None:
        """Notes a write to an input of the graph: carried out at the end of the step, if it is valid."""
        self.state[buffer] = value

    def latest(self, buffer: fx.Node) -> fx.Node:
        """The value of an input of the graph at this point."""
        return self.state.get(buffer, buffer)


def pad(gm: fx.GraphModule, roles: list[tuple], bounds: list[int], batch: int) -> Padded:
    """A static form of the symbolic graph for at most ``batch`` seeds and sets of at most ``bounds[i]`` entries.

    Raises:
        PaddingError: if an op has no correct form on padded rows; it names the user's line.
    """
    from joestar.lowering.rules import rule_for

    gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    table = size_table(gm, roles)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]):
        seed_count = gm.graph.placeholder("seed_count")
    with gm.graph.inserting_after(seed_count):
        flag = gm.graph.placeholder("flag")
    context = PaddingContext(gm, table, seed_count)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        with gm.graph.inserting_before(node):
            _values_to_counts(context, node)
            if is_in_place(node):
                _defer_write(context, node)
            elif not isinstance(node.target, torch._ops.OpOverload) or not _touches_padding(node):
                continue
            else:
                rule_for(node)(context, node)
    checked = _finish(context, flag, bounds)
    _bake(gm, table, bounds, batch)
    kept = _drop_sizes(gm, roles)
    return Padded(gm, [*kept, ("seed_count",), ("flag",)], checked, context.rewrites)


def _touches_padding(node: fx.Node) -> bool:
    values = [arg.meta.get("val") for arg in node.all_input_nodes] + [node.meta.get("val")]
    return node.target is aten.batch_norm.default or any(padded_dims(value) for value in values)


def _is_symbolic(value) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _values_to_counts(context: PaddingContext, node: fx.Node) -> None:
    """Replaces sizes used as numbers (``x / block.num_dst``) by counts."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in SHAPE_SCALARS:
        return
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        _fill_with_count(context, node)
        return
    for index, argument in enumerate(node.target._schema.arguments):
        inside = index < len(node.args)
        value = node.args[index] if inside else node.kwargs.get(argument.name)
        if not isinstance(value, fx.Node) or not _is_symbolic(value.meta.get("val")):
            continue
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind not in ("Tensor", "number", "Scalar"):
            continue
        if kind != "Tensor":
            node.target = _tensor_overload(context, node)
        count = context.count(value.meta["val"].node.expr, node)
        if inside:
            node.update_arg(index, count)
        else:
            node.update_kwarg(argument.name, count)
        context.rewrites["size to count"] = context.rewrites.get("size to count", 0) + 1


_SCALAR_TO_TENSOR = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor", "Scalar_Tensor": "Tensor"}


def _tensor_overload(context: PaddingContext, node: fx.Node):
    wanted = _SCALAR_TO_TENSOR.get(node.target._overloadname)
    found = getattr(node.target.overloadpacket, wanted, None) if wanted else None
    if found is None:
        raise context.refuse(
            node, "uses the size of a sampled set as a number in a place where only constants may stand",
            "Divide or multiply by the size instead.",
        )  # fmt: skip
    return found


def _fill_with_count(context: PaddingContext, node: fx.Node) -> None:
    position = 1 if node.target is aten.full.default else 0
    fill = node.args[position]
    if not isinstance(fill, fx.Node) or not _is_symbolic(fill.meta.get("val")):
        return
    count = context.count(fill.meta["val"].node.expr, node)
    dtype = node.meta["val"].dtype
    new = context.call(aten._to_copy.default, count, like=node, dtype=dtype)
    if position == 1 and node.args[0]:
        new = context.call(aten.expand.default, new, node.args[0], like=node)
    node.replace_all_uses_with(new)


def _defer_write(context: PaddingContext, node: fx.Node) -> None:
    """``buffer.add_(1)`` becomes ``buffer + 1`` now and a predicated write at the end."""
    buffer, twin = node.args[0], functional_overload(node.target)
    if buffer.op != "placeholder" or twin is None:
        raise context.refuse(node, "writes in place to part of a buffer", "Assign the whole buffer with copy_.")
    if node.target is aten.copy_.default:
        new = context.call(aten.expand_copy.default, node.args[1], list(buffer.meta["val"].shape), like=node)
    else:
        new = context.call(twin, context.latest(buffer), *node.args[1:], like=node, **node.kwargs)
    context.update(buffer, new)
    nodes = list(context.gm.graph.nodes)
    later = set(nodes[nodes.index(node) + 1 :])
    node.replace_all_uses_with(new)
    buffer.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
    context.gm.graph.erase_node(node)


def _finish(context: PaddingContext, flag: fx.Node, bounds: list[int]) -> list[tuple[int, int]]:
    """Appends the overflow check, the predicated writes, and the outputs ``counts`` and ``ok``."""
    graph = context.gm.graph
    (output,) = graph.find_nodes(op="output")
    sets = [(index, node) for index, node in context.table.bounds.values() if node.users]
    counts = [item(context.gm, node, 2) for _, node in sets]
    checked = [(index, bounds[index]) for index, _ in sets]
    with graph.inserting_before(output):
        check = context.call(torch.ops.joestar.overflow.default, counts, [bound for _, bound in checked], flag)
        needed = graph.call_function(operator.getitem, (check, 0))
        ok = graph.call_function(operator.getitem, (check, 1))
        for buffer, value in context.state.items():
            kept = context.call(aten.where.self, ok, value, buffer)
            context.call(aten.copy_.default, buffer, kept)
    output.args = ((*output.args[0], needed, ok),)
    return checked


def _bake(gm: fx.GraphModule, table: SizeTable, bounds: list[int], batch: int) -> None:
    """Replaces every symbolic integer by the value it has under the bounds."""
    values = {symbol: bounds[index] for symbol, (index, _) in table.bounds.items()}
    if table.seeds is not None:
        values[table.seeds] = batch

    def number(arg):
        value = arg.meta.get("val")
        if not _is_symbolic(value):
            return arg
        return evaluate(value.node.expr, values, arg)

    for node in gm.graph.nodes:
        if node.op == "call_function" and not _is_symbolic(node.meta.get("val")):
            node.args = fx.map_arg(node.args, number)
            node.kwargs = fx.map_arg(node.kwargs, number)


def _drop_sizes(gm: fx.GraphModule, roles: list[tuple]) -> list[tuple]:
    """Erases what only computed sizes, and the size inputs themselves; returns the roles that are left."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and not _writes(node):
            gm.graph.erase_node(node)
    kept = []
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=False):
        if role[0] in ("size", "num_seeds"):
            gm.graph.erase_node(node)
        else:
            kept.append(role)
    gm.graph.lint()
    gm.recompile()
    return kept


def _writes(node: fx.Node) -> bool:
    return is_in_place(node) or node.target is torch._C._set_grad_enabled


