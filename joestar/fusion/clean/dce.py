"""Dead-code elimination: nodes that nobody reads and that write nothing.

Before                                   After
    a = aten.relu(x)                         b = aten.neg(x)
    b = aten.neg(x)                          return b
    return b

Must not fire on writes to buffers (``aten.add_(num_batches_tracked, 1)``, ``aten.batch_norm`` in training), nor on the
last op that makes a set whose size is read as a number (``x / block.num_src``): padding takes the true one from it.
Inputs of the graph stay, read or not: their roles are kept by position.
"""

import torch
from torch import fx

from joestar.lowering.functional import is_in_place
from joestar.lowering.sizes import is_counted

_KEEP = {torch.ops.aten.batch_norm.default}


def run(gm: fx.GraphModule, context) -> int:
    """Removes dead nodes; returns how many."""
    removed = 0
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or node.target in _KEEP or is_in_place(node):
            continue
        if is_counted(node):
            continue
        gm.graph.erase_node(node)
        removed += 1
    return removed
