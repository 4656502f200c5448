"""A bias is added where rows are read: the product in front of an aggregation has none, nor a column of ones.

Before                                               After, if ``on-read`` is chosen
    m, _ = sample_aggregate_cat(..., features, "mean")   m, _ = sample_aggregate_cat(..., features, "mean", False)
    w    = join_columns([w_l, w_r, b], 264)              w    = join_columns([w_l, w_r], 256)
    h    = aten.linear(m, w)                             h    = aten.linear(m, w)
    both, kept = aggregate_cat_kept(sub, local, h,       both, kept = aggregate_cat_kept(sub, local, h, bits, 2.0,
                                    bits, 2.0, "mean")                                   "mean", b)

The same for ``aten.linear(x, w, b)``, and for ``aggregate_rows_kept`` and ``aggregate_activated``. The aggregation's
gradient writes that of every row of ``h`` once, and adds them up on the way: the gradient of the bias takes no pass
over the rows of its own, and the product no tile more for one column.

A choice ``bias:hop1`` per aggregation, named as for ``backward-format``, by default ``on-read`` on a GPU where the
column of ones makes the product's matrix a tile of 64 columns wider (two times 128 columns: 264 in place of 256).

Must not fire when the product has no bias, or one that is no vector of its columns or that the step writes, when the
product, or the matrix with ones, has another reader, or for an aggregation that neither notes bits nor applies an
activation.
"""

import operator

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.match.emit import emit, hashed, tensor
from joestar.fusion.record import Reject
from joestar.kernels.layout import cat_width
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.rules.arguments import argument, position
from joestar.lowering.sizes import same_shape

PATTERN = "bias-on-read"
ON_READ, ADDED = "on-read", "added"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_KEPT = {
    _JOESTAR.aggregate_cat_kept.default: 6, _JOESTAR.aggregate_rows_kept.default: 8,
    _JOESTAR.aggregate_activated.default: 13,
}  # fmt: skip
"""Number of arguments in front of the bias."""
_TILE = 64
"""Columns of the smallest tile in which a GPU's library multiplies."""


def run(gm: fx.GraphModule, context) -> int:
    """Moves every bias that is to be added on reading; returns how many."""
    moved, taken = 0, {}
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    for node in list(gm.graph.nodes):
        if node.target not in _KEPT or len(node.args) > _KEPT[node.target]:
            continue
        match = _match(node.args[2], written)
        if match:
            form = context.choose(
                "bias", site_name(node, taken), (ADDED, ON_READ), _default(node.args[2], context), node
            )
            match = match if form == ON_READ else Reject(f"{ADDED} is chosen")
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match, context)
            moved += 1
    return moved


def _match(product: fx.Node, written: set[fx.Node]) -> fx.Node | Reject:
    """The bias of the rows."""
    if product.target is not _ATEN.linear.default:
        return Reject("the rows are no product")
    if len(product.users) != 1:
        return Reject("the product has another reader")
    bias, matrix = _bias(product), product.args[0]
    if bias is None:
        return Reject("the product has no bias")
    if root(bias) in written:
        return Reject(f"{bias.name} is written in the step")
    if len(product.args) < 3 and len(matrix.users) != 1:
        return Reject("the matrix with a column of ones has another reader")
    rows, vector = product.meta["val"], tensor(bias)
    same = vector.dtype == rows.dtype and same_shape(vector.shape, rows.shape[1:])
    return bias if same else Reject("the bias is no vector of the product's columns and dtype")


def _default(product: fx.Node, context) -> str:
    """Whether a column of ones makes a GPU's product a tile wider."""
    if context.device != "cuda" or len(product.args) > 2:
        return ADDED
    width = argument(product.args[0].args[0], "x").meta["val"].shape[1]
    with_ones, without = (-(-cat_width(width, ones) // _TILE) for ones in (True, False))
    return ON_READ if with_ones > without else ADDED


def _bias(product: fx.Node) -> fx.Node | None:
    """The bias of a product: an argument, or the last of joined weights, which meets the column of ones."""
    if len(product.args) > 2:
        return product.args[2]
    matrix, weight = product.args
    if matrix.target is not operator.getitem or matrix.args[0].target is not _JOESTAR.sample_aggregate_cat.default:
        return None
    if weight.target is not _JOESTAR.join_columns.default:
        return None
    last = weight.args[0][-1]
    return last if tensor(last).dim() == 1 else None


def _rewrite(graph: fx.Graph, node: fx.Node, bias: fx.Node, context) -> None:
    product = node.args[2]
    matrix, weight, *added = product.args
    if not added:
        matrix, weight = _without_ones(graph, matrix, weight)
    with graph.inserting_before(product):
        new = emit(graph, product, _ATEN.linear.default, matrix, weight)
    context.fired(PATTERN, node, bias.name)
    node.args = (*node.args[:2], new, *node.args[3:], bias)
    for old in (product, *(() if added else product.args)):
        if not old.users:
            graph.erase_node(old)


def _without_ones(graph: fx.Graph, matrix: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(matrix of aggregated and own rows, joined weights), both without the column for the bias."""
    both, parts = matrix.args[0], weight.args[0][:-1]
    width = cat_width(argument(both, "x").meta["val"].shape[1], False)
    with graph.inserting_before(both):
        narrow = emit(graph, both, both.target, *both.args[: position(both, "ones")], False, **hashed(both))
    both.replace_all_uses_with(narrow)
    graph.erase_node(both)
    with graph.inserting_before(matrix):
        rows = emit(graph, matrix, operator.getitem, narrow, 0)
    with graph.inserting_before(weight):
        joined = emit(graph, weight, weight.target, parts, width)
    return rows, joined
