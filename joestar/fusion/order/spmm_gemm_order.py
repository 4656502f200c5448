"""SpMM/GEMM order: update rows before they are aggregated, or aggregate first (thesis 5.3.3, figure 5.10).

Before (update first)                              After (aggregate first)
    h = aten.linear(x, w)            [num_src, C]      a = aten.mul(x, s)
    z = aten.mul(h, s)               s: [num_src, 1]   a = spmm(sub, local, a, None, "sum")       [num_dst, F]
    y = spmm(sub, local, z, None, "sum")               y = aten.linear(a, w)                      [num_dst, C]

Before (attention, H heads of C features)          After
    h = aten.unflatten(aten.linear(x, w), -1, [H, C])  v = (att * w.view(H, C, F)).sum(1)         [H, F]
    e = aten.sum(aten.mul(h, att), [-1])               e = aten.linear(x, v)
    y = spmm(sub, local, h, alpha, "sum")              a = spmm(sub, local, x[:, None], alpha, "sum")  [num_dst, H, F]
                                                       y = head_linear(a, w.view(H, C, F))           [num_dst, H, C]

And the other way round, where the aggregated rows have no reader but the product: ``linear(spmm(x), w, b)`` becomes
``spmm(linear(x, w)) + b``. Both are correct (sum and mean are linear); which is faster depends on sizes and device: the
place is a choice ``order:<weight>``, whose default is the cheaper one by an estimate (``order_cost``) under the sizes
of the traced batch.

Must not fire when the product has any reader but aggregations, the destinations' own rows, factors per row and
attention scores (a norm in between); when the aggregation is a max or min; when a bias meets heads or scores; when
a product would come before an aggregation of messages of edges; in float16, where products may be in range, and sums of
rows or products of single rows not; when roots of the sums follow, or what else is steep at 0.

A bias is added as often as it was aggregated: times the aggregated factors and weights, a number per destination. Of
own rows that several blocks read there is one product, of the most of them.

Rows without edges are empty sums: a gradient that reaches them goes nowhere if rows are updated first, and is
multiplied by zeros otherwise. Where it is infinite, only the latter makes the weight's gradient NaN: rows that are
written to be updated first stay so. The other way round a NaN of the user's own may become a zero.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from joestar.fusion.match.emit import emit, is_column, is_product, leads, name, scaled
from joestar.fusion.match.gathers import at_most
from joestar.fusion.match.rounding import in_range
from joestar.fusion.match.scores import by_head, heads_of, is_score, replace, score
from joestar.fusion.match.steep import steep_behind
from joestar.fusion.order import order_cost
from joestar.fusion.order.order_cost import AGGREGATE, UPDATE
from joestar.fusion.record import Reject

PATTERN = "spmm-gemm-order"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _LINEAR = _JOESTAR.spmm.default, _ATEN.linear.default


def run(gm: fx.GraphModule, context) -> int:
    """Exchanges every product and aggregation whose other order is chosen; returns how many."""
    moved = 0
    products = [node for node in gm.graph.nodes if is_product(node)]
    before = [node for node in products if _aggregates(node)]
    behind = [node for node in products if node not in before and _reads_aggregated(node)]
    for node in products:
        if node in before and _aggregates(node):
            moved += _aggregate_first(gm, node, context)
        elif node in behind and _reads_aggregated(node):
            moved += _update_first(gm, node, context)
    return moved


def _reads_aggregated(linear: fx.Node) -> bool:
    return isinstance(linear.args[0], fx.Node) and linear.args[0].target is _SPMM


def _aggregates(linear: fx.Node) -> bool:
    """Whether an aggregation reads the product, through factors, heads or slices."""
    stack = list(linear.users)
    while stack:
        node = stack.pop()
        if node.target is _SPMM:
            return True
        if node.target in (_ATEN.unflatten.int, _ATEN.slice.Tensor) or (
            node.target is _ATEN.mul.Tensor and any(map(is_column, node.args))
        ):
            stack.extend(node.users)
    return False


# --- aggregate first ---


@dataclass
class _Product:
    """A linear map whose readers commute with it.

    Attributes:
        linear: the node; heads: into how many its result is split, at most.
        steps: readers in graph order: (kind, node, what it reads).
    """

    linear: fx.Node
    heads: int = 1
    steps: list[tuple[str, fx.Node, fx.Node]] = field(default_factory=list)

    def of(self, kind: str) -> list[fx.Node]:
        """Readers of a kind."""
        return [node for found, node, _ in self.steps if found == kind]


def _read(linear: fx.Node) -> _Product | Reject:
    """Every reader of the product, or why one of them does not commute with it."""
    product = _Product(linear)
    bias = len(linear.args) > 2 and linear.args[2] is not None
    if bias and linear.args[2].meta["val"].dim() > 1:
        return Reject("the bias is a matrix")
    stack = [linear]
    while stack:
        value = stack.pop(0)
        for user in value.users:
            kind = _kind(user, value)
            if isinstance(kind, Reject):
                return kind
            if bias and kind in ("score", "heads"):
                return Reject("the product has a bias, and attention reads it")
            weight = user.args[3] if bias and kind == "spmm" else None
            if weight is not None and weight.meta["val"].dim() != 1:
                return Reject("the product has a bias, and the heads are aggregated with a weight each")
            factor = scaled(user, value) if kind == "factor" else weight
            if factor is not None and _wider(factor, value):
                return Reject("the rows are scaled in a wider dtype than their own")
            if kind == "heads":
                product.heads = max(product.heads, heads_of(user))
            if kind == "slice" and not all(is_score(reader, user) for reader in user.users):
                kind = "own"
            product.steps.append((kind, user, value))
            if kind in ("factor", "heads", "slice"):
                stack.append(user)
    order = {node: position for position, node in enumerate(linear.graph.nodes)}
    product.steps.sort(key=lambda step: order[step[1]])
    for spmm in product.of("spmm"):
        if steep := steep_behind(spmm):
            return Reject(f"{name(steep)} behind it has an infinite gradient where no edge is aggregated")
    return product if product.of("spmm") else Reject("nothing aggregates the product")


def _wider(factor: fx.Node, rows: fx.Node) -> bool:
    own = rows.meta["val"].dtype
    return torch.promote_types(factor.meta["val"].dtype, own) != own


def _kind(user: fx.Node, value: fx.Node) -> str | Reject:
    rows = value.meta["val"]
    if user.target is _SPMM and user.args[2] is value:
        if user.args[4] not in ("sum", "mean"):
            return Reject(f"the aggregation is a {user.args[4]}")
        if user.args[3] is value or (rows.dim() == 3 and (user.args[3] is None or user.args[3].meta["val"].dim() != 2)):
            return Reject("the heads are aggregated with one weight for all")
        return "spmm"
    if user.target is _ATEN.slice.Tensor and leads(user, value, user.meta["val"].shape[0]):
        return "slice"
    if scaled(user, value) is not None:
        return "factor"
    if user.target is _ATEN.unflatten.int and rows.dim() == 2 and user.args[1] in (-1, 1) and len(user.args[2]) == 2:
        return "heads"
    if is_score(user, value):
        return "score"
    return Reject(f"the product is also read by {name(user)}")


def _aggregate_first(gm: fx.GraphModule, linear: fx.Node, context) -> int:
    product = _read(linear) if (held := in_range(context, linear)) else held
    if not isinstance(product, Reject):
        costs = _costs(product, context)
        default = AGGREGATE if costs[AGGREGATE] < costs[UPDATE] else UPDATE
        chosen = context.choose("order", _site(linear), (UPDATE, AGGREGATE), default, linear)
        if chosen == UPDATE:
            product = Reject("updating first is chosen" + (", by cost" if default == UPDATE else ""))
    if not context.admits(PATTERN, linear, product):
        return 0
    _exchange(gm.graph, product, context)
    context.fired(PATTERN, product.steps[-1][1], f"aggregates before {_site(linear)}")
    _erase(gm.graph, product)
    return 1


def _site(linear: fx.Node) -> str:
    return linear.args[1].name


def _exchange(graph: fx.Graph, product: _Product, context) -> None:
    """Computes what every reader gives from the rows before the product."""
    linear = product.linear
    x, weight = linear.args[:2]
    bias = linear.args[2] if len(linear.args) > 2 else None
    rows = {linear: x}  # what stands for a value before the product
    factors = {linear: None}  # by what the rows of a value are scaled, if there is a bias: it is as well
    owns: list[tuple[fx.Node, fx.Node]] = []  # (own rows' place, their product), the most of them first
    for kind, node, value in product.steps:
        with graph.inserting_before(node):
            if kind == "heads":
                rows[node] = rows[value]
            elif kind == "factor":
                rows[node] = emit(graph, node, _ATEN.mul.Tensor, rows[value], scaled(node, value))
                factors[node] = _both(graph, node, factors[value], scaled(node, value), bias)
            elif kind == "slice":
                rows[node] = emit(graph, node, _ATEN.slice.Tensor, rows[value], *node.args[1:])
            elif kind == "own":
                new = _own(graph, node, value, rows[value], weight, bias, factors.get(value), owns, context)
                replace(graph, node, context, _split(graph, node, new))
            elif kind == "score":
                (total,) = node.users
                replace(graph, total, context, score(graph, node, value, rows[value], weight, None))
            else:
                new = _aggregated(graph, node, rows[value], weight, bias, factors.get(value), context)
                replace(graph, node, context, new)


def _both(graph: fx.Graph, like: fx.Node, one: fx.Node | None, other: fx.Node, bias: fx.Node | None) -> fx.Node | None:
    """Both factors, if there is a bias."""
    if bias is None:
        return None
    other = _as_wide(graph, like, other, bias)
    return other if one is None else emit(graph, like, _ATEN.mul.Tensor, one, other)


def _as_wide(graph: fx.Graph, like: fx.Node, factor: fx.Node, bias: fx.Node) -> fx.Node:
    """A factor at least in the dtype of the bias, in which it is added up; it may be a mask, or narrower than rows."""
    own = factor.meta["val"].dtype
    dtype = torch.promote_types(own, bias.meta["val"].dtype)
    return factor if own == dtype else emit(graph, like, _ATEN.to.dtype, factor, dtype)


def _own(graph, node: fx.Node, value: fx.Node, x: fx.Node, weight: fx.Node, bias, factor, owns, context) -> fx.Node:
    """The product of the destinations' own rows; the first rows of one that is there already."""
    count = node.meta["val"].shape[0]
    for other, made in owns:
        if other.args[0] is value and at_most(graph, count, other.meta["val"].shape[0]):
            return emit(graph, node, _ATEN.slice.Tensor, made, *node.args[1:])
    own = emit(graph, node, _ATEN.slice.Tensor, x, *node.args[1:])
    if bias is None or factor is None:
        new = emit(graph, node, _LINEAR, own, weight, bias)
    else:
        scale = emit(graph, node, _ATEN.slice.Tensor, factor, *node.args[1:])
        new = _biased(graph, node, emit(graph, node, _LINEAR, own, weight), scale, bias, context)
    owns.append((node, new))
    return new


