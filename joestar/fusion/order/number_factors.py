"""A number of Python's that scales rows moves behind the aggregation and into the weights of the product there.

Before                                              After
    z = aten.mul(x, 0.5)                                y = spmm(sub, local, x, None, "mean")
    y = spmm(sub, local, z, None, "mean")               v = aten.mul(w, 0.5)
    h = aten.linear(y, w, b)                            h = aten.linear(y, v, b)

    m = aten.div(y, 3)       (y aggregated)             v = aten.mul(w, 1 / 3)
    h = aten.linear(m, w)                               h = aten.linear(y, v)

What reads features in place, or puts own rows beside aggregated ones, sees them as they are. Weights have a few rows.

Must not fire when the scaled rows have a reader that is no aggregation, leading slice or product; for a max or min and
a negative number; for numbers outside 0.001 to 1000, nor where those in one weight multiply to such a number; or in
float16 (rows, weights or autocast), but for 1 and -1: rows that only fit its range once they are scaled (features of
1e5 times 0.001) would be infinite. Sums of float32 and bfloat16 have room for three more digits.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, is_product, name, tensor
from joestar.fusion.match.gathers import gathers_rows
from joestar.fusion.match.rounding import in_range
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument

PATTERN = "number-factors"
_ATEN, _SPMM = torch.ops.aten, torch.ops.joestar.spmm.default
_RANGE = (1e-3, 1e3)


def run(gm: fx.GraphModule, context) -> int:
    """Moves every number as far as it goes; returns the number of steps."""
    moved, queue = 0, list(gm.graph.nodes)
    while queue:
        node = queue.pop(0)
        number = _number(node)
        if number is None or not _worth_it(node):
            continue
        if context.admits(PATTERN, node, _match(node, number, context)):
            queue[:0] = _rewrite(gm.graph, node, number, context)
            moved += 1
    return moved


def _number(node: fx.Node) -> float | None:
    """What a node multiplies rows ``[n, F]`` of floats with, where that is a number of Python's."""
    if node.target not in (_ATEN.mul.Tensor, _ATEN.div.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    rows, number = node.args
    if isinstance(number, bool) or not isinstance(number, (int, float)) or tensor(rows) is None:
        return None
    value = tensor(rows)
    if value.dim() != 2 or not value.dtype.is_floating_point or tensor(node).dtype != value.dtype or number == 0:
        return None
    return float(number) if node.target is _ATEN.mul.Tensor else 1.0 / number


def _worth_it(node: fx.Node) -> bool:
    """Whether an aggregation reads the scaled rows, or made them, or they are own rows that a product reads."""
    rows = node.args[0]
    if any(user.target is _SPMM and user.args[2] is node for user in node.users):
        return True
    made = rows.target is _SPMM or gathers_rows(rows) or _is_leading(rows)
    return made and any(is_product(user) and user.args[0] is node for user in node.users)


def _is_leading(node: fx.Node) -> bool:
    if node.target is not _ATEN.slice.Tensor or argument(node, "step") != 1:
        return False
    return argument(node, "dim") == 0 and argument(node, "start") in (0, None)


def _match(node: fx.Node, number: float, context) -> bool | Reject:
    weights = [user.args[1] for user in node.users if is_product(user) and user.args[0] is node]
    for total in (number, *(number * _held(weight) for weight in weights)):
        if not _RANGE[0] <= abs(total) <= _RANGE[1]:
            return Reject(f"{total:g} is so large or small that scaled weights might leave the range of their dtype")
    held = in_range(context, *{node, *(value for user in node.users for value in (user, *user.all_input_nodes))})
    if abs(number) != 1 and not held:
        return held
    for user in node.users:
        if user.target is _SPMM and user.args[2] is node and user.args[3] is not node:
            if number < 0 and user.args[4] not in ("sum", "mean"):
                return Reject(f"the aggregation is a {user.args[4]}, and the number is negative")
        elif not _is_leading(user) and not (is_product(user) and user.args[0] is node and user.args[1] is not node):
            return Reject(f"the scaled rows are also read by {name(user)}")
    return True


def _held(weight: fx.Node) -> float:
    """The product of the numbers by which a weight is already multiplied."""
    total = 1.0
    while weight.target is _ATEN.mul.Tensor and isinstance(weight.args[1], (int, float)):
        weight, total = weight.args[0], total * weight.args[1]
    return total


def _rewrite(graph: fx.Graph, node: fx.Node, number: float, context) -> list[fx.Node]:
    """The products with the number that stand behind what read the scaled rows."""
    rows, made = node.args[0], []
    for user in list(node.users):
        with graph.inserting_before(user):
            if user.target is _ATEN.linear.default:
                weight = emit(graph, user, _ATEN.mul.Tensor, user.args[1], number)
                new = emit(graph, user, _ATEN.linear.default, rows, weight, *user.args[2:])
            else:
                args = [rows if argument is node else argument for argument in user.args]
                plain = emit(graph, user, user.target, *args, **user.kwargs)
                new = emit(graph, user, _ATEN.mul.Tensor, plain, number)
                made.append(new)
        context.fired(PATTERN, new, f"{number:g} behind {name(user)}")
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)
    return made
