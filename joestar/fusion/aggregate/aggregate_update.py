"""Aggregation and update: neighbours' and own rows side by side in one matrix, one GEMM for both (thesis 5.3.2).

Before (first layer)                                    After
    y, _ = sample_aggregate(indptr, indices, dsts,          both, _ = sample_aggregate_cat(indptr, indices, dsts,
                            ..., features, "mean")                                  ..., features, "mean")
    own  = aten.index_select(features, 0, dsts)             w    = join_columns([w_l, w_r, b], width)
    a    = aten.linear(y, w_l, b)                           out  = aten.linear(both, w)
    c    = aten.linear(own, w_r)
    out  = aten.add(a, c)

Before (inner layer)                                    After
    y    = spmm(sub, local, x, None, "mean")                both = aggregate_cat(sub, local, x, None, 1.0, "mean")
    own  = aten.slice(x, 0, 0, num_dst)                     w    = join_columns([w_l, w_r], 2 F)
    ...as above                                             out  = aten.linear(both, w, b)

The kernel writes ``[y, own]``; one product reads it once, without adding to an earlier result. In the first layer a
column of ones follows, which makes the bias part of the weights: its gradient is then a column of theirs, not a
reduction of its own over the many rows. (An inner layer's matrix has a gradient itself: no column that needs none.)
Where both weights are neighbouring columns of one (``split-update``), that one is taken.

What else reads the own rows (a residual, a gate), or fewer of them (the seeds' rows, for jumping knowledge), may read
them in the matrix: their gradient is then one of few destinations, and nobody but the aggregation reads the sources'
rows. A choice ``own:hop<n>`` per place with such readers, by default ``in-matrix`` on a GPU and ``apart`` on a CPU.

Must not fire when the aggregated rows or either product has another reader (a norm in between), when own rows that stay
apart have one, when they are those of other nodes, or when the aggregation is no sum or mean, or weighted.
"""

import operator

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.match.emit import emit, has_plain_bias, is_product, leads, tensor
from joestar.fusion.match.gathers import at_most
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape, same_size

PATTERN = "aggregate-update"
APART, IN_MATRIX = "apart", "in-matrix"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Joins every pair of products that fits; returns how many."""
    joined, taken = 0, {}
    for node in list(gm.graph.nodes):
        if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        pair = _linear_pair(node)
        if pair is None:
            continue
        match = _match(*pair)
        in_matrix = bool(match) and _reads_matrix(*pair, taken, context)
        if match and not in_matrix and len(pair[1].args[0].users) > 1:
            match = Reject("own rows have another reader")
        if context.admits(PATTERN, node, match):
            _rewrite(gm, node, *pair, context, in_matrix)
            joined += 1
    return joined


def _linear_pair(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(product of the aggregated rows, the other product) if the node adds such a pair."""
    for first, second in (node.args, node.args[::-1]):
        if is_product(first) and is_product(second) and _aggregation(first.args[0]) is not None:
            return first, second
    return None


def _aggregation(rows: fx.Node) -> fx.Node | None:
    """The aggregation whose result the rows are."""
    if rows.target is _JOESTAR.spmm.default:
        return rows
    if rows.target is operator.getitem and rows.args[1] == 0:
        source = rows.args[0]
        return source if source.target is _JOESTAR.sample_aggregate.default else None
    return None


def _match(first: fx.Node, second: fx.Node) -> bool | Reject:
    rows, own = first.args[0], second.args[0]
    source = _aggregation(rows)
    reason = _own_rows(source, own) if source is not rows else _own_slice(rows, own)
    if reason:
        return Reject(reason)
    reduce = argument(source, "reduce")
    if reduce not in ("sum", "mean"):
        return Reject(f"the aggregation is a {reduce}")
    if rows.meta["val"].dim() != 2:
        return Reject("the rows are no vectors")
    if not same_shape(first.meta["val"].shape, second.meta["val"].shape):
        return Reject("one product is broadcast over the columns of the other")
    if not (has_plain_bias(first) and has_plain_bias(second)):
        return Reject("a bias is broadcast over the columns")
    for part, text in ((first, "a product has"), (second, "a product has"), (rows, "the aggregation has")):
        if len(part.users) != 1:
            return Reject(f"{text} another reader")
    return True


def _reads_matrix(first: fx.Node, second: fx.Node, taken: dict[str, int], context) -> bool:
    """Whether other readers of the own rows, if there are any, shall read them in the matrix."""
    own, source = second.args[0], _aggregation(first.args[0])
    inner = source is first.args[0]
    if len(own.users) < 2 and not (inner and _leading(source.graph, source.args[2], own)):
        return False
    return chosen("own", site_name(source, taken), context, source)


def chosen(kind: str, name: str, context, node: fx.Node) -> bool:
    """Whether own rows are read in a matrix with the aggregated ones: a choice, by default taken on a GPU."""
    default = IN_MATRIX if context.device == "cuda" else APART
    return context.choose(kind, name, (APART, IN_MATRIX), default, node) == IN_MATRIX


def _own_rows(fused: fx.Node, own: fx.Node) -> str:
    """Why ``own`` is not ``features[dsts]`` of a ``sample_aggregate``."""
    if own.target is not _ATEN.index_select.default or own.args[0] is not argument(fused, "x") or own.args[1] != 0:
        return "the other operand does not hold the destinations' own rows"
    return "" if own.args[2] is argument(fused, "dsts") else "the own rows are those of other nodes"