def _split(graph: fx.Graph, node: fx.Node, rows: fx.Node) -> fx.Node:
    """Rows ``[n, H C]`` as ``[n, H, C]`` if the node they stand for has heads."""
    shape = node.meta["val"].shape
    return emit(graph, node, _ATEN.unflatten.int, rows, -1, [*map(int, shape[1:])]) if len(shape) == 3 else rows


def _aggregated(graph, spmm: fx.Node, x: fx.Node, weight: fx.Node, bias, factor, context) -> fx.Node:
    indptr, indices, value, edge_weight, reduce = spmm.args
    if value.meta["val"].dim() == 3:
        shared = emit(graph, spmm, _ATEN.unsqueeze.default, x, 1)
        rows = emit(graph, spmm, _SPMM, indptr, indices, shared, edge_weight, reduce)
        return emit(graph, spmm, _JOESTAR.head_linear.default, rows, by_head(graph, spmm, weight, heads_of(value)))
    rows = emit(graph, spmm, _SPMM, indptr, indices, x, edge_weight, reduce)
    new = emit(graph, spmm, _LINEAR, rows, weight)
    return new if bias is None else _biased(graph, spmm, new, _times(graph, spmm, bias, factor), bias, context)


def _biased(graph: fx.Graph, node: fx.Node, rows: fx.Node, times: fx.Node, bias: fx.Node, context) -> fx.Node:
    """``rows + times * bias``, under autocast in the dtype of what ``node`` gives: a bias is in float32."""
    added = emit(graph, node, _ATEN.mul.Tensor, times, bias)
    if context.autocast is not None:
        context.dtypes.take_in(graph)
        if context.dtypes.values[node].dtype == context.autocast:
            added = emit(graph, node, _ATEN.to.dtype, added, context.autocast)
    return emit(graph, node, _ATEN.add.Tensor, rows, added)


