"""Edges of a block with self-loops that were added: how many are valid is known on the device alone.

``block.add_self_loops()`` has room for all edges and a loop per row; where loops were there before, as many entries are
left over at the end. Aggregations end where the offsets say. What reads all entries, or counts them, would see those
that are left over, in exact execution too: it is refused in any.
"""

import copy

import sympy
import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, PaddingError
from joestar.lowering.counts import SHAPE_SCALARS, is_symbolic
from joestar.lowering.functional import is_in_place
from joestar.lowering.inputs import Input
from joestar.lowering.padding import PaddingContext
from joestar.lowering.sizes import SizeTable, expression, padded_dims, size_table
from joestar.torch_private import OpOverload, tree_leaves


class _Looped(PaddingContext):
    """What a rule may ask for, on a copy that nobody runs: of other sets than edges with loops, anything is granted."""

    def __init__(self, gm: fx.GraphModule, table: SizeTable):
        super().__init__(gm, table, None)
        self.any = next(iter(gm.graph.nodes))

    def known(self, expr) -> bool:
        return expr is not None and self.table.with_loops(expr) is not None

    def concerns(self, expr: sympy.Expr) -> bool:
        return self.known(expr)

    def count(self, expr: sympy.Expr, node: fx.Node) -> fx.Node:
        return self.any

    def want_rows(self, expr: sympy.Expr, node: fx.Node) -> None:
        pass


def check_looped_rows(gm: fx.GraphModule, roles: list[Input], table: SizeTable, origin: str) -> None:
    """Raises ``CaptureError``, with the user's line, where entries that are left over would be read or counted."""
    if all(edges.is_Symbol or edges in table.exact for edges in table.edges):
        return
    trial = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    context = _Looped(trial, size_table(trial, roles))
    try:
        for node in list(trial.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                _check(context, node)
    except PaddingError as error:
        raise CaptureError(f"{origin}: of edges with self-loops that were added: {error}") from error


def _check(context: _Looped, node: fx.Node) -> None:
    from joestar.lowering.rules import rule_for, shapes

    if any(_counts_loops(context, value) for value in _numbers(node)):
        raise context.refuse(
            node, "computes with the number of edges of a block with added self-loops, which varies",
            "Take the block without loops: block.num_edges; or sum up degrees, loops among them: "
            "looped.in_degrees().sum().",
        )  # fmt: skip
    moves = node.target._schema.name.partition("::")[2] in shapes.RULES  # rows where others were: nothing is read yet
    if moves or is_in_place(node) or not any(map(context.known, _sizes(node))):
        return
    with context.gm.graph.inserting_before(node):
        rule_for(node)(context, node)


def _sizes(node: fx.Node):
    """Symbolic sizes of a node's operands and results."""
    for each in (*node.all_input_nodes, node):
        for value in tree_leaves(each.meta.get("val")):
            yield from padded_dims(value).values()


def _numbers(node: fx.Node):
    """Numbers computed from sizes that an op takes as values, not as shapes."""
    if node.target in SHAPE_SCALARS:
        return
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if isinstance(value, fx.Node) and is_symbolic(value.meta.get("val")) and kind in ("Tensor", "number", "Scalar"):
            yield value


def _counts_loops(context: _Looped, number: fx.Node) -> bool:
    """Whether the number of edges with loops is among what a number was computed from."""
    seen, waiting = set(), [number]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and context.known(expression(value)):
            return True
        if not isinstance(value, Tensor):
            waiting += [each for each in node.all_input_nodes if is_symbolic(each.meta.get("val"))]
    return False
