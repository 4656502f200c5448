"""``squeeze`` and sets: PyTorch drops a dimension of size 1, and rows are as many as a batch has.

While a program is traced no set has one row, so its dimension stays. In a batch where it has, plain PyTorch would drop
it, and what follows would work along another dimension.
"""

import warnings

import torch
from torch import fx

from joestar.errors import CaptureError, JoestarWarning
from joestar.lowering.origin import is_own, is_user, node_frames, node_line
from joestar.lowering.rules.arguments import dims
from joestar.lowering.sizes import expression

_SQUEEZE = torch.ops.aten.squeeze


def keep_rows(gm: fx.GraphModule, origin: str) -> None:
    """Makes every ``squeeze()`` one of columns, which leaves rows alone in every batch, and says so.

    Raises:
        CaptureError: where rows are named, ``squeeze(0)``, or there is nothing else to drop.
    """
    for node in gm.graph.nodes:
        if node.target not in (_SQUEEZE.default, _SQUEEZE.dim, _SQUEEZE.dims):
            continue
        value = node.args[0].meta["val"]
        asked = dims(node, value.dim())
        if all(expression(value.shape[dim]) is None for dim in asked):
            continue
        columns = [dim for dim in asked if expression(value.shape[dim]) is None and value.shape[dim] == 1]
        where = node_line(node)
        if node.target is not _SQUEEZE.default or not columns:
            raise CaptureError(
                f"{origin}: squeeze would drop the dimension of rows where a batch has one, and only there\n"
                f"  at {where}\n  Write instead: the columns that it is to drop, squeeze(-1), or nothing."
            )
        node.target, node.args = _SQUEEZE.dims, (node.args[0], columns)
        files = [file for file, *_ in node_frames(node) if is_user(file)]
        if files and is_own(files[-1]):
            warnings.warn(
                f"squeeze() leaves rows alone here, as many as a batch has; PyTorch drops their dimension, too, where "
                f"there is one. Name the columns: squeeze({columns[0] - value.dim() if len(columns) == 1 else columns})"
                f".\n  at {where}",
                JoestarWarning,
                stacklevel=2,
            )
    gm.recompile()