def _times(graph: fx.Graph, spmm: fx.Node, bias: fx.Node, factor: fx.Node | None) -> fx.Node:
    """What the bias of a row was multiplied by until it was aggregated, ``[num_dst, 1]``."""
    indptr, indices, _, edge_weight, reduce = spmm.args
    if factor is not None:
        return emit(graph, spmm, _SPMM, indptr, indices, factor, edge_weight, reduce)
    if edge_weight is not None:
        size = graph.call_function(_ATEN.sym_size.int, (edge_weight, 0))
        size.meta = {**spmm.meta, "val": edge_weight.meta["val"].shape[0]}
        like = indices.meta["val"]
        edges = emit(graph, spmm, _ATEN.arange.default, size, dtype=like.dtype, device=like.device)
        column = _as_wide(graph, spmm, emit(graph, spmm, _ATEN.unsqueeze.default, edge_weight, 1), bias)
        return emit(graph, spmm, _SPMM, indptr, edges, column, None, reduce)
    high = emit(graph, spmm, _ATEN.slice.Tensor, indptr, 0, 1, 9223372036854775807)
    low = emit(graph, spmm, _ATEN.slice.Tensor, indptr, 0, 0, -1)
    degree = emit(graph, spmm, _ATEN.sub.Tensor, high, low)
    if reduce == "mean":
        degree = emit(graph, spmm, _ATEN.clamp.default, degree, 0, 1)
    times = emit(graph, spmm, _ATEN.to.dtype, degree, bias.meta["val"].dtype)
    return emit(graph, spmm, _ATEN.unsqueeze.default, times, -1)


