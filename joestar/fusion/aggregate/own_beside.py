"""Own rows that are read beside an aggregation of the same rows are columns of one matrix with it.

Before                                                  After
    y   = spmm(sub, local, x, None, "sum")                  both = aggregate_cat(sub, local, x, None, 1.0, "sum")
    own = aten.slice(x, 0, 0, num_dst)                      y    = aten.slice(both, 1, 0, F)
    m   = aten.mul(own, e)             e: trained           own  = aten.slice(both, 1, F, 2 F)
    z   = aten.add(y, m)                                    m    = aten.mul(own, e)
                                                            z    = aten.add(y, m)

What neither ``aggregate-update`` nor ``own-aggregate`` took: residuals without a product, gates, factors that are
trained. Nobody but the aggregation reads ``x`` then, so ``dropout-aggregate`` may follow; and the gradient of own rows,
of which there are few, is added where the kernel writes that of ``x``, not by a pass over all sources' rows.

Must not fire where ``x`` needs no gradients or has a reader besides the aggregation and its leading rows, or where the
aggregation is a max or min, or weighted.
"""

import torch
from torch import fx

from joestar.fusion.aggregate.aggregate_update import matrix_of, read_in_matrix
from joestar.fusion.match.emit import emit, leads, name, tensor
from joestar.fusion.record import Reject

PATTERN = "own-beside"
_ATEN, _SPMM = torch.ops.aten, torch.ops.joestar.spmm.default


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every aggregation that fits; returns how many."""
    joined = 0
    for node in list(gm.graph.nodes):
        if node.target is not _SPMM or _own(node) is None:
            continue
        if context.admits(PATTERN, node, _match(node, context)):
            _rewrite(gm.graph, node, context)
            joined += 1
    return joined


def _own(spmm: fx.Node) -> fx.Node | None:
    """The slice of the aggregated rows that has the destinations' own."""
    x = spmm.args[2]
    return next((user for user in x.users if leads(user, x, spmm.meta["val"].shape[0])), None)


def _match(spmm: fx.Node, context) -> bool | Reject:
    x, weight, reduce = spmm.args[2:]
    if reduce not in ("sum", "mean") or weight is not None:
        return Reject("the aggregation has edge weights" if weight is not None else f"the aggregation is a {reduce}")
    if tensor(x).dim() != 2 or not context.depends_on_grad(x):
        return Reject("the rows are no vectors, or need no gradients")
    for user in x.users:
        if user is not spmm and user.target is not _ATEN.slice.Tensor:
            return Reject(f"the rows are also read by {name(user)}")
    return True


def _rewrite(graph: fx.Graph, spmm: fx.Node, context) -> None:
    own, x = _own(spmm), spmm.args[2]
    matrix = matrix_of(graph, spmm, spmm)
    with graph.inserting_before(spmm):
        near = emit(graph, spmm, _ATEN.slice.Tensor, matrix, 1, 0, int(tensor(x).shape[1]))
    context.fired(PATTERN, matrix, f"{spmm.args[4]} and own rows of {x.name}")
    spmm.replace_all_uses_with(near)
    graph.erase_node(spmm)
    read_in_matrix(graph, matrix, own, x)
    if not own.users:
        graph.erase_node(own)
