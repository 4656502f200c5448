"""Small products whose rows are no multiple of 16 bytes are multiplied by a kernel of ours (GPU).

Before                                                 After
    y = aten.mm(x, w)           w: [F, 47], 16 bits        y = mm_unaligned(x, w, None)
    y = aten.addmm(b, x, w)                                y = mm_unaligned(x, w, b)

The library reads and writes 16 bytes at a time, and has slow kernels for what is laid out otherwise: those of the last
layer, where there are 47 classes, forward and backward. On a graph of Inductor's, in front of its own rewrites.

Must not fire for many rows or wide ones (sums over the rows of a batch among them), for sizes that are not known
(padded programs know them), where no tensor core multiplies (float32 without TF32), or for rows that fit.
"""

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.kernels import has_triton
from joestar.kernels.machine import in_tensor_cores

NAME = "unaligned-products"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_ROWS, _WIDE = 2**12, 512
"""Most rows, and numbers of a row, of either operand: with products of up to 16,384 rows dot-product attention was
slower."""
_ALIGNMENT = 16
"""Bytes."""


def run(graph: fx.Graph) -> int:
    """Rewrites every product that fits; returns how many."""
    if not has_triton():
        return 0
    made = 0
    for target in (_ATEN.mm.default, _ATEN.addmm.default):
        for node in list(graph.find_nodes(op="call_function", target=target)):
            bias, rows, weight = node.args if target is _ATEN.addmm.default else (None, *node.args)
            if node.kwargs or not _fits(rows, weight, bias):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(_JOESTAR.mm_unaligned.default, (rows, weight, bias))
            new.meta = {**origin(node), "val": node.meta["val"]}
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            made += 1
    return made


def _fits(rows: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    x, w, added = tensor(rows), tensor(weight), None if bias is None else tensor(bias)
    if x is None or w is None or x.device.type != "cuda" or not in_tensor_cores(x.dtype):
        return False
    sizes = (*x.shape, w.shape[1])
    if not all(isinstance(size, int) and size > 1 for size in sizes):
        return False
    n, width, columns = sizes
    if bias is not None and (added is None or added.shape != (columns,) or added.dtype != x.dtype):
        return False
    if n > _ROWS or width > _WIDE or columns > _WIDE or x.stride() != (width, 1):
        return False
    across = max(w.stride())
    return any(size * x.dtype.itemsize % _ALIGNMENT for size in (width, columns, across))
