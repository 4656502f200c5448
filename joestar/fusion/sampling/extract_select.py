"""Extract-select: slicing columns and sampling them become one op, and the slice is never stored (gSampler 4.2).

Before                                                         After
    sliced, sources, _ = slice_cols(indptr, indices, dsts,         sub, picked, _ = sample_cols(indptr, indices,
                                    count, slice_size)                 dsts, count, k, replace, key, site, size)
    sub, picked, _ = rowwise_sample(sliced, sources, dsts,
                                    k, replace, key, site, size)

Must not fire when the slice has another reader (a model that also wants every edge), or when the rows are hashed under
other ids than the sliced destinations: the picks would change.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import hashed
from joestar.fusion.record import Reject

PATTERN = "extract-select"
_JOESTAR = torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every slice that only feeds a row-wise sample; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _JOESTAR.rowwise_sample.default:
            continue
        match = _match(node)
        if not context.admits(PATTERN, node, match):
            continue
        indptr, indices, dsts, count, _ = match.args
        _, _, _, k, replace, key, site, size = node.args[:8]
        node.kwargs = hashed(node)
        node.target = _JOESTAR.sample_cols.default
        node.args = (indptr, indices, dsts, count, k, replace, key, site, size)
        context.fired(PATTERN, node, f"fanout {k}")
        fused += 1
    return fused


def _match(node: fx.Node) -> fx.Node | Reject:
    """The ``slice_cols`` behind a ``rowwise_sample``."""
    sliced, sources, row_ids = node.args[:3]
    for part in (sliced, sources):
        if part.target is not operator.getitem or part.args[0].target is not _JOESTAR.slice_cols.default:
            return Reject("the sampled matrix is not a slice of columns")
        if set(part.users) != {node}:
            return Reject("the slice is read by another operation as well")
    if sliced.args[0] is not sources.args[0]:
        return Reject("indptr and indices come from different slices")
    if sliced.args[0].args[2] is not row_ids:
        return Reject("rows are hashed under other ids than the sliced destinations")
    return sliced.args[0]
