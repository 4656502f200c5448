"""A product of neighbours' and own rows side by side is a sum of two products: the form that the passes behind it take.

Before (GraphSAGE as its paper has it)              After
    y    = spmm(sub, local, x, None, "mean")            y    = spmm(sub, local, x, None, "mean")
    own  = aten.slice(x, 0, 0, num_dst)                 own  = aten.slice(x, 0, 0, num_dst)
    both = aten.cat([own, y], 1)                        a    = aten.linear(y, w[:, F:], b)
    out  = aten.linear(both, w, b)                      c    = aten.linear(own, w[:, :F])
                                                        out  = aten.add(a, c)

``spmm-gemm-order`` may then exchange the first product and the aggregation, and ``aggregate-update`` puts both rows
into one matrix while they are aggregated: no copy of them is made side by side.

Must not fire when what stands side by side is not one aggregation and the destinations' own rows, when it has another
reader than the product, when the aggregation is a max or min, or weighted, or in float16, which holds the sum of both
products where it may not hold each.
"""

import torch
from torch import fx

from joestar.fusion.match.emit import emit, has_plain_bias, is_product, leads, tensor
from joestar.fusion.match.rounding import in_range
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument

PATTERN = "split-update"
_ATEN, _SPMM = torch.ops.aten, torch.ops.joestar.spmm.default


def run(gm: fx.GraphModule, context) -> int:
    """Splits every product that fits; returns how many."""
    split = 0
    for node in list(gm.graph.nodes):
        if not is_product(node) or node.args[0].target is not _ATEN.cat.default or not _aggregated(node.args[0]):
            continue
        if context.admits(PATTERN, node, _match(node, context)):
            _rewrite(gm.graph, node, context)
            split += 1
    return split


def _aggregated(cat: fx.Node) -> list[fx.Node]:
    """The aggregations among what stands side by side."""
    return [part for part in cat.args[0] if part.target is _SPMM]


def _match(linear: fx.Node, context) -> bool | Reject:
    cat = linear.args[0]
    parts, found = cat.args[0], _aggregated(cat)
    if len(parts) != 2 or len(found) != 1 or argument(cat, "dim") not in (1, -1):
        return Reject("it is not of one aggregation and own rows side by side")
    if len(cat.users) != 1:
        return Reject("the rows side by side have another reader")
    if not has_plain_bias(linear):
        return Reject("the bias is broadcast over the columns")
    spmm, own = found[0], next(part for part in parts if part is not found[0])
    if spmm.args[4] not in ("sum", "mean") or spmm.args[3] is not None:
        return Reject("the aggregation has edge weights" if spmm.args[3] else f"the aggregation is a {spmm.args[4]}")
    if not leads(own, spmm.args[2], spmm.meta["val"].shape[0]):
        return Reject("the other rows are not the destinations' own")
    same = tensor(own).dim() == 2 and tensor(own).dtype == tensor(spmm).dtype
    return in_range(context, cat) if same else Reject("the own rows have another dtype or heads")


def _rewrite(graph: fx.Graph, linear: fx.Node, context) -> None:
    cat, weight = linear.args[:2]
    bias = linear.args[2] if len(linear.args) > 2 else None
    products, first = {}, 0
    with graph.inserting_before(linear):
        for part in cat.args[0]:
            columns = int(tensor(part).shape[1])
            own = emit(graph, linear, _ATEN.slice.Tensor, weight, 1, first, first + columns)
            extra = (bias,) if part.target is _SPMM and bias is not None else ()
            products[part] = emit(graph, linear, _ATEN.linear.default, part, own, *extra)
            first += columns
        (near,) = _aggregated(cat)
        (other,) = (product for part, product in products.items() if part is not near)
        new = emit(graph, linear, _ATEN.add.Tensor, products[near], other)
    context.fired(PATTERN, new, f"{near.args[4]} and own rows of {near.args[2].name}")
    linear.replace_all_uses_with(new)
    graph.erase_node(linear)
    graph.erase_node(cat)