def _erase(graph: fx.Graph, product: _Product) -> None:
    """Removes what nobody reads any more, last first."""
    old = [node for kind, node, _ in product.steps] + [
        total for node in product.of("score") for total in list(node.users)
    ]
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in sorted({*old, product.linear}, key=order.__getitem__, reverse=True):
        graph.erase_node(node)


# --- update first ---


def _update_first(gm: fx.GraphModule, linear: fx.Node, context) -> int:
    """``linear(spmm(x), w, b)`` as ``spmm(linear(x, w)) + b``."""
    match = _aggregated_rows(linear) if (held := in_range(context, linear)) else held
    if not isinstance(match, Reject):
        costs = _costs_of(linear, match, context)
        default = UPDATE if costs[UPDATE] < costs[AGGREGATE] else AGGREGATE
        chosen = context.choose("order", _site(linear), (UPDATE, AGGREGATE), default, linear)
        if chosen == AGGREGATE:
            match = Reject("aggregating first is chosen" + (", by cost" if default == AGGREGATE else ""))
    if not context.admits(PATTERN, linear, match):
        return 0
    indptr, indices, x, edge_weight, reduce = match.args
    with gm.graph.inserting_before(linear):
        rows = emit(gm.graph, linear, _LINEAR, x, linear.args[1])
        new = emit(gm.graph, linear, _SPMM, indptr, indices, rows, edge_weight, reduce)
        if len(linear.args) > 2 and linear.args[2] is not None:
            bias = linear.args[2]
            if context.autocast is not None and _hands_out_rows(gm.graph):  # their dtype is that of a product
                bias = emit(gm.graph, linear, _ATEN.to.dtype, bias, context.autocast)
            new = emit(gm.graph, linear, _ATEN.add.Tensor, new, bias)
    context.fired(PATTERN, new, f"applies {_site(linear)} before aggregating")
    linear.replace_all_uses_with(new)
    gm.graph.erase_node(linear)
    gm.graph.erase_node(match)
    return 1


