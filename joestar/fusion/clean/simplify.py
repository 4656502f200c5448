"""Operations that give back what they read are removed, and views take one form: patterns see what is behind them.

Before                                              After
    a = aten.slice(x, 0, 0, 9223372036854775807)        u = aten.unsqueeze(x, 1)
    b = aten.to.dtype(a, torch.float32)  (x: float32)
    u = aten.unsqueeze(b, 1)

    h = aten.view(y, [-1, 4, 8])  (y: [n, 32])          h = aten.unflatten(y, 1, [4, 8])

    w = aten.to.dtype(a, torch.bfloat16)                y = spmm(indptr, indices, x, a, "sum")
    y = spmm(indptr, indices, x, w, "sum")

``x[:, None]`` and ``.float()`` write such nodes; ``.view(-1, H, C)`` is how heads are split in many a script;
``alpha.to(h.dtype)`` under autocast rounds weights that an aggregation, whose result is as wide as its rows, computes
with in float32. Must not fire where the result is written in place, where a copy is asked for, where a view changes the
number of rows, or where what is cast to float32 has 16 bits under autocast, which a trace in float32 does not show.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit
from joestar.lowering.functional import is_in_place
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import expression, same_shape, same_size

_ATEN, _SPMM = torch.ops.aten, torch.ops.joestar.spmm.default
_SHORT = (torch.bfloat16, torch.float16)


def run(gm: fx.GraphModule, context) -> int:
    """Removes every operation without effect, and writes views of heads in one form; returns how many."""
    removed = 0
    for node in list(gm.graph.nodes):
        if _splits_columns(node):
            with gm.graph.inserting_before(node):
                sizes = [int(size) for size in node.meta["val"].shape[1:]]
                new = emit(gm.graph, node, _ATEN.unflatten.int, node.args[0], 1, sizes)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            removed += 1
        elif (_does_nothing(node, context) or _rounds_weights(node, context)) and not any(
            is_in_place(user) for user in node.users
        ):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            removed += 1
    return removed


def _does_nothing(node: fx.Node, context) -> bool:
    if node.target is _ATEN.slice.Tensor:
        return argument(node, "step") == 1 and _same_shape(node)
    if node.target is _ATEN.to.dtype:
        source, dtype = node.args[:2]
        same = len(node.args) == 2 and not node.kwargs and source.meta["val"].dtype == dtype
        return same and _dtype_under_autocast(source, context) == dtype
    if node.target in (_ATEN.view.default, _ATEN.reshape.default):
        return _same_shape(node)
    return False


def _rounds_weights(node: fx.Node, context) -> bool:
    """Whether weights in float32 become 16 bits under autocast, and aggregations of rows are all that reads them."""
    if context.autocast is None or node.target is not _ATEN.to.dtype or len(node.args) > 2 or node.kwargs:
        return False
    source, dtype = node.args
    if dtype not in _SHORT or _dtype_under_autocast(source, context) != torch.float32:
        return False
    return bool(node.users) and all(user.target is _SPMM and _only_weight(user, node) for user in node.users)


def _only_weight(spmm: fx.Node, node: fx.Node) -> bool:
    return spmm.args[3] is node and spmm.args[2] is not node


def _dtype_under_autocast(node: fx.Node, context) -> torch.dtype:
    if context.autocast is None:
        return node.meta["val"].dtype
    if node not in context.dtypes.values:
        context.dtypes.take_in(node.graph)
    return context.dtypes.values[node].dtype


def _splits_columns(node: fx.Node) -> bool:
    """Whether a view gives every row of a matrix two dimensions of known sizes."""
    if node.target not in (_ATEN.view.default, _ATEN.reshape.default) or any(map(is_in_place, node.users)):
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    known = all(expression(size) is None for size in (*before[1:], *after[1:]))
    return len(before) == 2 and len(after) == 3 and known and same_size(before[0], after[0])


def _same_shape(node: fx.Node) -> bool:
    return same_shape(node.args[0].meta["val"].shape, node.meta["val"].shape)
