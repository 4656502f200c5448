"""Batch normalisation: statistics over the valid rows, running statistics written only by a valid step."""

import operator

import torch
from torch import fx

from joestar.errors import PaddingError
from joestar.lowering import fakes
from joestar.lowering.dropout import known_by
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import SizeTable, expression, padded_dims
from joestar.torch_private import detect_fake_mode

joestar = torch.ops.joestar
aten = torch.ops.aten


PADDED = 6
"""Position of ``padded`` among the arguments of ``row_parts``."""


def has_synced_norms(gm: fx.GraphModule) -> bool:
    """Whether statistics are taken over the rows of several ranks."""
    return any(node.target is joestar.synced_batch_norm.default for node in gm.graph.nodes)


def lower_synced_norms(gm: fx.GraphModule, table: SizeTable, node_ids: fx.Node | None) -> None:
    """Every ``synced_batch_norm`` is told what its rows count for.

    Before: ``joestar.synced_batch_norm(x, w, b, n, ones, ...)``. After: ``parts = joestar.row_parts(ids, n, seeds, m,
    ...)`` in place of the ones, with the ids of the nodes that the rows stand for.

    Args:
        node_ids: the input with what nodes are known by, if not positions.

    Raises:
        PaddingError: for rows that are no nodes.
    """
    parts: dict = {}
    for node in gm.graph.find_nodes(op="call_function", target=joestar.synced_batch_norm.default):
        rows = expression(node.args[0].meta["val"].shape[0])
        if rows not in table.ids:
            raise PaddingError(
                f"SyncBatchNorm at {node_line(node)} normalises rows of shape {tuple(node.args[0].meta['val'].shape)} "
                "that are not the nodes of a sampled set, so that several ranks cannot tell which of them they share. "
                "Normalise rows of nodes, or use BatchNorm, whose statistics are those of every rank by itself."
            )
        with gm.graph.inserting_before(node):
            if rows not in parts:
                parts[rows] = _row_parts(gm, node, table, rows, node_ids)
            ones = node.args[4]
            node.update_arg(4, parts[rows])
            if not ones.users:
                gm.graph.erase_node(ones)


def _row_parts(gm: fx.GraphModule, node: fx.Node, table: SizeTable, rows, node_ids: fx.Node | None) -> fx.Node:
    seeds = table.ids[table.seeds]
    number = _called(gm, node, aten.sym_size.int, seeds, 0)
    device = seeds.meta["val"].device
    seed_count = _called(gm, node, aten.full.default, [], number, dtype=torch.int64, device=device)
    known = [known_by(gm, nodes, node_ids) for nodes in (table.ids[rows], seeds)]
    given = known[0], node.args[3], known[1], seed_count, *node.args[6:8], False
    return _called(gm, node, joestar.row_parts.default, *given)


def _called(gm: fx.GraphModule, like: fx.Node, target, *args, **kwargs) -> fx.Node:
    """A call at the insertion point, with its fake value and the rest of the metadata of another node."""
    new = gm.graph.call_function(target, args, kwargs)
    new.meta = {**like.meta, "val": fakes.run(gm.graph, target, *fx.map_arg(args, lambda a: a.meta["val"]), **kwargs)}
    return new


def lower_batch_norm(gm: fx.GraphModule) -> int:
    """Rewrites every training-mode batch norm of rows; returns how many. Exact and padded runs then share its form.

    Before                                              After
        y = aten.batch_norm(x, w, b, mean, var, ...)        n = aten.full([], rows)
                                                            y, m, v = joestar.masked_batch_norm(x, w, b, n, eps)
                                                            aten.copy_(mean, joestar.running_average(mean, m, ...))

    Must not fire in evaluation mode, which normalises by what the buffers hold, or on shapes other than ``[rows, C]``.
    """
    rewrites = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, training = node.args[0], node.args[5]
        value = x.meta["val"]
        if training and value.dim() == 2 and 1 not in padded_dims(value):
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(_lowered(gm, node))
            gm.graph.erase_node(node)
            rewrites += 1
    return rewrites


def _lowered(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    x, weight, bias, running_mean, running_var, _, momentum, eps = node.args[:8]
    mode = detect_fake_mode([x.meta["val"]])

    def call(target, *args, **kwargs) -> fx.Node:
        new = gm.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with mode, torch.no_grad():
            new.meta = {**node.meta, "val": target(*values[0], **values[1])}
        return new

    rows = call(aten.sym_size.int, x, 0) if padded_dims(x.meta["val"]) else x.meta["val"].shape[0]
    count = call(aten.full.default, [], rows, dtype=torch.int64, device=x.meta["val"].device)
    normed = call(joestar.masked_batch_norm.default, x, weight, bias, count, eps)
    y, mean, var = (call(operator.getitem, normed, index) for index in range(3))
    if running_mean is not None:
        for buffer, statistic, least in ((running_mean, mean, 1), (running_var, var, 2)):
            moved = call(joestar.running_average.default, buffer, statistic, momentum, count, least)
            call(aten.copy_.default, buffer, moved)
    return y


def masked_batch_norm(context, node: fx.Node) -> None:
    """Its count is a size like any other; only that of edges with self-loops is none."""
    context.entries(expression(node.args[0].meta["val"].shape[0]), node)


def row_parts(context, node: fx.Node) -> None:
    """Under bounds, which are those of all ranks, sizes need no comparing."""
    node.update_arg(PADDED, True)


def _batch_norm(context, node: fx.Node) -> None:
    """In evaluation mode every row is normalised on its own, by what the buffers hold."""
    if node.args[5]:
        shape = tuple(node.args[0].meta["val"].shape)
        raise context.refuse(node, f"normalises a tensor of shape {shape}", "BatchNorm needs [rows, C].")


def _instance_norm(context, node: fx.Node) -> None:
    raise context.refuse(node, "normalises over rows of single graphs", "Use LayerNorm or BatchNorm.")


RULES = {
    **dict.fromkeys(("native_batch_norm", "instance_norm"), _instance_norm),
    "batch_norm": _batch_norm,
    **dict.fromkeys(("masked_batch_norm", "batch_norm_rows", "synced_batch_norm"), masked_batch_norm),
    "row_parts": row_parts,
}