def _hands_out_rows(graph: fx.Graph) -> bool:
    """Whether the program's result is rows, not a loss."""
    (output,) = graph.find_nodes(op="output")
    return output.args[0][0].meta["val"].dim() > 0


def _aggregated_rows(linear: fx.Node) -> fx.Node | Reject:
    spmm = linear.args[0]
    if spmm.args[4] not in ("sum", "mean"):
        return Reject(f"the aggregation is a {spmm.args[4]}")
    if spmm.meta["val"].dim() != 2:
        return Reject("the aggregated rows are no vectors")
    if spmm.args[1].target is _ATEN.arange.default:
        return Reject("messages of edges are aggregated, and there are more of these than results")
    return spmm if len(spmm.users) == 1 else Reject("the aggregated rows have another reader")


# --- what either order costs ---


def _costs(product: _Product, context) -> dict[str, float]:
    spmm = product.of("spmm")[0]
    x, weight = product.linear.args[:2]
    own = max((context.size(node.meta["val"].shape[0]) for node in product.of("own")), default=0)
    return _estimate(context, spmm, x, weight, product.heads, len(product.of("score")), spmm.args[3], own)


def _costs_of(linear: fx.Node, spmm: fx.Node, context) -> dict[str, float]:
    return _estimate(context, spmm, spmm.args[2], linear.args[1], 1, 0, spmm.args[3])


def _estimate(context, spmm, x, weight, heads: int, scores: int, edge_weight, own: int = 0) -> dict[str, float]:
    """Seconds of either order, forward and backward, under the traced batch's sizes."""
    columns, width = map(int, weight.meta["val"].shape)
    exchange = order_cost.Exchange(
        src=context.size(x.meta["val"].shape[0]), dst=context.size(spmm.meta["val"].shape[0]),
        edges=_edges(spmm, context), width=width, columns=columns, heads=heads,
        size=x.meta["val"].element_size(), scores=scores, own=own, table=_reads_table(x, context),
        in_place=context.device == "cuda", grad_rows=context.depends_on_grad(x),
        grad_edges=edge_weight is not None and context.depends_on_grad(edge_weight),
    )  # fmt: skip
    return order_cost.seconds(exchange, order_cost.SPEEDS.get(context.device, order_cost.SPEEDS["cpu"]))


def _edges(spmm: fx.Node, context) -> int:
    """Edges that are aggregated over; of the first rows of a union of hops, their share, as if degrees were equal."""
    indptr, edges = spmm.args[0], context.size(spmm.args[1].meta["val"].shape[0])
    if indptr.target is not operator.getitem or indptr.args[0].target is not _JOESTAR.first_rows.default:
        return edges
    whole, rows = (context.size(node.meta["val"].shape[0]) for node in (indptr.args[0].args[0], indptr))
    return max(1, edges * rows // whole)


def _reads_table(x: fx.Node, context) -> bool:
    """Whether the rows are gathered from a table without gradients: aggregation then reads them in place."""
    if x.target is not _ATEN.index_select.default:
        return False
    return x.args[0].op == "placeholder" and not context.needs_grad(x.args[0])
