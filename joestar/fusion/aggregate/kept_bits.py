"""The aggregation notes which entries of the rows that it reads are positive and kept; its gradient reads those bits.

Before                                               After, if ``stored`` is chosen
    bits = joestar.dropout_bits(ids, key, ...)           bits    = joestar.dropout_bits(ids, key, ...)
    both = joestar.aggregate_cat(sub, local, h, bits,    both, _ = joestar.aggregate_cat_kept(sub, local, h, bits,
                                 2.0, "mean")                                                 2.0, "mean")

The gradient of the first reads every row of ``h`` again, for nothing but signs. That of the second reads one bit for
each entry, and ``h`` need not live until then. The same for ``aggregate_rows``.

A choice ``mask:hop1`` per aggregation, named as for ``backward-format``: by default ``stored`` on a GPU, and on a CPU
``recomputed``, where packing the bits costs more than it saves.

Must not fire where no ReLU and dropout are applied, where no gradient flows to the rows, or where another form of the
backward pass is chosen (``aggregate_cat_by``).
"""

import operator

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.match.emit import emit
from joestar.fusion.record import Reject

PATTERN = "kept-bits"
STORED, RECOMPUTED = "stored", "recomputed"
_JOESTAR = torch.ops.joestar
_CAT, _CAT_BY, _ROWS = (
    getattr(_JOESTAR, name).default for name in ("aggregate_cat", "aggregate_cat_by", "aggregate_rows")
)
_KEPT = {_CAT: _JOESTAR.aggregate_cat_kept.default, _ROWS: _JOESTAR.aggregate_rows_kept.default}
_BITS = {_CAT: 3, _CAT_BY: 3, _ROWS: 5}
"""Position of the bits among the arguments."""


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every aggregation whose bits are to be stored; returns how many."""
    changed, taken = 0, {}
    for node in list(gm.graph.nodes):
        if node.target in _BITS and context.admits(PATTERN, node, _chosen(node, taken, context)):
            _rewrite(gm.graph, node, context)
            changed += 1
    return changed


def _chosen(node: fx.Node, taken: dict[str, int], context) -> bool | Reject:
    if node.args[_BITS[node.target]] is None:
        return Reject("no ReLU and dropout are applied where rows are read")
    if node.target is _CAT_BY:
        return Reject(f"the backward pass {node.args[-1]} is chosen")
    if not context.depends_on_grad(node.args[2]):
        return Reject("no gradient flows to the aggregated rows")
    default = STORED if context.device == "cuda" else RECOMPUTED
    form = context.choose("mask", site_name(node, taken), (RECOMPUTED, STORED), default, node)
    return True if form == STORED else Reject(f"{RECOMPUTED} is chosen")


def _rewrite(graph: fx.Graph, node: fx.Node, context) -> None:
    with graph.inserting_before(node):
        both = emit(graph, node, _KEPT[node.target], *node.args)
        rows = emit(graph, node, operator.getitem, both, 0)
    context.fired(PATTERN, rows, f"{node.args[2].name} is not read again")
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