def _own_slice(spmm: fx.Node, own: fx.Node) -> str:
    """Why ``own`` is not ``x[:num_dst]`` of an ``spmm`` over ``x``."""
    if spmm.args[3] is not None:
        return "the aggregation has edge weights"
    if own.target is not _ATEN.slice.Tensor or own.args[0] is not spmm.args[2]:
        return "the other operand does not hold the destinations' own rows"
    return "" if leads(own, spmm.args[2], spmm.meta["val"].shape[0]) else "the own rows are those of other nodes"


def _rewrite(gm: fx.GraphModule, add: fx.Node, first: fx.Node, second: fx.Node, context, in_matrix: bool) -> None:
    graph, rows, own = gm.graph, first.args[0], second.args[0]
    source = _aggregation(rows)
    inner = source is rows
    matrix = matrix_of(graph, source, rows, None if in_matrix else add)
    width = int(tensor(matrix).shape[1])
    with graph.inserting_before(add):
        bias = _added_biases(graph, first, second)
        parts = [*_joined(first.args[1], second.args[1]), *([bias] if bias is not None and not inner else [])]
        weight = parts[0]
        if len(parts) > 1 or int(tensor(weight).shape[1]) != width:
            weight = emit(graph, first, _JOESTAR.join_columns.default, parts, width)
        arguments = (matrix, weight, bias) if bias is not None and inner else (matrix, weight)
        product = graph.call_function(_ATEN.linear.default, arguments)
        product.meta = dict(add.meta)
    detail = f"{argument(source, 'reduce')} and own rows of {argument(source, 'x').name}"
    add.replace_all_uses_with(product)
    for node in (add, first, second):
        graph.erase_node(node)
    if in_matrix:
        read_in_matrix(graph, matrix, own, argument(source, "x") if inner else None)
    for node in dict.fromkeys((rows, source)):
        graph.erase_node(node)
    if not own.users:
        graph.erase_node(own)
    context.fired(PATTERN, product, detail)


def matrix_of(graph: fx.Graph, source: fx.Node, rows: fx.Node, reader: fx.Node | None = None) -> fx.Node:
    """Aggregated and own rows side by side, in front of their reader; as early as can be if they may have others."""
    place = graph.inserting_before(reader) if reader else graph.inserting_after(_last(graph, source.all_input_nodes))
    with place:
        if source is rows:
            indptr, indices, x, _, reduce = rows.args
            return emit(graph, rows, _JOESTAR.aggregate_cat.default, indptr, indices, x, None, 1.0, reduce)
        both = emit(graph, source, _JOESTAR.sample_aggregate_cat.default, *source.args, **source.kwargs)
    both.meta["val"] = (both.meta["val"][0], source.meta["val"][1])
    with graph.inserting_after(both):
        matrix = emit(graph, rows, operator.getitem, both, 0)
    for user in [user for user in source.users if user is not rows]:
        user.update_arg(0, both)
    return matrix


def _last(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    """The last of the nodes, but never an input in front of others."""
    wanted = {*nodes, *graph.find_nodes(op="placeholder")}
    return [node for node in graph.nodes if node in wanted][-1]


def _joined(left: fx.Node, right: fx.Node) -> list[fx.Node]:
    """Two matrices side by side: the one whose columns they are, where that is all of its columns in order."""
    if {left.target, right.target} == {_ATEN.slice.Tensor} and left.args[0] is right.args[0]:
        whole, columns = left.args[0], int(tensor(left).shape[1])
        ends = [[argument(part, key) for key in ("dim", "start", "end", "step")] for part in (left, right)]
        total = int(tensor(whole).shape[1])
        if ends == [[1, 0, columns, 1], [1, columns, total, 1]]:
            return [whole]
    return [left, right]


def read_in_matrix(graph: fx.Graph, matrix: fx.Node, own: fx.Node, x: fx.Node | None) -> None:
    """Lets what else reads the own rows, or the first of the aggregated rows ``x``, read them in the matrix."""
    width, count = int(tensor(own).shape[1]), tensor(own).shape[0]
    after = set(_behind(graph, matrix))
    for part in [own, *(_leading(graph, x, own) if x is not None else ())]:
        rows = tensor(part).shape[0]
        if not part.users or not after >= set(part.users):
            continue
        with graph.inserting_before(next(node for node in graph.nodes if node in part.users)):
            new = emit(graph, part, _ATEN.slice.Tensor, matrix, 1, width, 2 * width)
            if part is not own and not same_size(rows, count):
                new = emit(graph, part, part.target, new, *part.args[1:])
        part.replace_all_uses_with(new)
        if part is not own:
            graph.erase_node(part)


def _leading(graph: fx.Graph, x: fx.Node, own: fx.Node) -> list[fx.Node]:
    """Slices of the rows ``x`` that have the first of the own rows."""
    slices = [user for user in x.users if user is not own and user.target is _ATEN.slice.Tensor]
    count = tensor(own).shape[0]
    return [
        part for part in slices
        if leads(part, x, tensor(part).shape[0]) and at_most(graph, tensor(part).shape[0], count)
    ]  # fmt: skip


def _behind(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """What comes after a node in the order of the graph."""
    nodes = list(graph.nodes)
    return nodes[nodes.index(node) + 1 :]


def _added_biases(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """The bias of the sum of two products."""
    biases = [part.args[2] for part in (first, second) if len(part.args) > 2 and part.args[2] is not None]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.call_function(_ATEN.add.Tensor, tuple(biases))
    both.meta = {**first.meta, "val": biases[0].meta["val"]}
    return both
