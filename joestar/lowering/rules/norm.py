"""Batch normalisation: statistics over the valid rows, running statistics written only by a valid step."""

import torch
from torch import fx

from joestar.lowering.sizes import expression, item, padded_dims

joestar = torch.ops.joestar
aten = torch.ops.aten


def _batch_norm(context, node: fx.Node) -> None:
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args[:8]
    value = x.meta["val"]
    if not training:
        return
    if value.dim() != 2 or 1 in padded_dims(value):
        raise context.refuse(node, f"normalises a tensor of shape {tuple(value.shape)}", "BatchNorm needs [rows, C].")
    rows = expression(value.shape[0])
    if rows is None:
        count = context.call(aten.full.default, [], value.shape[0], dtype=torch.int64, device=value.device)
    else:
        count = context.entries(rows, node)
    outputs = (value, value[0], value[0])
    normed = context.call(joestar.masked_batch_norm.default, x, weight, bias, count, eps)
    normed.meta = {**node.meta, "val": outputs}
    y, mean, var = (item(context.gm, normed, index) for index in range(3))
    y.meta = dict(node.meta)
    if running_mean is not None:
        for buffer, statistic in ((running_mean, mean), (running_var, var)):
            merged = context.call(aten.lerp.Scalar, context.latest(buffer), statistic, momentum, like=buffer)
            context.write(buffer, merged, node)
    node.replace_all_uses_with(y)
    context.gm.graph.erase_node(node)
    context.note("batch norm")


def _instance_norm(context, node: fx.Node) -> None:
    raise context.refuse(node, "normalises over rows of single graphs", "Use LayerNorm or BatchNorm.")


RULES = {"batch_norm": _batch_norm, "native_batch_norm": _instance_norm, "instance_norm": _instance_norm}
