"""``squeeze`` and sets: PyTorch drops a dimension of size 1, and rows are as many as a batch has.

While a program is traced no set has one row, so its dimension stays. In a batch where it has, plain PyTorch would drop
it, and what follows would work along another dimension.
"""

import warnings

import torch
from torch import fx

from joestar.errors import JoestarWarning
from joestar.lowering.origin import is_own, is_user, node_frames, node_line
from joestar.lowering.rules.arguments import argument, dims
from joestar.lowering.sizes import expression

_SQUEEZE = torch.ops.aten.squeeze


def keep_rows(gm: fx.GraphModule) -> None:
    """Makes every ``squeeze`` one of columns, which leaves rows alone in every batch, and says so of the user's own."""
    for node in gm.graph.nodes:
        if node.target not in (_SQUEEZE.default, _SQUEEZE.dim, _SQUEEZE.dims):
            continue
        value = node.args[0].meta["val"]
        none = node.target is _SQUEEZE.dims and not argument(node, "dim")
        asked = [] if none else dims(node, value.dim())
        if all(expression(value.shape[dim]) is None for dim in asked):
            continue
        columns = [dim for dim in asked if expression(value.shape[dim]) is None and value.shape[dim] == 1]
        node.target, node.args, node.kwargs = _SQUEEZE.dims, (node.args[0], columns), {}
        files = [file for file, *_ in node_frames(node) if is_user(file)]
        if files and is_own(files[-1]):
            named = [dim - value.dim() for dim in columns]
            instead = "There is nothing else to drop: leave it out"
            if named:
                instead = f"Name the columns: squeeze({named[0] if len(named) == 1 else tuple(named)})"
            warnings.warn(
                "squeeze leaves rows alone here, as many as a batch has; PyTorch drops their dimension where there is "
                f"one. {instead}.\n  at {node_line(node)}",
                JoestarWarning,
                stacklevel=2,
            )
    gm.recompile()
