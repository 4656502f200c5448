"""Dropout becomes a function of (seed, epoch, step, site, row id, column): ARCHITECTURE decision 3.

Before: ``aten.dropout(x, p, True)``. After: ``joestar.keyed_dropout(x, ids, key, site, p)`` with the ids of the nodes
that the rows stand for, or ``joestar.keyed_edge_dropout`` for edge values. The mask no longer depends on padding, on
the execution mode, or on a global generator.
"""

import torch
from torch import fx

from joestar.errors import PaddingError
from joestar.lowering import fakes
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import SizeTable, expression
from joestar.lowering.verify import verify_fakes

_DROPOUTS = {torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default}
_IN_PLACE = {torch.ops.aten.dropout_.default, torch.ops.aten.feature_dropout_.default}
_RNNS = {torch.ops.aten.lstm.input: 5, torch.ops.aten.gru.input: 5}
"""Recurrent networks: position of their own dropout probability; whether they train is the argument behind it."""


def refuse_random(node: fx.Node) -> None:
    """Raises ``PaddingError`` for a node that draws from a global generator."""
    if node.target in _IN_PLACE:
        random = False
    elif node.target in _RNNS:
        random = all(node.args[_RNNS[node.target] :][:2])
    elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
        random = len(node.args) > 4 and node.args[4] > 0
    else:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _is_evaluated(node)
    if random:
        remedy = "Use F.dropout (its masks are keyed by step and node), or pass random values as features."
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            remedy = (
                "Leave the dropout of its weights out: dropout=0 of nn.MultiheadAttention, or "
                "layer.self_attn.dropout = 0.0 of a TransformerEncoderLayer, whose other dropouts stay."
            )
        raise PaddingError(
            f"{node.target} at {node_line(node)}: its values would depend on the execution mode. {remedy}"
        )


def _is_evaluated(node: fx.Node) -> bool:
    """Whether a random op is told that it is not training (``alpha_dropout``, ``rrelu``)."""
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("train", "training"):
            return not (node.args[index] if index < len(node.args) else argument.default_value)
    return False


def has_dropout(gm: fx.GraphModule) -> bool:
    """Whether ``lower_dropout`` will key a mask."""
    return any(node.target in _DROPOUTS and node.args[2] and node.args[1] != 0 for node in gm.graph.nodes)


def lower_dropout(gm: fx.GraphModule, table: SizeTable, key: fx.Node | None, node_ids: fx.Node | None = None) -> int:
    """Rewrites every dropout; returns how many.

    Args:
        key: the input that holds (seed, epoch, step); node_ids: the one with what nodes are known by, if not positions.

    Raises:
        PaddingError: for other random operations, or a dropout whose rows are neither nodes nor edges.
    """
    sites = 0
    for node in list(gm.graph.nodes):
        if node.target not in _DROPOUTS:
            refuse_random(node)
            continue
        x, p, train = node.args
        if not train or p == 0:
            node.replace_all_uses_with(x)
        else:
            node.replace_all_uses_with(_keyed(gm, node, x, p, table, key, sites, node_ids))
            sites += 1
        gm.graph.erase_node(node)
    gm.graph.lint()
    verify_fakes(gm, "lowering of dropout")
    return sites


def _keyed(
    gm, node: fx.Node, x: fx.Node, p: float, table: SizeTable, key: fx.Node, site: int, node_ids: fx.Node | None
) -> fx.Node:
    ops = torch.ops.joestar
    value = x.meta["val"]
    columnwise = node.target is torch.ops.aten.feature_dropout.default
    rows = expression(value.shape[0]) if value.dim() else None
    if value.dim() == 0 or columnwise or (rows is None and value.dim() and _has_padding(value)):
        raise PaddingError(
            f"{node.target} at {node_line(node)}: dropout needs rows that are nodes or edges, in dimension 0; "
            f"got shape {tuple(value.shape)}. Apply F.dropout before reshaping."
        )
    columns_vary = any(expression(size) is not None for size in value.shape[1:])
    flags = (False, True) if columns_vary else ()
    with gm.graph.inserting_before(node):
        if p == 1:
            new = gm.graph.call_function(torch.ops.aten.zeros_like.default, (x,))
        elif rows in table.ids:
            ids = known_by(gm, table.ids[rows], node_ids)
            new = gm.graph.call_function(ops.keyed_dropout.default, (x, ids, key, site, p, *flags))
        elif rows in table.edges:
            indptr, dsts = table.edges[rows]
            ids = known_by(gm, dsts, node_ids)
            new = gm.graph.call_function(ops.keyed_edge_dropout.default, (x, indptr, ids, key, site, p, *flags[1:]))
        elif rows is None:
            count, options = torch.ops.aten.arange.default, {"device": value.device}
            ids = gm.graph.call_function(count, (value.shape[0],), options)
            ids.meta = {"val": fakes.run(gm.graph, count, value.shape[0], **options)}
            new = gm.graph.call_function(ops.keyed_dropout.default, (x, ids, key, site, p))
        else:
            raise PaddingError(
                f"{node.target} at {node_line(node)}: the rows of shape {tuple(value.shape)} are neither nodes nor "
                "edges of a sampled set, so their masks cannot be keyed. Apply F.dropout before combining sets."
            )
    new.meta = dict(node.meta)
    return new


def known_by(gm: fx.GraphModule, nodes: fx.Node, node_ids: fx.Node | None) -> fx.Node:
    """What nodes are known by: themselves, or their rows of ``node_ids``."""
    if node_ids is None:
        return nodes
    select = torch.ops.aten.index_select.default
    ids = gm.graph.call_function(select, (node_ids, 0, nodes))
    ids.meta = {"val": fakes.run(gm.graph, select, node_ids.meta["val"], 0, nodes.meta["val"])}
    return ids


def _has_padding(value) -> bool:
    return any(expression(size) is not None for size in value.shape)
